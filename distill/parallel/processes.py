"""The processes of one run: who writes, who goes first, what all agree on. A single process needs none of it."""

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from distill.parallel.zero import prepare_for_cpu
from patches.errors import RetrofitError, first_line

T = TypeVar("T")
LAUNCH, ATTEMPT = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"  # what torchrun's agent tells its processes
PR_SET_PDEATHSIG = 1  # prctl(2)
# one process tokenises, or exports, while the others wait for it
PATIENCE = timedelta(hours=6)
# in a step all do the same: one that is so late hangs, and the others would burn their GPUs waiting for it
IN_STEP = timedelta(minutes=15)
_patient: dict[str, Any] = {}  # the group in which processes wait for one that works alone, once they have met
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what a launcher sets
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would find out by itself, and say so on stdout


def launch_of(first: bool = True) -> str | None:
    """What tells the launch that started this process from others; None where there was none, or, unless ``first``, if
    its processes were not started again."""
    launch = os.environ.get(LAUNCH, "none")  # torchrun's name for all launches that nobody named
    return None if launch == "none" or (not first and os.environ.get(ATTEMPT, "0") == "0") else launch


@dataclass(frozen=True)
class Processes:
    """This process among those of its run.

    Attributes:
        rank: its number, 0 for the one that prints and writes.
        count: how many there are on all machines.
        device: where this one computes.
        ours: whether :func:`join` made the process group, and :meth:`leave` ends it.
        patient: the group in which processes wait for one that works alone; None is torch's default.
    """

    rank: int = 0
    count: int = 1
    device: str = "cpu"
    ours: bool = False
    patient: Any = None

    @property
    def main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def wait(self) -> None:
        """Until every process is here."""
        wait_for_all(self.patient)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The block in one process of each machine, then in the others, which find what it has fetched or cached."""
        first = int(os.environ.get("LOCAL_RANK", "0")) == 0
        if not first:
            self.wait()
        yield
        if first:
            self.wait()

    def same(self, value: T) -> T:
        """The main process's ``value``, in every process."""
        if self.count == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.patient, device=torch.device(self.device))
        return box[0]

    def all_of(self, value: T) -> list[T]:
        """The ``value`` of each process, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.patient)
        return values

    def leave(self) -> None:
        """Once nothing is left to do together."""
        if self.ours and dist.is_initialized():
            self.wait()
            dist.destroy_process_group()


def started_together() -> bool:
    """Whether a launcher (ours, torchrun, accelerate launch) started this process as one of several, or one of one.

    Raises:
        RetrofitError: the environment has a part of what a launcher sets.
    """
    if not any(name in os.environ for name in LAUNCHED[:3]):
        return False
    missing = [name for name in LAUNCHED if not os.environ.get(name)]
    if missing:
        raise RetrofitError(
            f"{missing[0]} is not set in the environment, where other variables say that a launcher started this "
            f"process: set all of {', '.join(LAUNCHED)}, or none of them"
        )
    return True


def end_with_launcher() -> None:
    """Have the system kill this process with the agent of torchrun that started it, where it can (Linux).

    After a SIGKILL to the command alone its processes would train on, and write beside those that --resume starts.
    """
    if sys.platform == "linux" and LAUNCH in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def join(deepspeed: bool) -> Processes:
    """Meet the other processes of this run, by NCCL with GPUs and by gloo without.

    Raises:
        RetrofitError: the launcher asks for FSDP or for DeepSpeed, which the recipe does.
    """
    cuda = torch.cuda.is_available()
    if not started_together():
        return Processes(device="cuda" if cuda else "cpu")
    end_with_launcher()
    from accelerate import PartialState

    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise RetrofitError("accelerate's configuration asks for FSDP: remove it there and pass --fsdp")
    if not deepspeed and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise RetrofitError("accelerate's configuration asks for DeepSpeed: remove it there and pass --deepspeed FILE")
    ours = not dist.is_initialized()
    # torch has another name for it, which transformers does not know
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
    if deepspeed:
        # use_cpu=True or ACCELERATE_USE_CPU would have the DeepSpeed configuration ignored without a word, and without
        # a backend named here every process would take itself for the only one
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ.pop("ACCELERATE_USE_CPU", None)
        warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)  # DeepSpeed's calls
        if not cuda:
            prepare_for_cpu()
    try:
        how: dict[str, Any] = {"backend": "nccl" if cuda else "gloo"} if deepspeed else {"cpu": not cuda}
        state = PartialState(timeout=IN_STEP, **how)
    except (dist.DistError, ValueError) as error:
        place = ":".join(os.environ[name] for name in LAUNCHED[3:])
        why = first_line(error).rstrip(".")
        raise RetrofitError(
            f"the processes could not meet at {place} (MASTER_ADDR, MASTER_PORT): {why}: give an address that all of "
            "them reach, with a port that is free there"
        ) from None
    patient = _patient["group"] = dist.new_group(timeout=PATIENCE) if dist.is_initialized() else None
    return Processes(state.process_index, state.num_processes, str(state.device), ours, patient)


def met_before() -> bool:
    """Whether the processes of a launcher have met, by :func:`join` or otherwise."""
    from accelerate import PartialState

    return started_together() and PartialState._shared_state != {}


def wait_for_all(group: Any = None) -> None:
    """Wait until every process is here, in ``group`` or the one of :func:`join`, which allows hours."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(group=group or _patient.get("group"))


def any_of(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` is set in any process; all get the same answer at the same call."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    box = torch.tensor([float(flag)], device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return bool(box.item())

"""Starting a run in many processes, by torchrun's own agent: one per GPU, on one machine or several."""

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

import torch

from distill.parallel import EXIT_STATUS, pulse
from distill.parallel.processes import ATTEMPT, LAUNCH, started_together
from patches.errors import RetrofitError

RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
USER_ERROR = 2  # the status with which a process ends that has said what the user can do


@dataclass(frozen=True)
class Machines:
    """Where the processes run, in torchrun's words.

    Raises:
        RetrofitError: an impossible value, more processes than GPUs, or several machines without an address.
    """

    nproc: int | None = None  # processes on this machine
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = 29500
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if self.nnodes > 1 and self.master_addr is None:
            raise RetrofitError("--nnodes: give --master-addr as well, the address of the machine with --node-rank 0")
        if self.node_rank >= self.nnodes:
            raise RetrofitError(
                f"--node-rank {self.node_rank}: with --nnodes {self.nnodes} it must be below {self.nnodes}"
            )
        if self.max_restarts and (self.nnodes > 1 or started_together()):
            raise RetrofitError(
                "--max-restarts starts the processes of one machine again: with several machines, or under another "
                "launcher, leave that to the launcher"
            )
        if started_together():
            local = os.environ.get("LOCAL_WORLD_SIZE", str(self.nproc))
            if self.nproc is not None and str(self.nproc) != local:
                raise RetrofitError(
                    f"--nproc {self.nproc}: a launcher has already started {local} processes here: remove --nproc"
                )
            return
        gpus = torch.cuda.device_count()
        if self.nproc is not None and 0 < gpus < self.nproc:
            raise RetrofitError(
                f"--nproc {self.nproc}: this machine has {gpus} GPU{'s' if gpus > 1 else ''}, and each process needs "
                "one: give a smaller number, or set CUDA_VISIBLE_DEVICES to nothing to run on the CPU"
            )

    def needed(self, deepspeed: bool) -> bool:
        """Whether processes are to be started: DeepSpeed wants a launcher for a single one, too."""
        several = (self.nproc or 1) > 1 or self.nnodes > 1
        return not started_together() and (several or deepspeed or self.max_restarts > 0)


def launch(command: list[str], machines: Machines) -> None:
    """Run ``python command`` in every process and wait for all of them.

    SIGINT, SIGTERM and SIGHUP are handed on once, so that the processes agree on a last step and write a checkpoint; a
    second one ends them at once.

    Raises:
        RetrofitError: what the first process that could not go on said.
        SystemExit: with status 130 after a signal, with 1 after an error that is no mistake of the user's.
    """
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what goes wrong is said below, once
    count = machines.nproc or max(1, torch.cuda.device_count())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ[LAUNCH] = uuid4().hex
    for attempt in range(machines.max_restarts + 1):
        os.environ[ATTEMPT] = str(attempt)
        failed = _launch_once(command, machines, count)
        if failed is None:
            return
        if not failed.worth_another or attempt == machines.max_restarts:
            raise failed.error from None
        again = f"starting all processes again, {attempt + 1} of {machines.max_restarts} times"
        said = failed.error if isinstance(failed.error, RetrofitError) else "a process failed"
        print(f"{said}; {again}", file=sys.stderr)


@dataclass(frozen=True)
class _Failed:
    """Why processes ended, and whether others might fare better: not where the user stopped them or has to act."""

    error: BaseException
    worth_another: bool = False


def _launch_once(command: list[str], machines: Machines, count: int) -> _Failed | None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    errors: list[BaseException] = []
    hung: int | None = None
    with tempfile.TemporaryDirectory() as logs, pulse.watched() as turns, _relayed_signals() as received:

        def run() -> None:
            try:
                elastic_launch(_config(machines, count, logs), sys.executable)(*command)
            except BaseException as error:
                errors.append(error)

        # in a thread of its own, since the agent answers signals in the main thread by killing after 30 seconds
        agent, watch = threading.Thread(target=run, daemon=True), pulse.Watch(turns)
        agent.start()
        while agent.is_alive():
            agent.join(1)
            if hung is None and (hung := watch.look()) is not None:
                with suppress(ProcessLookupError):  # it may just have ended
                    os.kill(hung, signal.SIGKILL)
        if not errors:
            return None
        (error,) = errors
        if isinstance(error, ChildFailedError):
            return _explain(error, Path(logs), bool(received), hung is not None)
        said = f"the processes could not connect to each other: {' '.join(str(error).split())}"
        return _Failed(RetrofitError(said))


def _config(machines: Machines, count: int, logs: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    alone = machines.nnodes == 1
    meeting: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "127.0.0.1"}
    if not alone:
        meeting = {
            "rdzv_backend": "static",
            "rdzv_endpoint": f"{machines.master_addr}:{machines.master_port}",
            "rdzv_configs": {"rank": machines.node_rank},
        }
    return LaunchConfig(
        min_nodes=machines.nnodes,
        max_nodes=machines.nnodes,
        nproc_per_node=count,
        run_id=uuid4().hex if alone else "retrofit",
        max_restarts=0,
        # one process of a machine prints; what the others print is kept for the error
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=dict.fromkeys(range(1, count), Std.ALL)),
        **meeting,
    )


@contextmanager
def _relayed_signals() -> Iterator[list[int]]:
    """Hand signals on to the processes started here; yields the list of those that came."""
    import psutil

    received: list[int] = []

    def relay(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        processes = psutil.Process().children()
        if not processes:
            raise KeyboardInterrupt  # not started yet
        for process in processes:
            process.send_signal(signal.SIGTERM)

    heard = [number for number in RELAYED if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one
    before = {number: signal.signal(number, relay) for number in heard}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(error: Any, logs: Path, stopped: bool, hung: bool) -> _Failed:
    """What the processes that failed have to say."""
    failures = error.failures
    if stopped or any(failure.exitcode == EXIT_STATUS for failure in failures.values()):
        return _Failed(SystemExit(EXIT_STATUS))
    # the others fail because this one is gone
    said = [failure for failure in failures.values() if failure.exitcode == USER_ERROR]
    if said:
        return _Failed(RetrofitError(str(said[0].message)))
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = ": most likely the machine ran out of memory" if name == "SIGKILL" else ""
        text = f"process {rank} was ended by {name}{hint}"
        if hung:
            text = f"process {rank} hung: the others waited for it for {pulse.LIMIT / 60:.0f} minutes, and it was ended"
        return _Failed(RetrofitError(f"{text}; --resume continues from the last checkpoint"), worth_another=True)
    text = failure.message
    if failure.error_file == "<N/A>":
        text = "".join(file.read_text(errors="replace") for file in logs.glob(f"**/{failure.local_rank}/stderr.log"))
    print(f"{text}\nprocess {rank} failed, with status {failure.exitcode}", file=sys.stderr)
    return _Failed(SystemExit(failure.exitcode), worth_another=True)

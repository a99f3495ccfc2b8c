"""Starting a run in many processes of this machine, by torchrun's own agent: one per GPU."""

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from distill.parallel import EXIT_STATUS
from distill.parallel.processes import started_together
from patches.errors import RetrofitError

USER_ERROR = 2  # the status with which a process ends that has said what the user can do
GRACE = 3600  # seconds that processes have for their last step and its checkpoint once they were asked to stop


def needs_launch(nproc: int | None, max_restarts: int, deepspeed: bool) -> bool:
    """Whether processes are to be started: DeepSpeed wants a launcher for a single one, too.

    Raises:
        RetrofitError: more processes than GPUs, or another launcher has started others already.
    """
    if started_together():
        local = os.environ.get("LOCAL_WORLD_SIZE", str(nproc))
        if nproc is not None and str(nproc) != local:
            raise RetrofitError(
                f"--nproc {nproc}: a launcher has already started {local} processes here: remove --nproc"
            )
        return False
    gpus = torch.cuda.device_count()
    if nproc is not None and 0 < gpus < nproc:
        raise RetrofitError(
            f"--nproc {nproc}: this machine has {gpus} GPU{'s' if gpus > 1 else ''}, and each process needs one: give "
            "a smaller number, or set CUDA_VISIBLE_DEVICES to nothing to run on the CPU"
        )
    return (nproc or 1) > 1 or max_restarts > 0 or deepspeed


def launch(command: list[str], nproc: int | None = None, max_restarts: int = 0) -> None:
    """Run ``python command`` in ``nproc`` processes, by default one per GPU, and wait for all of them.

    SIGINT, SIGTERM and SIGHUP are handed on, so that the processes agree on a last step and write a checkpoint.

    Args:
        max_restarts: how often to start all of them again if one fails.

    Raises:
        RetrofitError: what the first process that could not go on said.
        SystemExit: with status 130 after a signal, with 1 after an error that is no mistake of the user's.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what goes wrong is said below, once
    count = nproc or max(1, torch.cuda.device_count())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # processes that start again would find old addresses in it
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [one.name for one in signals if signal.getsignal(one) != signal.SIG_IGN]  # nohup ignores one
    # an older torch has neither: it kills after 30 seconds, and SIGHUP ends a run under nohup
    late: dict[str, Any] = {"shutdown_timeout": GRACE, "signals_to_handle": ",".join(heard)}
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=max_restarts,
            # the first process prints; what the others print is kept for the error
            logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=dict.fromkeys(range(1, count), Std.ALL)),
            **{name: value for name, value in late.items() if name in LaunchConfig.__dataclass_fields__},
        )
        try:
            elastic_launch(config, sys.executable)(*command)
        except SignalException:
            raise SystemExit(EXIT_STATUS) from None
        except ChildFailedError as error:
            raise _explain(error, Path(logs)) from None


def _explain(error: Any, logs: Path) -> BaseException:
    """What the processes that failed have to say."""
    failures = error.failures
    if any(failure.exitcode == EXIT_STATUS for failure in failures.values()):
        return SystemExit(EXIT_STATUS)
    # the others fail because this one is gone
    said = [failure for failure in failures.values() if failure.exitcode == USER_ERROR]
    if said:
        return RetrofitError(str(said[0].message))
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = ": most likely the machine ran out of memory" if name == "SIGKILL" else ""
        return RetrofitError(f"process {rank} was ended by {name}{hint}; --resume continues from the last checkpoint")
    text = failure.message
    if failure.error_file == "<N/A>":
        text = "".join(file.read_text(errors="replace") for file in logs.glob(f"**/{failure.local_rank}/stderr.log"))
    print(f"{text}\nprocess {rank} failed, with status {failure.exitcode}", file=sys.stderr)
    return SystemExit(failure.exitcode)

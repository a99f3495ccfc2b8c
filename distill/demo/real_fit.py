"""The fit of ``make real``: the recipe smollm2-135m-joint in a process of its own, while others are scored."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from distill.resume import RECIPE_FILE
from patches.errors import RetrofitError

RECIPE = "smollm2-135m-joint"


@contextmanager
def fit_beside(output: Path, say: Callable[[str], None]) -> Iterator[Callable[[], Path]]:
    """Fit on one thread meanwhile, with one thread less here; what is yielded waits for the end and gives the folder of
    the adapter.

    Reads base/ and mix.jsonl in ``output`` and writes joint/, which a cut run goes on from; leaving the context early
    ends the process after the step at hand.

    Raises:
        RetrofitError: on waiting, if the fit failed.
    """
    run, log = output / "joint", output / "joint.log"
    threads = torch.get_num_threads()
    command = [sys.executable, "-m", "cli", "distill", RECIPE, "--base", str(output / "base")]
    command += ["--data", str(output / "mix.jsonl"), "--output", str(run)]
    command += ["--resume" if (run / RECIPE_FILE).is_file() else "--overwrite"]  # all that a cut run leaves is ours
    process = None
    if not (run / "metrics.json").is_file():  # is written last
        say(f"fitting {RECIPE} meanwhile, a quarter of an hour of one core; its progress is in {log}")
        with log.open("ab") as file:
            # threads that wait for one which has no core to run on would take ten times as long
            torch.set_num_threads(max(1, threads - 1))
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            # in a session of its own: Ctrl-C reaches it once, below, and it leaves a checkpoint
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )

    def wait() -> Path:
        if process is not None and process.wait():
            raise RetrofitError(f"the fit failed: read the end of {log}, mend what it names and start again")
        torch.set_num_threads(threads)
        return run / "adapter"

    try:
        yield wait
    finally:
        torch.set_num_threads(threads)
        if process is not None:
            process.terminate()
            process.wait()

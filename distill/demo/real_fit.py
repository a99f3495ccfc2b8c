"""The fit of ``make real``: the recipe smollm2-135m-joint in a process of its own, while others are scored."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from distill.resume import RECIPE_FILE
from patches.errors import RetrofitError

RECIPE = "smollm2-135m-joint"


@dataclass
class Fit:
    """A fit in a process of its own, or one that had ended before; ``threads`` are those that torch has without it."""

    run: Path
    log: Path
    threads: int
    process: "subprocess.Popen[bytes] | None" = None

    def leave_it_a_core(self) -> None:
        """Take one thread less while it runs: were there more threads than cores, each would wait for all others."""
        running = self.process is not None and self.process.poll() is None
        torch.set_num_threads(max(1, self.threads - running))

    def wait(self) -> Path:
        """The folder of the adapter, when it is there.

        Raises:
            RetrofitError: the fit failed.
        """
        if self.process is not None and self.process.wait():
            raise RetrofitError(f"the fit failed: read the end of {self.log}, mend what it names and start again")
        self.leave_it_a_core()
        return self.run / "adapter"


@contextmanager
def fit_beside(output: Path, say: Callable[[str], None]) -> Iterator[Fit]:
    """Fit on one thread meanwhile.

    Reads base/ and mix.jsonl in ``output`` and writes joint/, which a cut run goes on from; leaving the context early
    ends the process after the step at hand.
    """
    fit = Fit(output / "joint", output / "joint.log", torch.get_num_threads())
    command = [sys.executable, "-m", "cli", "distill", RECIPE, "--base", str(output / "base")]
    command += ["--data", str(output / "mix.jsonl"), "--output", str(fit.run)]
    command += ["--resume" if (fit.run / RECIPE_FILE).is_file() else "--overwrite"]  # all that a cut run leaves is ours
    if not (fit.run / "metrics.json").is_file():  # is written last
        say(f"fitting {RECIPE} meanwhile, a quarter of an hour of one core; its progress is in {fit.log}")
        with fit.log.open("ab") as file:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            # in a session of its own: Ctrl-C reaches it once, below, and it leaves a checkpoint
            fit.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )
    try:
        fit.leave_it_a_core()
        yield fit
    finally:
        torch.set_num_threads(fit.threads)
        if fit.process is not None:
            fit.process.terminate()
            fit.process.wait()

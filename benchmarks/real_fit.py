"""The fit of ``make real``: the recipe smollm2-135m-joint in a process of its own, while others are scored."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from distill.checkpoint import check_same_recipe
from distill.config import DistillConfig
from distill.recipe import read_recipe
from patches.errors import RetrofitError
from retrofit.files import ends_tidily

RECIPE = "smollm2-135m-joint"
LESS = {
    "max_steps": 3,
    "local_steps": 3,
    "eval_rows": 2,
}  # what they are divided by for a base in float32, which is slower


@dataclass
class Fit:
    """A fit in a process of its own, or one that had ended before; ``threads`` are those that torch has without it."""

    run: Path
    log: Path
    threads: int
    process: "subprocess.Popen[bytes] | None" = None

    def leave_it_a_core(self) -> None:
        """Take one thread less while it runs: were there more threads than cores, each would wait for all others.

        Raises:
            RetrofitError: the fit has failed.
        """
        status = None if self.process is None else self.process.poll()
        if status:
            raise RetrofitError(
                f"the fit failed: read the end of {self.log}, mend what it names or remove {self.run}, and start again"
            )
        running = self.process is not None and status is None
        torch.set_num_threads(max(1, self.threads - running))

    def wait(self) -> Path:
        """The folder of the adapter, when it is there; raises as :meth:`leave_it_a_core`."""
        if self.process is not None:
            self.process.wait()
        self.leave_it_a_core()
        return self.run / "adapter"


@contextmanager
def fit_beside(output: Path, dtype: str, say: Callable[[str], None]) -> Iterator[Fit]:
    """Fit on one thread meanwhile, with the base in ``dtype``; a third of the steps in float32.

    Reads base/ and mix.jsonl in ``output`` and writes joint/, which a cut run goes on from; one that had other settings
    is made anew. Leaving the context early, or SIGTERM or SIGHUP, ends the process; while it trains, after its step.
    """
    output, recipe = output.resolve(), read_recipe(RECIPE)
    fit = Fit(output / "joint", output / "joint.log", torch.get_num_threads())
    own = {"base": str(output / "base"), "data": str(output / "mix.jsonl"), "output_dir": str(fit.run), "dtype": dtype}
    if dtype == "float32":
        own |= {key: recipe[key] // by for key, by in LESS.items()}
    try:
        check_same_recipe(DistillConfig.from_dict(recipe | own), fit.run)
        how = "--resume"
    except RetrofitError:  # no run yet, or one with other settings; all that is there is ours
        how = "--overwrite"
    given = [part for key, value in own.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    with ends_tidily():
        try:
            if how == "--overwrite" or not (fit.run / "metrics.json").is_file():  # is written last
                say(f"fitting {RECIPE} meanwhile, on one core; its progress is in {fit.log}")
                with fit.log.open("ab") as file:
                    fit.process = subprocess.Popen(
                        [sys.executable, "-m", "cli", "distill", RECIPE, *given, how],
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                        env=os.environ | {"OMP_NUM_THREADS": "1"},
                        start_new_session=True,  # Ctrl-C reaches it once, below, and it leaves a checkpoint
                    )
            fit.leave_it_a_core()
            yield fit
        finally:
            torch.set_num_threads(fit.threads)
            if fit.process is not None:
                fit.process.terminate()
                fit.process.wait()

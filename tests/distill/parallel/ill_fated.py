"""The command line in a process, alone or the second of two, that meets with something in its third step or after it.

First argument: ``none``, ``signal`` (it can still finish the step), ``nan``, ``kill``, ``kill-once`` (not after a
restart), or ``kill-saving`` (its second checkpoint); then the command.
"""

import os
import signal
import sys
from typing import Any

import cli
from distill.parallel.processes import ATTEMPT
from distill.trainer import DistillTrainer

compute_loss, save_rng_state = DistillTrainer.compute_loss, DistillTrainer._save_rng_state
second = os.environ.get("RANK", "1") == "1"


def _compute_loss(self: DistillTrainer, model: Any, *args: Any, **kwargs: Any) -> Any:
    loss = compute_loss(self, model, *args, **kwargs)
    if self.state.global_step == 2 and second:
        if fate == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fate == "nan":
            loss = loss * float("nan")  # finite when it was looked at: its gradient is not
        elif fate == "kill" or (fate == "kill-once" and os.environ[ATTEMPT] == "0"):
            os.kill(os.getpid(), signal.SIGKILL)
    return loss


def _save_rng_state(self: DistillTrainer, *args: Any) -> None:
    if fate == "kill-saving" and self.state.global_step > 2:
        os.kill(os.getpid(), signal.SIGKILL)
    save_rng_state(self, *args)


if __name__ == "__main__":
    fate = sys.argv.pop(1)
    DistillTrainer.compute_loss = _compute_loss
    DistillTrainer._save_rng_state = _save_rng_state
    cli.main()

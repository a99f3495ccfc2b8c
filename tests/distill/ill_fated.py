"""The command line in a process, alone or the second of two, that meets with something in its third step or after it.

First argument: ``signal`` (it can still finish the step), ``nan``, ``kill``, or ``kill-saving`` (its second
checkpoint); then the command.
"""

import os
import signal
import sys
from typing import Any

import cli
from distill.trainer import DistillTrainer

kl_sum, save_rng_state = DistillTrainer._kl_sum, DistillTrainer._save_rng_state
second = os.environ.get("RANK", "1") == "1"


def _kl_sum(self: DistillTrainer, student: Any, *args: Any) -> Any:
    loss, count = kl_sum(self, student, *args)
    if self.state.global_step == 2 and second and student.training:
        if fate == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fate == "nan":
            loss = loss * float("nan")
        elif fate == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return loss, count


def _save_rng_state(self: DistillTrainer, *args: Any) -> None:
    if fate == "kill-saving" and self.state.global_step > 2:
        os.kill(os.getpid(), signal.SIGKILL)
    save_rng_state(self, *args)


fate = sys.argv.pop(1)
DistillTrainer._kl_sum = _kl_sum
DistillTrainer._save_rng_state = _save_rng_state
cli.main()

"""The command line in one process of two, the second of which meets with something in its third step."""

import os
import signal
import sys
from typing import Any

import cli
from distill.trainer import DistillTrainer

original = DistillTrainer._kl_sum


def _kl_sum(self: DistillTrainer, student: Any, *args: Any) -> Any:
    loss, count = original(self, student, *args)
    if self.state.global_step == 2 and os.environ["RANK"] == "1" and student.training:
        if fate == "signal":
            os.kill(os.getppid(), signal.SIGTERM)
        else:
            loss = loss * float("nan")
    return loss, count


fate = sys.argv.pop(1)
DistillTrainer._kl_sum = _kl_sum
cli.main()

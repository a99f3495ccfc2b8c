"""Ctrl-C and SIGTERM: finish the step, write a checkpoint, stop. A second Ctrl-C stops at once.

A signal reaches the processes of a run in different steps, or only some of them: they agree at the end of each step.
"""

import signal
from types import FrameType
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distill.parallel.processes import any_of

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal(TrainerCallback):
    """Turns the first signal into a checkpoint at the end of the running step. Use it as a context manager too.

    Attributes:
        received: the signal that asked this process to stop, None while none has.
        stopped: whether the run stops, because of a signal to any of its processes.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.received: int | None = None
        self.stopped = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopOnSignal":
        self._handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask the trainer to save and stop, once a signal has come."""
        self.stopped = any_of(self.received is not None, args.device)
        if self.stopped:
            control.should_save = control.should_training_stop = True
        return control

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        self._restore()
        self.console.print("stopping after this step, with a checkpoint (once more: at once, without)")

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

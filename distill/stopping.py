"""Ctrl-C and SIGTERM: finish the step, write a checkpoint, stop. A second Ctrl-C stops at once."""

import signal
from types import FrameType
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_STATUS = 130  # what a shell reports for a program ended by Ctrl-C


class StopOnSignal(TrainerCallback):
    """Turns the first signal into a checkpoint at the end of the running step. Use it as a context manager too.

    Attributes:
        received: the signal that asked the run to stop, None while none has.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.received: int | None = None
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
        if self.received is not None:
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

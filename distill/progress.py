"""What is shown and written while a run goes on: one progress line, and a JSONL file with everything logged."""

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from retrofit.files import write_text

LINES = 10  # how often a bar that cannot be redrawn (a log file, a pipe) prints instead


class Bar:
    """One long step: how far it is, a note (KL, gap closed, memory), tokens/s, time left."""

    def __init__(self, progress: Progress, task: TaskID, done: int) -> None:
        self._progress, self._task = progress, task
        self._began, self._done_before, self._lines = time.perf_counter(), done, 0

    def update(self, done: int, note: str = "", tokens: int = 0) -> None:
        """``done`` units in all; ``tokens`` per unit adds a tokens/s figure."""
        speed = (done - self._done_before) / max(time.perf_counter() - self._began, 1e-9)
        if tokens:
            note += f"{', ' if note else ''}{speed * tokens:,.0f} tokens/s"
        self._progress.update(self._task, completed=done, note=note)
        console = self._progress.console
        total = self._progress.tasks[self._task].total or 1
        if not console.is_terminal and done < total and done * LINES // total > self._lines:
            self._lines = int(done * LINES // total)
            left = (total - done) / speed if speed else 0
            description = self._progress.tasks[self._task].description
            console.print(
                f"{description} {done}/{total:.0f} {note}, {left:.0f} s left", highlight=False, soft_wrap=True
            )


@contextmanager
def progress_bar(what: str, total: int, done: int = 0, console: Console | None = None) -> Iterator[Bar]:
    """A bar named ``what`` on stderr; where it cannot be redrawn, ten lines instead."""
    columns = (TextColumn("{task.description}"), BarColumn(12), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console or Console(stderr=True)) as progress:
        yield Bar(progress, progress.add_task(what, total=total, completed=done, note=""), done)


class ProgressCallback(TrainerCallback):
    """Feeds a :class:`Bar` from the trainer's log."""

    def __init__(self, bar: Bar, tokens_per_step: int) -> None:
        self.bar, self.tokens_per_step = bar, tokens_per_step
        self.notes: dict[str, str] = {}

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Show the last KL, memory and, once there was an evaluation, the held-out share of the gap closed."""
        if "loss" in logs:
            self.notes["kl"] = f"KL {logs['loss']:.4f}"
        if "eval_kl_gap_closed" in logs:
            self.notes["gap"] = f"held out {logs['eval_kl']:.4f} ({logs['eval_kl_gap_closed']:.0%} closed)"
        notes = [*self.notes.values(), f"{peak_bytes() / 2**30:.1f} GiB"]
        self.bar.update(state.global_step, ", ".join(notes), self.tokens_per_step)


def peak_bytes() -> int:
    """The most memory this process has held: on its GPU where it computes on one, else in all."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class RunLog(TrainerCallback):
    """Appends everything logged to a JSONL file, with the seconds of training so far.

    ``memory_bytes`` is :func:`peak_bytes`. The same entries travel in the trainer's state, so a resumed run first cuts
    what came after its checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = self._before = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start from the history the trainer's state carries."""
        self._began, self._before = time.perf_counter(), seconds(state)
        if state.is_world_process_zero:
            write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in state.log_history))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """One line per log call."""
        state.log_history[-1]["memory_bytes"] = peak_bytes()
        state.log_history[-1]["seconds"] = self._before + time.perf_counter() - self._began
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(state.log_history[-1]) + "\n")


def seconds(state: TrainerState) -> float:
    """Seconds a run has trained for, interruptions left out."""
    return state.log_history[-1]["seconds"] if state.log_history else 0.0

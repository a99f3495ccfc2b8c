"""A progress line for what takes long, and the memory it took."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

# where a bar cannot be redrawn (a log file, a pipe), a line is printed instead: so many in all, and after so long
LINES, SECONDS = 10, 60.0


class Bar:
    """One long step: how far it is, a note (KL, gap closed, memory), tokens/s, time left."""

    def __init__(self, progress: Progress, task: TaskID, done: int) -> None:
        self._progress, self._task = progress, task
        self._began = self._said = time.perf_counter()
        self._done_before, self._lines = done, 0

    def update(self, done: int, note: str = "", tokens: int = 0) -> None:
        """``done`` units in all; ``tokens`` per unit adds a tokens/s figure."""
        now = time.perf_counter()
        speed = (done - self._done_before) / max(now - self._began, 1e-9)
        if tokens:
            note += f"{', ' if note else ''}{speed * tokens:,.0f} tokens/s"
        self._progress.update(self._task, completed=done, note=note)
        console = self._progress.console
        total = self._progress.tasks[self._task].total or 1
        due = done * LINES // total > self._lines or now - self._said >= SECONDS
        if not console.is_terminal and done < total and due:
            self._lines, self._said = int(done * LINES // total), now
            left = (total - done) / speed if speed else 0
            description = self._progress.tasks[self._task].description
            console.print(
                f"{description} {done}/{total:.0f} {note}, {left:.0f} s left", highlight=False, soft_wrap=True
            )


@contextmanager
def progress_bar(what: str, total: int, done: int = 0, console: Console | None = None) -> Iterator[Bar]:
    """A bar named ``what`` on stderr; where it cannot be redrawn, a line for each tenth and each minute instead."""
    columns = (TextColumn("{task.description}"), BarColumn(12), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console or Console(stderr=True)) as progress:
        yield Bar(progress, progress.add_task(what, total=total, completed=done, note=""), done)


def peak_bytes() -> int:
    """The most memory this process has held: on its GPU where it computes on one, else in all."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

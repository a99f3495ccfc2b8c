"""Which of several processes hangs: each counts its turns in a file, and the launcher looks for one that stays behind.

In a step all processes do the same, and each waits for all. So one that has counted less than another, which has waited
for it for ``LIMIT``, does not go on. (Where all have counted the same, ``IN_STEP`` of processes.py ends them.)
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

FOLDER = "RETROFIT_PULSE"  # in the environment: where the files are
LIMIT = 600.0  # seconds
TURNS = count(1)


@contextmanager
def watched() -> Iterator[Path]:
    """A folder in which the processes started inside the block leave what they count."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[FOLDER]


def beat() -> None:
    """Count a turn: before and after everything that may take long or wait for others."""
    folder = os.environ.get(FOLDER)
    if folder is not None:
        Path(folder, os.environ["LOCAL_RANK"]).write_text(f"{next(TURNS)} {os.getpid()}\n", encoding="utf-8")


def rest() -> None:
    """From here on a process may be alone with its work."""
    folder = os.environ.get(FOLDER)
    if folder is not None:
        Path(folder, os.environ["LOCAL_RANK"]).unlink(missing_ok=True)


def hanging(folder: Path) -> int | None:
    """The process (its number in the system) that others have waited for too long; None if there is none."""
    found = []  # turns, process, time of the last turn
    for file in folder.iterdir():
        try:
            text, when = file.read_text(encoding="utf-8"), file.stat().st_mtime
        except FileNotFoundError:
            continue
        if text.endswith("\n"):  # not just being written
            turns, process = map(int, text.split())
            found.append((turns, process, when))
    if not found:
        return None
    least, process, _ = min(found)
    waiting = [when for turns, _, when in found if turns > least]
    return process if waiting and time.time() - min(waiting) > LIMIT else None

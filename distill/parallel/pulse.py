"""Which of several processes hangs: each counts its turns in a file, and the launcher looks for one that stays behind.

In a step all processes do the same, and each waits for all. So one that counts no further for ``LIMIT``, while another
has counted more and waits for it, hangs. (Where all have counted the same, ``IN_STEP`` of processes.py ends them.)
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        with suppress(OSError):  # where nothing can be written, nobody can be watched, and the run goes on
            Path(folder, os.environ["LOCAL_RANK"]).write_text(f"{next(TURNS)} {os.getpid()}\n", encoding="utf-8")


def rest() -> None:
    """From here on a process may be alone with its work."""
    folder = os.environ.get(FOLDER)
    if folder is not None:
        Path(folder, os.environ["LOCAL_RANK"]).unlink(missing_ok=True)


class Watch:
    """Looks at ``folder`` once a second and counts its looks, because clocks go on while a machine or a job sleeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: tuple[int, int] | None = None  # turns and process of the one that stayed behind
        self._looks = 0  # at which it was the same one

    def look(self) -> int | None:
        """The process (its number in the system) that others have waited for too long; None if there is none."""
        found = []
        for file in self.folder.iterdir():
            with suppress(FileNotFoundError):
                text = file.read_text(encoding="utf-8")
                if text.endswith("\n"):  # not just being written
                    turns, process = map(int, text.split())
                    found.append((turns, process))
        behind = min(found) if found and min(found)[0] < max(found)[0] else None
        self._looks = self._looks + 1 if behind == self._last else 0
        self._last = behind
        return behind[1] if behind and self._looks >= LIMIT else None

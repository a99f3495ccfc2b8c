"""What a run leaves on disk while it trains: ``checkpoint-N`` folders, each an adapter with the optimizer beside it."""

import shutil
from pathlib import Path


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest step first."""
    found = (path for path in run.glob("checkpoint-*") if path.is_dir() and path.name.split("-")[-1].isdecimal())
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which ``checkpoint`` was written."""
    return int(checkpoint.name.split("-")[-1])


def drop_oldest(run: Path, keep: int) -> None:
    """Delete all but the last ``keep`` checkpoints of a run."""
    for path in checkpoints(run)[:-keep]:
        shutil.rmtree(path)

"""What a run leaves on disk while it trains: ``checkpoint-N`` folders, each an adapter with the optimizer beside it."""

import json
import shutil
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from retrofit.adapter import WEIGHTS

STATE, OPTIMIZER, SCHEDULER = "trainer_state.json", "optimizer.pt", "scheduler.pt"


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest step first."""
    found = (path for path in run.glob("checkpoint-*") if path.is_dir() and path.name.split("-")[-1].isdecimal())
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which ``checkpoint`` was written."""
    return int(checkpoint.name.split("-")[-1])


def damage(checkpoint: Path) -> str:
    """What keeps a run from going on from ``checkpoint``: a file that is missing or cut short; empty if nothing does.

    The Trainer would go on without an optimizer's file as if nothing had been learned yet.
    """
    states = [checkpoint / OPTIMIZER, checkpoint / SCHEDULER, *sorted(checkpoint.glob("rng_state*.pth"))]
    if len(states) < 3:
        return "rng_state.pth is missing"
    for file in (checkpoint / STATE, checkpoint / WEIGHTS, *states):
        try:
            if file.name == STATE:
                json.loads(file.read_text(encoding="utf-8"))
            elif file.name == WEIGHTS:
                with safe_open(str(file), framework="pt"):
                    pass
            elif zipfile.ZipFile(file).testzip():
                return f"{file.name} is damaged"
        except FileNotFoundError:
            return f"{file.name} is missing"
        except (OSError, ValueError, SafetensorError, zipfile.BadZipFile):
            return f"{file.name} is damaged or cut short"
    return ""


def drop_oldest(run: Path, keep: int) -> None:
    """Delete all but the last ``keep`` checkpoints of a run."""
    for path in checkpoints(run)[:-keep]:
        shutil.rmtree(path)

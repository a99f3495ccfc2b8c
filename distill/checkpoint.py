"""What a run leaves on disk while it trains: ``checkpoint-N`` folders, each an adapter with the optimizer beside it.

Plain and data-parallel runs keep the optimizer in ``optimizer.pt``, FSDP in ``optimizer.bin``. DeepSpeed keeps each
process's part of it in a folder of its own, named in ``latest``; the schedule and the processes' random states lie
beside it as ever.
"""

import hashlib
import json
import shutil
from pathlib import Path

from transformers import TrainerState

from retrofit.adapter import WEIGHTS
from retrofit.files import write_json

STATE = "trainer_state.json"
# where the optimizer is: the Trainer's file, accelerate's under FSDP, or DeepSpeed's pointer to its folder
OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "latest")
CHECKSUMS = "checksums.json"


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest step first."""
    found = (path for path in run.glob("checkpoint-*") if path.is_dir() and path.name.split("-")[-1].isdecimal())
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which ``checkpoint`` was written."""
    return int(checkpoint.name.split("-")[-1])


def write_checksums(checkpoint: Path) -> None:
    """SHA-256 of every file in it but the one that is written here."""
    listing = checkpoint / CHECKSUMS
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file() and file != listing)
    write_json(listing, {str(file.relative_to(checkpoint)): _sha256(file) for file in files})


def damage(checkpoint: Path) -> str:
    """What keeps a run from going on from ``checkpoint``: a file that is missing or not as written; empty if nothing.

    The Trainer would go on without an optimizer's file as if nothing had been learned yet.
    """
    try:
        expected = json.loads((checkpoint / CHECKSUMS).read_text(encoding="utf-8"))
        if not isinstance(expected, dict):
            raise ValueError
        if not (STATE in expected and WEIGHTS in expected and any(name in expected for name in OPTIMIZERS)):
            raise ValueError
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except (OSError, ValueError, TypeError, RecursionError):
        return f"{CHECKSUMS} is damaged"
    for name, digest in expected.items():
        try:
            if _sha256(checkpoint / name) != digest:
                return f"{Path(name).name} is damaged"
        except FileNotFoundError:
            return f"{Path(name).name} is missing"
        except (OSError, ValueError) as error:
            return f"{Path(name).name} cannot be read ({error})"
    if TrainerState.load_from_json(str(checkpoint / STATE)).global_step != step_of(checkpoint):
        return f"{STATE} is of another step"
    return ""


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def drop_oldest(run: Path, keep: int, best: str | None = None) -> None:
    """Delete the oldest checkpoints of a run until ``keep`` are left, but neither the last nor the ``best`` one."""
    found = checkpoints(run)
    kept = {found[-1].name, Path(best or found[-1]).name}
    droppable = [path for path in found if path.name not in kept]
    for path in droppable[: max(0, len(found) - max(keep, len(kept)))]:
        shutil.rmtree(path)

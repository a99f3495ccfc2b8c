"""What a run leaves on disk while it trains: ``checkpoint-N`` folders, each an adapter with the optimizer beside it.

Plain and data-parallel runs keep the optimizer in ``optimizer.pt``. DeepSpeed keeps each process's part of it in a
folder of its own, named in ``latest``; the schedule and the processes' random states lie beside it as ever.
"""

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

from transformers import TrainerState

from distill.lora import FOLDER as LORA
from retrofit.adapter import WEIGHTS
from retrofit.files import write_json

STATE, OPTIMIZER, SCHEDULER = "trainer_state.json", "optimizer.pt", "scheduler.pt"
ENGINE = "latest"  # DeepSpeed's pointer to its folder
CHECKSUMS = "checksums.json"


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest step first."""
    found = (path for path in run.glob("checkpoint-*") if path.is_dir() and path.name.split("-")[-1].isdecimal())
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which ``checkpoint`` was written."""
    return int(checkpoint.name.split("-")[-1])


def write_checksums(checkpoint: Path) -> None:
    """SHA-256 of the safetensors files, which hold no checksum of their own; torch's archives do."""
    files = {str(file.relative_to(checkpoint)): _sha256(file) for file in sorted(checkpoint.rglob(WEIGHTS))}
    write_json(checkpoint / CHECKSUMS, files)


def damage(checkpoint: Path, processes: int = 1, deepspeed: bool = False, lora: bool = False) -> str:
    """What keeps a run from going on from ``checkpoint``: a file that is missing or cut short; empty if nothing does.

    The Trainer would go on without an optimizer's file as if nothing had been learned yet.
    """
    random = "rng_state.pth" if processes == 1 else "rng_state_{}.pth"
    files = [checkpoint / name for name in (STATE, CHECKSUMS, WEIGHTS, SCHEDULER)]
    files += [checkpoint / LORA / WEIGHTS] if lora else []
    files += [checkpoint / random.format(rank) for rank in range(processes)]
    if deepspeed:
        files += _engine_files(checkpoint, processes)
    else:
        files.append(checkpoint / OPTIMIZER)
    for file in files:
        try:
            if file.name == STATE:
                state = TrainerState.load_from_json(str(file))
                logged = isinstance(state.log_history, list) and all(isinstance(x, dict) for x in state.log_history)
                if (
                    state.global_step != step_of(checkpoint)
                    or not logged
                    or not isinstance(state.stateful_callbacks, dict)
                ):
                    raise ValueError
            elif file.name == CHECKSUMS:
                json.loads(file.read_text(encoding="utf-8"))
            elif file.name == WEIGHTS:
                expected = json.loads((checkpoint / CHECKSUMS).read_text(encoding="utf-8"))
                if expected.get(str(file.relative_to(checkpoint))) != _sha256(file):
                    return f"{file.name} is damaged"
            elif zipfile.ZipFile(file).testzip():
                return f"{file.name} is damaged"
        except FileNotFoundError:
            return f"{file.name} is missing"
        except (OSError, ValueError, TypeError, AttributeError, RecursionError, zipfile.BadZipFile):
            return f"{file.name} is damaged or cut short"
    return ""


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _engine_files(checkpoint: Path, processes: int) -> list[Path]:
    """The files DeepSpeed needs: each process's part of the optimizer, and the state of the engine."""
    try:
        folder = checkpoint / (checkpoint / ENGINE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return [checkpoint / ENGINE]
    parts = sorted(folder.glob("*_optim_states.pt"))
    engine = sorted(folder.glob("*_model_states.pt"))
    lacking = [folder / f"part {len(parts)} of the optimizer"] if len(parts) < processes else []
    return [*parts, *engine, *lacking, *([] if engine else [folder / "mp_rank_00_model_states.pt"])]


def drop_oldest(run: Path, keep: int) -> None:
    """Delete all but the last ``keep`` checkpoints of a run."""
    for path in checkpoints(run)[:-keep]:
        shutil.rmtree(path)

"""What a run leaves on disk while it trains: ``checkpoint-N`` folders, each an adapter with the optimizer beside it.

Plain and data-parallel runs keep the optimizer in ``optimizer.pt``, FSDP in ``optimizer.bin``. DeepSpeed keeps each
process's part of it in a folder of its own, named in ``latest``; the schedule and the processes' random states lie
beside it as ever.
"""

import hashlib
import json
import shutil
from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainerState

from distill.config import DistillConfig
from distill.recipe import read_recipe
from patches.errors import RetrofitError
from retrofit.adapter import WEIGHTS
from retrofit.files import write_json
from retrofit.untrusted import read_json

STATE = "trainer_state.json"
# where the optimizer is: the Trainer's file, accelerate's under FSDP, or DeepSpeed's pointer to its folder
OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "latest")
CHECKSUMS = "checksums.json"
RECIPE_FILE = "recipe.yaml"
# what may differ between a run and its resumption without changing the result
FREE_ON_RESUME = {"output_dir", "report_to", "eval_steps", "save_steps", "save_total_limit", "logging_steps"}
DATA_FILE = "run.json"
SAMPLES = 1024  # rows looked at, spread evenly


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


# ---- what a resumed run goes on from, and what must be as it was ----


def check_same_recipe(recipe: DistillConfig, output: Path) -> None:
    """Refuse to resume with other settings: the result would be neither run's.

    Raises:
        RetrofitError: a key has changed, or there is no run in ``output``.
    """
    path = output / RECIPE_FILE
    if not path.is_file():
        raise RetrofitError(f"there is no run to resume in {output}: start one without --resume")
    before, now = DistillConfig.from_dict(read_recipe(path), where=str(path)).to_recipe(), recipe.to_recipe()
    changed = [key for key in before | now if key not in FREE_ON_RESUME and before.get(key) != now.get(key)]
    if changed:
        what = ", ".join(f"{key} (was {before.get(key)!r})" for key in changed)
        raise RetrofitError(f"the run in {output} was started with other settings: {what}; resume it with {path}")


def began_by(output: Path, launch: str | None) -> bool:
    """Whether the run in ``output`` was begun by this launch (:func:`distill.parallel.processes.launch_of`)."""
    return launch is not None and _begun(output).get("launch") == launch


def last_whole(output: Path, console: Console) -> Path | None:
    """The last checkpoint of a run that is whole; what is wrong with those after it is printed."""
    for checkpoint in reversed(checkpoints(output)):
        reason = damage(checkpoint)
        if not reason:
            return checkpoint
        said = f"{checkpoint} cannot be used, {reason}: going back to the one before it"
        console.print(said, highlight=False, soft_wrap=True)
    return None


def describe_data(train: Any, held_out: Any, processes: int) -> dict[str, Any]:
    """The rows' number and a hash over a sample of them (streams have neither), and the number of processes."""
    return {"processes": processes, "train": _rows(train), "held_out": _rows(held_out)}


def check_same_data(output: Path, found: dict[str, Any]) -> None:
    """Compare with what the run in ``output`` began with.

    Raises:
        RetrofitError: the data has changed, or there are more or fewer processes.
    """
    before = _begun(output)
    processes = before.get("processes")
    if processes is None:
        raise RetrofitError(
            f"{output / DATA_FILE} is missing or damaged: the run cannot be resumed, start a new one with --overwrite"
        )
    if processes != found["processes"]:
        raise RetrofitError(
            f"the run in {output} was started with {processes} processes, not {found['processes']}: resume it with "
            f"--nproc {processes} (times the machines)"
        )
    for part in ("train", "held_out"):
        if before.get(part) != found[part]:
            raise RetrofitError(
                f"the data of the run in {output} has changed since it was started: restore the data, or start a new "
                "run"
            )


def _begun(output: Path) -> dict[str, Any]:
    """What the run in ``output`` wrote of itself when it began; empty if that cannot be read."""
    try:
        return dict(read_json(output / DATA_FILE))
    except (RetrofitError, ValueError, TypeError):
        return {}


def _rows(rows: Any) -> dict[str, Any] | None:
    if not isinstance(rows, Sized):
        return None
    count, digest = len(rows), hashlib.sha256()
    for index in range(min(count, SAMPLES)):
        row = rows[index * count // min(count, SAMPLES)]  # type: ignore[index]
        for key in ("input_ids", "labels"):
            digest.update(torch.as_tensor(row[key]).to(torch.int64).numpy().tobytes())
    return {"rows": count, "sha256": digest.hexdigest()}

"""What a resumed run goes on from, and what must be as it was: the recipe, the data and the number of processes."""

import hashlib
from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from distill.checkpoint import checkpoints, damage
from distill.config import DistillConfig
from distill.recipe import read_recipe
from patches.errors import RetrofitError
from retrofit.untrusted import read_json

RECIPE_FILE = "recipe.yaml"
# what may differ between a run and its resumption without changing the result
FREE_ON_RESUME = {"output_dir", "report_to", "eval_steps", "save_steps", "save_total_limit", "logging_steps"}
DATA_FILE = "run.json"
SAMPLES = 1024  # rows looked at, spread evenly


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

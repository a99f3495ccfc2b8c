"""What must not differ between a run and its resumption besides the recipe: the data and the number of processes."""

import hashlib
import json
from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch

from patches.errors import RetrofitError
from retrofit.files import write_json

FILE = "run.json"
SAMPLES = 1024  # rows looked at, spread evenly


def describe(train: Any, held_out: Any, processes: int) -> dict[str, Any]:
    """The rows' number and a hash over a sample of them (streams have neither), and the number of processes."""
    return {"processes": processes, "train": _rows(train), "held_out": _rows(held_out)}


def write(output: Path, found: dict[str, Any]) -> None:
    """Note it beside the checkpoints."""
    write_json(output / FILE, found)


def check(output: Path, found: dict[str, Any]) -> None:
    """Compare with what the run in ``output`` began with.

    Raises:
        RetrofitError: the data has changed, or there are more or fewer processes.
    """
    try:
        before = json.loads((output / FILE).read_text(encoding="utf-8"))
        processes = before["processes"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise RetrofitError(f"{output / FILE} is missing or damaged: the run cannot be resumed exactly") from None
    if processes != found["processes"]:
        raise RetrofitError(
            f"the run in {output} was started with {processes} processes, not {found['processes']}: resume it with "
            f"--nproc {processes} (times the machines)"
        )
    for part in ("train", "held_out"):
        if before.get(part) != found[part]:
            raise RetrofitError(
                f"the data of the run in {output} has changed since it was started: bring it back, or start a new run"
            )


def _rows(rows: Any) -> dict[str, Any] | None:
    if not isinstance(rows, Sized):
        return None
    count, digest = len(rows), hashlib.sha256()
    for index in range(min(count, SAMPLES)):
        row = rows[index * count // min(count, SAMPLES)]  # type: ignore[index]
        for key in ("input_ids", "labels"):
            digest.update(torch.as_tensor(row[key]).to(torch.int64).numpy().tobytes())
    return {"rows": count, "sha256": digest.hexdigest()}

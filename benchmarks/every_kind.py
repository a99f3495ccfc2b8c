"""Every kind of memory beside the same teachers, at three seeds, in one table."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from distill.demo.run import HELD_OUT, LENGTH, SINKS, WINDOW, compare, fit, quiet_on_one_thread, teach
from distill.demo.text import documents, generator
from patches.errors import RetrofitError
from patches.kinds import KINDS
from retrofit.files import check_replaced, write_folder, write_text
from retrofit.table import markdown, print_table, write_rows

SEEDS = 3
FIRST = "ahn-gdn"  # whose bytes set the window of equal memory
SPREAD = ("far_recall", "kl", "kl_gap_closed")  # told as mean, min and max
FIGURES = (*SPREAD, "nll", "kept_bytes", "seconds")
COLUMNS = {
    "name": ("", ""),
    "far_recall": ("far\nrecall", ".3f"),
    "far_recall_min": ("min", ".3f"),
    "far_recall_max": ("max", ".3f"),
    "kl": ("KL", ".4f"),
    "kl_gap_closed": ("gap\nclosed", ".0%"),
    "kl_gap_closed_min": ("min", ".0%"),
    "kl_gap_closed_max": ("max", ".0%"),
    "nll": ("NLL", ".2f"),
    "kept_bytes": ("bytes", "d"),
    "seconds": ("s", ".0f"),
}
PRINTED = (
    "name",
    *(f"{key}{end}" for key in ("far_recall", "kl_gap_closed") for end in ("", "_min", "_max")),
    "kept_bytes",
)


def run_all(*, seed: int = 0, output: str | Path, overwrite: bool = False) -> list[dict[str, Any]]:
    """Train every kind at the seeds ``seed``, ``seed + 1`` and ``seed + 2``, each to that seed's teacher.

    Writes ``output``/rows.json and ``output``/table.md.

    Args:
        seed: the first of three.
        output: folder to write.
        overwrite: replace what ``output`` holds.

    Returns:
        One mapping per row: ``name``, ``seeds`` and the means of :func:`distill.demo.run.run_demo`'s figures;
        ``far_recall``, ``kl`` and ``kl_gap_closed`` also as ``.._min`` and ``.._max``.

    Raises:
        RetrofitError: the output is taken, or a teacher did not learn.
    """
    check_replaced(output, overwrite)
    began, console = time.perf_counter(), Console()
    kinds = [FIRST, *(kind for kind in KINDS if kind not in (FIRST, "none"))]
    seeds = range(seed, seed + SEEDS)
    runs = []
    with quiet_on_one_thread():
        for one in seeds:
            console.print(f"seed {one}")
            runs.append(_one_seed(one, kinds))
    rows = [_summary(parts, list(seeds)) for parts in zip(*runs, strict=True)]
    title = f"{HELD_OUT} held-out documents of {LENGTH} tokens, window {WINDOW}, {SINKS} sinks, seeds {[*seeds]}"
    print_table(title, rows, {key: COLUMNS[key] for key in PRINTED}, console)
    with write_folder(output, overwrite) as draft:
        write_rows(draft / "rows.json", rows)
        write_text(draft / "table.md", markdown(rows, COLUMNS))
    console.print(
        f"The figures are means over the seeds. The table is in {output} ({time.perf_counter() - began:.0f} s in all)"
    )
    return rows


def _one_seed(seed: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    teacher, seconds = teach(seed)
    took = {"teacher": seconds}
    models = {}
    for kind in kinds:
        models[kind], took[kind] = fit(teacher, kind, seed)
    with torch.no_grad():
        return compare(models, documents(HELD_OUT, LENGTH, generator(seed, "held-out")), took)


def _summary(parts: Sequence[dict[str, Any]], seeds: list[int]) -> dict[str, Any]:
    """One row of the table from the same row at every seed."""
    row: dict[str, Any] = {"name": parts[0]["name"], "seeds": seeds}
    for key in FIGURES:
        values = [part[key] for part in parts]
        row[key] = values[0] if key == "kept_bytes" else sum(values) / len(values)
        if key in SPREAD:
            row |= {f"{key}_min": min(values), f"{key}_max": max(values)}
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help=f"the first of {SEEDS}")
    parser.add_argument("--output", type=Path, default=Path("runs/every-kind"))
    parser.add_argument("--overwrite", action="store_true", help="replace what the output holds")
    given = parser.parse_args()
    try:
        run_all(seed=given.seed, output=given.output, overwrite=given.overwrite)
    except RetrofitError as error:
        parser.exit(2, f"error: {error}\n")

"""What there is to report of a run: its files read, each whole or not at all, and a sentence about each that is not."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patches.errors import RetrofitError

METRICS, LOG, RECIPE, EVAL, BENCH = "metrics.json", "log.jsonl", "recipe.yaml", "eval.json", "bench.json"
OF_A_RUN = (METRICS, LOG, RECIPE, "run.json")

Row = dict[str, Any]

# what is read of the two summaries
LISTS, MAPPINGS = "rows curve text recall passkey harness", "recipe parameters tokens data versions"
KINDS: dict[str, type] = dict.fromkeys(LISTS.split(), list) | {"command": str}
KINDS |= dict.fromkeys([*MAPPINGS.split(), "settings", "identity"], dict)


@dataclass
class Run:
    """Everything found, in the shapes in which it was written; empty where it was not.

    Attributes:
        metrics, log, recipe: of `retrofit distill`; the log's entries in order, the recipe as YAML.
        evaluation: eval.json of `retrofit eval`.
        bench: rows of a benchmark's ``--json``.
        missing: a sentence for each thing that is not in the report, and how to get it.
    """

    folder: Path
    metrics: Row = field(default_factory=lambda: _summary({}))
    log: list[Row] = field(default_factory=list)
    recipe: str = ""
    evaluation: Row = field(default_factory=lambda: _summary({}))
    bench: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def memory(self) -> str:
        """What the memory's row is called in the figures of training."""
        return str(self.metrics["recipe"].get("memory") or "memory")


def collect(folder: Path, evaluation: Path | None = None, bench: Path | None = None) -> Run:
    """Read a run.

    Args:
        folder: of `retrofit distill`, of `retrofit eval`, or the first with the second's in ``eval/``.
        evaluation: the evaluation's folder, if it is elsewhere.
        bench: JSON rows of a benchmark; ``folder/bench.json`` if None and there is one.

    Raises:
        RetrofitError: there is nothing to report, or what was asked for by name cannot be read.
    """
    if not folder.is_dir():
        raise RetrofitError(f"there is no folder {folder}: give one that `retrofit distill` or `retrofit eval` wrote")
    run = Run(folder)
    found = False
    if any((folder / name).exists() for name in OF_A_RUN):
        unfinished = "the run has not finished, `retrofit distill --resume` goes on with it"
        metrics = _read(run, folder / METRICS, lambda text: _summary(json.loads(text)), unfinished)
        run.metrics = metrics or run.metrics
        run.log = _read(run, folder / LOG, _lines, "the report has no curves but those in metrics.json") or []
        run.log = run.log or run.metrics["curve"]
        run.recipe = _read(run, folder / RECIPE, str, "the report does not show the recipe") or ""
        found = bool(metrics or run.log or run.recipe)
    else:
        run.missing.append(f"No training: {folder} holds none of {', '.join(OF_A_RUN[:3])}.")
    places = [folder / EVAL, folder / "eval" / EVAL]
    asked = None if evaluation is None else evaluation / EVAL
    evaluated = _find(run, asked, places, lambda text: _summary(json.loads(text)), "no finished evaluation")
    run.evaluation = evaluated or run.evaluation
    if not evaluated:
        run.missing.append("No evaluation: run `retrofit eval` with the output folder RUN/eval, or give --eval DIR.")
    run.bench = _find(run, bench, [folder / BENCH], _rows, "no such file") or []
    if not run.bench:
        run.missing.append("No costs: give the file that `retrofit bench run --json FILE` wrote as --bench FILE.")
    if not (found or evaluated or run.bench):
        broken = [sentence for sentence in run.missing if "cannot be read" in sentence]
        said = f"nothing in it can be read ({' '.join(broken)})" if broken else "it holds no run and no evaluation"
        raise RetrofitError(f"{folder}: {said}; give a folder that `retrofit distill` or `retrofit eval` wrote")
    return run


def number(value: Any) -> float | None:
    """``value`` if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def _find(run: Run, asked: Path | None, places: list[Path], parse: Callable[[str], Any], absent: str) -> Any:
    """What was asked for by name, which must be readable, or the first of ``places`` that is there."""
    path = asked or next((place for place in places if place.exists()), None)
    found = None if path is None else _read(run, path, parse, absent)
    if asked is not None and found is None:
        raise RetrofitError(run.missing[-1].rstrip("."))
    return found


def _read(run: Run, path: Path, parse: Callable[[str], Any], absent: str) -> Any:
    """``parse(text of path)``, or None and a sentence in ``run.missing``."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        run.missing.append(f"{path} is missing: {absent}.")
    except OSError as error:
        run.missing.append(f"{path} cannot be read: {error.strerror}.")
    except (ValueError, RecursionError) as error:
        run.missing.append(f"{path} cannot be read: {str(error) or 'it is nested too deep'}.")
    return None


def _summary(found: Any) -> Row:
    """``found`` with an empty value for whatever it lacks; lists hold mappings."""
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    whole = {key: found.get(key) or kind() for key, kind in KINDS.items()}
    for key, kind in KINDS.items():
        if not isinstance(whole[key], kind) or (kind is list and not all(isinstance(row, dict) for row in whole[key])):
            raise ValueError(f"its {key!r} is not what retrofit writes")
    return whole


def _lines(text: str) -> list[Row]:
    """The entries of a log; a run that was killed may have left a line cut short."""
    entries = []
    for line in text.splitlines():
        try:
            entries.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    entries = [entry for entry in entries if isinstance(entry, dict)]
    if not entries:
        raise ValueError("no line of it is a JSON object")
    return entries


def _rows(text: str) -> list[Row]:
    found = json.loads(text)
    rows = _summary(found if isinstance(found, dict) else {"rows": found})["rows"]
    if not any("name" in row and ("length" in row or "context" in row) for row in rows):
        raise ValueError("none of its rows has a name and a length: it is not what `retrofit bench ... --json` writes")
    return [{**row, "name": str(row.get("name")), "length": row.get("length", row.get("context"))} for row in rows]

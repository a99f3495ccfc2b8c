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
    metrics: Row = field(default_factory=dict)
    log: list[Row] = field(default_factory=list)
    recipe: str = ""
    evaluation: Row = field(default_factory=dict)
    bench: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def settings(self) -> Row:
        """The recipe as metrics.json has it."""
        return record(self.metrics.get("recipe"))

    @property
    def memory(self) -> str:
        """What the memory's row is called in the figures of training."""
        return str(self.settings.get("memory") or "memory")


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
    if any((folder / name).exists() for name in OF_A_RUN):
        run.metrics = (
            _read(run, folder / METRICS, _object, "the run has not finished: `retrofit distill --resume`") or {}
        )
        run.log = _read(run, folder / LOG, _lines, "no curves but those in metrics.json") or records(
            run.metrics.get("curve")
        )
        run.recipe = _read(run, folder / RECIPE, str, "no recipe") or ""
    else:
        run.missing.append(f"No training: {folder} holds none of {', '.join(OF_A_RUN[:3])}.")
    run.evaluation = _find(run, evaluation, EVAL, [folder / EVAL, folder / "eval" / EVAL], _object) or {}
    if not run.evaluation:
        run.missing.append("No evaluation: `retrofit eval` writes one, into eval/ of the run for one that is found.")
    run.bench = _find(run, bench, None, [folder / BENCH], _rows) or []
    if not run.bench:
        run.missing.append("No costs: give the rows that `retrofit bench` wrote with --json as --bench FILE.")
    if not (run.metrics or run.log or run.recipe or run.evaluation or run.bench):
        broken = [sentence for sentence in run.missing if "cannot be read" in sentence]
        found = f"nothing in it can be read ({' '.join(broken)})" if broken else "it holds no run and no evaluation"
        raise RetrofitError(f"{folder}: {found}; give a folder that `retrofit distill` or `retrofit eval` wrote")
    return run


def number(value: Any) -> float | None:
    """``value`` if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def record(value: Any) -> Row:
    """``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def records(value: Any) -> list[Row]:
    """The mappings in ``value``, if it is a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def names(rows: Any) -> list[str]:
    """The rows' names, each once."""
    return list(dict.fromkeys(str(row["name"]) for row in records(rows) if row.get("name") is not None))


def _find(run: Run, asked: Path | None, inside: str | None, places: list[Path], parse: Callable[[str], Any]) -> Any:
    """What was asked for by name, which must be readable, or the first of ``places`` that is there."""
    if asked is None:
        found = next((place for place in places if place.exists()), None)
        return None if found is None else _read(run, found, parse, "")
    path = asked / inside if inside else asked
    found = _read(run, path, parse, "no such file" if inside is None else "no finished evaluation there")
    if found is None:
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


def _object(text: str) -> Row:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    return found


def _lines(text: str) -> list[Row]:
    """The entries of a log; a run that was killed may have left a line cut short."""
    entries = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    if not entries:
        raise ValueError("no line of it is a JSON object")
    return entries


def _rows(text: str) -> list[Row]:
    found = json.loads(text)
    rows = records(found.get("rows") if isinstance(found, dict) else found)
    if not any("name" in row and ("length" in row or "context" in row) for row in rows):
        raise ValueError("none of its rows has a name and a length: it is not what `retrofit bench ... --json` writes")
    return rows

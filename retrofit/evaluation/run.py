"""One evaluation from settings to files: the rows, whatever was asked for, results as they come, one summary."""

import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from patches.errors import RetrofitError, nearest
from retrofit.evaluate import gap_closed
from retrofit.evaluation.contenders import TEACHER, WINDOW_ONLY, Contender, load_contenders, lossless
from retrofit.evaluation.feeding import CHUNK
from retrofit.evaluation.identity import identity
from retrofit.evaluation.needle import NAMES as NEEDLES
from retrofit.evaluation.needle import needle_tasks
from retrofit.evaluation.recall import recall_means, score_recall
from retrofit.evaluation.runner import means, run_tasks
from retrofit.evaluation.store import ResultStore
from retrofit.evaluation.text import by_distance, score_text
from retrofit.files import write_json
from retrofit.measure import state_bytes
from retrofit.table import finite

SUMMARY = "eval.json"
SHORTEST = 512  # tokens of a probe, unless asked for otherwise: any question fits
PROBES = ["identity", "recall", *NEEDLES]


@dataclass(frozen=True)
class Settings:
    """What is evaluated and how; two runs with the same settings give the same results.

    Raises:
        RetrofitError: an unknown probe, or a number out of range.
    """

    model: str
    adapters: tuple[str, ...] = ()
    window: int | None = None
    sinks: int | None = None
    dtype: str = "auto"
    data: str | None = None  # a text file: KL and NLL by position on it
    seq_len: int | None = None  # of its rows; four times the lossless budget by default
    eval_rows: int = 16
    probes: tuple[str, ...] = ("identity", "recall", "passkey")
    lengths: tuple[
        int, ...
    ] = ()  # of the probes, in tokens; 2 (W + S) and 4 (W + S) by default, at least 512 and 1,024
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 5
    bindings: tuple[int, ...] = (1, 4, 16)
    haystack: str | None = None  # a text file for the needle tasks that RULER fills with essays
    chat: bool = False  # ask through the tokenizer's chat template
    seed: int = 0
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        for probe in self.probes:
            if probe not in PROBES:
                raise RetrofitError(f"unknown probe {probe!r}{nearest(probe, PROBES)}: known are {', '.join(PROBES)}")
        for name in ("eval_rows", "samples", "chunk"):
            if getattr(self, name) < 1:
                raise RetrofitError(f"{name}={getattr(self, name)}: it must be 1 or more")


def run_evaluation(settings: Settings, output: Path, overwrite: bool = False) -> dict[str, Any]:
    """Evaluate and return what ``output/eval.json`` holds; every result is in ``output/results.jsonl`` as it comes.

    Raises:
        RetrofitError: as the loaders and the parts; results of other settings in ``output``.
    """
    rows, tokenizer = load_contenders(
        settings.model, settings.adapters, window=settings.window, sinks=settings.sinks, dtype=settings.dtype
    )
    if settings.chat and tokenizer.chat_template is None:
        raise RetrofitError(f"the tokenizer of {settings.model} has no chat template: leave --chat away")
    budget = lossless(rows)
    lengths = settings.lengths or (max(2 * budget, SHORTEST), max(4 * budget, 2 * SHORTEST))
    sequences = None if settings.data is None else _sequences(settings, tokenizer, budget)
    needles = [probe for probe in settings.probes if probe in NEEDLES]
    text = None if settings.haystack is None else _read(settings.haystack)
    tasks = needle_tasks(
        needles,
        tokenizer,
        lengths,
        settings.depths,
        samples=settings.samples,
        seed=settings.seed,
        text=text,
        chat=settings.chat,
    )
    store = ResultStore(output, asdict(settings), overwrite)
    names = [row.name for row in rows]
    with _progress() as progress:
        if sequences is not None:
            bar = progress.add_task("text", total=len(sequences))
            score_text(rows, sequences, store, chunk=settings.chunk, on_sequence=lambda _: progress.advance(bar))
        if "recall" in settings.probes:
            total = len(lengths) * len(settings.bindings) * settings.samples
            bar = progress.add_task("recall", total=total)
            score_recall(
                rows,
                tokenizer,
                store,
                lengths=lengths,
                bindings=settings.bindings,
                samples=settings.samples,
                seed=settings.seed,
                chunk=settings.chunk,
                on_sample=lambda _: progress.advance(bar),
            )
        if tasks:
            total = len(rows) * len(lengths) * len(settings.depths) * settings.samples
            bars = {task.name: progress.add_task(task.name, total=total) for task in tasks}
            run_tasks(
                rows, tokenizer, tasks, store, chunk=settings.chunk, on_answer=lambda name: progress.advance(bars[name])
            )
    summary = {
        "settings": asdict(settings),
        "rows": [_describe(row) for row in rows],
        "lossless": budget,
        "identity": identity(rows, tokenizer, settings.seed) if "identity" in settings.probes else None,
        "text": None if sequences is None else _text(store, rows, sequences.shape[1]),
        "recall": recall_means(store, names) if "recall" in settings.probes else None,
        "needles": means(store, names) if tasks else None,
        "needle_grid": means(store, names, by=("length", "depth")) if tasks else None,
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"python": platform.python_version()},
    }
    write_json(output / SUMMARY, finite(summary))
    return summary


def _describe(row: Contender) -> dict[str, Any]:
    memory = row.model.config.memory
    if row.teacher:
        return {"name": row.name, "kind": "full attention", "window": None, "sinks": None, "state_bytes": None}
    bytes_ = state_bytes(row.model)
    return {"name": row.name, **{key: memory[key] for key in ("kind", "window", "sinks")}, "state_bytes": bytes_}


def _text(store: ResultStore, rows: Sequence[Contender], length: int) -> list[dict[str, Any]]:
    """:func:`by_distance` with the share of the gap that each row closes."""
    table = by_distance(store, rows, length)
    for entry in table:
        gap = entry["kl"][WINDOW_ONLY]
        entry["kl_gap_closed"] = {name: gap_closed(kl, gap) for name, kl in entry["kl"].items()}
    return table


def _sequences(settings: Settings, tokenizer: Any, budget: int) -> Tensor:
    """The first ``eval_rows`` rows (N, T) of the text, cut one after the other."""
    length = settings.seq_len or 4 * budget
    ids = tokenizer(_read(str(settings.data)), verbose=False)["input_ids"]
    rows = list(islice((ids[at : at + length] for at in range(0, len(ids) - length + 1, length)), settings.eval_rows))
    if not rows:
        raise RetrofitError(
            f"{settings.data} holds {len(ids)} tokens, fewer than one row of {length}: give more text, or a smaller "
            "--seq-len"
        )
    return torch.tensor(rows)


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RetrofitError(f"{path} is not UTF-8 text (byte {error.start}): convert it first") from None
    except OSError as error:
        raise RetrofitError(f"{path} cannot be read: {error.strerror}") from None


def _progress() -> AbstractContextManager[Progress]:
    from rich.console import Console

    columns = (TextColumn("{task.description}"), BarColumn(12), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


def tables(summary: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]], dict[str, tuple[str, str]]]]:
    """``(title, rows, columns)`` of each table of a summary, for :func:`retrofit.table.print_table`."""
    names = [row["name"] for row in summary["rows"]]
    found = []
    if summary["identity"] is not None:
        lines = [{"name": name, "same": "yes" if same else "NO"} for name, same in summary["identity"].items()]
        found.append(("bit-identical to the base below the window", lines, {"name": ("", ""), "same": ("", "")}))
    if summary["text"] is not None:
        whole = summary["text"][-1]
        lines = [
            {"name": name, "kl": whole["kl"][name], "closed": whole["kl_gap_closed"][name], "nll": whole["nll"][name]}
            for name in names
        ]
        columns = {
            "name": ("", ""),
            "kl": ("KL to teacher", ".4f"),
            "closed": ("KL gap closed", ".1%"),
            "nll": ("NLL", ".4f"),
        }
        found.append((f"text, {whole['positions']:,} positions past the window", lines, columns))
        lines = [
            {"beyond": f"{entry['beyond']:,}", **entry["kl"]}
            for entry in summary["text"]
            if entry["beyond"] is not None
        ]
        columns = {"beyond": ("tokens past it", "")} | {name: (name, ".4f") for name in names if name != TEACHER}
        found.append(("KL by distance past the window", lines, columns))
    scores = {name: (name, ".1%") for name in names}
    if summary["recall"] is not None:
        columns = {"length": ("tokens", ",d"), "bindings": ("bindings", "d")} | scores
        found.append(("keyed recall", summary["recall"], columns))
    if summary["needles"] is not None:
        found.append(("needles found", summary["needles"], {"task": ("", ""), "samples": ("samples", "d")} | scores))
    return found

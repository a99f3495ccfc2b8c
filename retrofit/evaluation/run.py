"""One evaluation from settings to files: the rows, whatever was asked for, results as they come, one summary."""

import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from patches.errors import RetrofitError
from retrofit.chat import check_template
from retrofit.costs.held import kept_bytes
from retrofit.evaluation.contenders import Contender, identity, load_contenders, lossless, ready
from retrofit.evaluation.harness import run_harness
from retrofit.evaluation.passkey import make_prompts, score_passkey
from retrofit.evaluation.recall import check_bindings, score_recall
from retrofit.evaluation.scores import gap_closed
from retrofit.evaluation.settings import WINDOW_ONLY, Settings
from retrofit.evaluation.store import RESULTS, ResultStore
from retrofit.evaluation.text import by_distance, check_length, score_text
from retrofit.files import check_file, check_output, write_json
from retrofit.table import finite
from retrofit.texts.tokens import read_sequences
from retrofit.untrusted import read_json

SUMMARY = "eval.json"
SHORTEST = 512  # tokens of a probe, unless asked for otherwise: any question fits


def run_evaluation(settings: Settings, output: Path, overwrite: bool = False) -> dict[str, Any]:
    """Evaluate and return what ``output/eval.json`` holds; every result is in ``output/results.jsonl`` as it comes.

    Raises:
        RetrofitError: as the loaders and the parts; results of other settings in ``output``.
    """
    inputs = [settings.model, *settings.adapters, settings.data]
    check_output(output, overwrite=True, data=[] if settings.data is None else [settings.data])
    for name in (SUMMARY, RESULTS):
        check_file(output / name, inputs)
    before = read_json(output / SUMMARY) if (output / SUMMARY).is_file() else {"lossless": None}
    if not isinstance(before, dict) or "lossless" not in before:
        raise RetrofitError(f"{output / SUMMARY} was not written by `retrofit eval`: choose another folder")
    rows, tokenizer = load_contenders(
        settings.model, settings.adapters, window=settings.window, sinks=settings.sinks, dtype=settings.dtype
    )
    if settings.chat:
        check_template(tokenizer)
    budget, narrow = lossless(rows), min(row.window for row in rows if row.window is not None)
    lengths = settings.lengths or (max(2 * budget, SHORTEST), max(4 * budget, 2 * SHORTEST))
    sequences = None
    if settings.data is not None:
        length = settings.seq_len or 4 * budget
        sequences = read_sequences(settings.data, tokenizer, length=length, count=settings.eval_rows)
    prompts = {}
    if "passkey" in settings.probes:
        how: dict[str, Any] = {"samples": settings.samples, "seed": settings.seed, "chat": settings.chat}
        prompts = make_prompts(tokenizer, lengths, settings.depths, **how)
    if sequences is not None:
        check_length(rows, sequences.shape[1])
    if "recall" in settings.probes:
        check_bindings(rows, tokenizer, lengths, settings.bindings)
    store = ResultStore(output, asdict(settings), overwrite)
    harness = None
    if settings.tasks:
        with ready(rows):
            harness = run_harness(
                {row.name: row.model for row in rows},
                tokenizer,
                settings.tasks,
                limit=settings.limit,
                max_length=settings.max_length,
                include_path=settings.include_path,
                apply_chat_template=settings.chat or None,
                metadata={"max_seq_lengths": list(settings.task_lengths)} if settings.task_lengths else None,
                output=output / "harness.json",
            )["scores"]
    chunk = settings.chunk
    if sequences is not None:
        score_text(rows, sequences, store, chunk=chunk)
    if "recall" in settings.probes:
        grid: dict[str, Any] = {"lengths": lengths, "bindings": settings.bindings, "samples": settings.samples}
        score_recall(rows, tokenizer, store, **grid, seed=settings.seed, chunk=chunk)
    if prompts:
        score_passkey(rows, tokenizer, store, prompts, chunk=chunk)
    summary = {
        "settings": asdict(settings),
        "rows": [_describe(row, narrow) for row in rows],
        "lossless": budget,
        "identity": identity(rows, tokenizer, settings.seed) if "identity" in settings.probes else None,
        "text": None if sequences is None else _text(store, rows, sequences.shape[1]),
        "recall": store.means("recall", by="bindings") if "recall" in settings.probes else None,
        "passkey": store.means("passkey", by="depth") if prompts else None,
        "harness": harness,
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"python": platform.python_version()},
    }
    store.begin()
    write_json(output / SUMMARY, finite(summary))
    return summary


def _describe(row: Contender, narrow: int) -> dict[str, Any]:
    memory = row.model.config.memory
    if row.teacher:
        return {"name": row.name, "kind": "full attention", "window": None, "sinks": None, "kept_bytes": None}
    kept = kept_bytes(row.model, narrow)
    return {"name": row.name, **{key: memory[key] for key in ("kind", "window", "sinks")}, "kept_bytes": kept}


def _text(store: ResultStore, rows: Sequence[Contender], length: int) -> list[dict[str, Any]]:
    """:func:`by_distance` with the share of the gap that each row closes."""
    table = by_distance(store, rows, length)
    for entry in table:
        gap = entry["kl"][WINDOW_ONLY]
        entry["kl_gap_closed"] = {name: gap_closed(kl, gap) for name, kl in entry["kl"].items()}
    return table

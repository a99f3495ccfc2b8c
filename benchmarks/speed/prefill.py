"""How long a patched model takes to read a prompt, beside `none` and full attention."""

from functools import partial
from typing import Any

import torch

from benchmarks.speed import cases
from retrofit.bench.models import FULL, NONE, RandomModels, prompt
from retrofit.bench.timing import interleaved, ratios, spread, spread_columns

COLUMNS = {
    "name": ("", ""),
    "length": ("tokens", ",d"),
    **spread_columns("seconds", "seconds", ".3f"),
    "to_none": ("x none", ".2f"),
    "to_half": ("x half the length", ".2f"),
}


class Case(cases.Prefill, RandomModels):
    """Prompts from ``length``, doubled up to ``longest`` tokens (None: that one length)."""


def run(case: Case, repeats: int = 3) -> list[dict[str, Any]]:
    """Seconds of one forward pass over the prompt without a cache to keep, ``repeats`` interleaved rounds.

    One more round, at the first length, comes before and is not counted.

    Returns:
        For full attention and each memory a row per length with ``seconds`` (median; ``_low``, ``_high``), ``to_none``
        and, from the second length on, ``to_half``: medians of the rounds' ratios.
    """
    longest = case.longest or case.length
    models = case.arms(longest)
    rows: list[dict[str, Any]] = []
    before: dict[str, list[float]] = {}
    length = case.length
    with torch.no_grad():
        while length <= longest:
            ids = prompt(models[FULL], length)
            arms = {name: partial(model, ids, use_cache=False, logits_to_keep=1) for name, model in models.items()}
            seconds = interleaved(arms, repeats, warm_up=not before)
            for name in models:
                row: dict[str, Any] = {"name": name, "length": length, **spread("seconds", seconds[name])}
                row["to_none"] = spread("x", ratios(seconds[name], seconds[NONE]))["x"]
                row["to_half"] = spread("x", ratios(seconds[name], before[name]))["x"] if before else None
                rows.append(row)
            before, length = seconds, 2 * length
    return sorted(rows, key=lambda row: list(models).index(row["name"]))

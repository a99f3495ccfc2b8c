"""Time per token and cache bytes of a patched model at a short and at a long context."""

from functools import partial
from typing import Any

import retrofit
from benchmarks.speed import cases
from retrofit.bench.models import RandomModels, decode_step, prompt
from retrofit.bench.timing import interleaved, ratios, spread, spread_columns
from retrofit.evaluation.scores import prefill

COLUMNS = {
    "name": ("", ""),
    "context": ("context", ",d"),
    **spread_columns("seconds", "seconds per token", ".5f"),
    "cache_bytes": ("cache bytes", ",.10g"),
}


class Case(cases.Decode, RandomModels):
    """Two contexts, in tokens already read, to decode at."""


def run(case: Case, repeats: int = 64) -> list[dict[str, Any]]:
    """Seconds per token (``repeats`` of them) and bytes of cache, full attention beside patched models.

    Returns:
        For full attention, `none` and each memory: a row per context with ``context``, ``seconds`` (median; ``_low``,
        ``_high``) and ``cache_bytes``, then a row ``long / short`` with the ratios of both.
    """
    models = case.arms(2 * case.long)
    both = (case.short, case.long)
    ids = prompt(models["none"], case.long)
    caches = {(name, at): prefill(model, ids[:, :at], at)[1] for name, model in models.items() for at in both}
    held = {arm: retrofit.cache_bytes(cache) for arm, cache in caches.items()}
    seconds = interleaved({arm: partial(decode_step, models[arm[0]], ids, caches[arm]) for arm in caches}, repeats)
    rows: list[dict[str, Any]] = []
    for name in models:
        short, long = ((name, at) for at in both)
        rows += [
            {"name": name, "context": at, **spread("seconds", seconds[name, at]), "cache_bytes": held[name, at]}
            for at in both
        ]
        times = spread("seconds", ratios(seconds[long], seconds[short]))
        rows.append({"name": f"{name}: long / short", **times, "cache_bytes": round(held[long] / held[short], 4)})
    return rows

"""`retrofit bench run`: reading, decoding and memory of full attention, window-only and each memory, side by side.

Every figure stands beside full attention's and beside the roofline (retrofit/bench/roofline.py).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import retrofit
from patches.errors import RetrofitError
from retrofit.bench import cases
from retrofit.bench.machine import peak_bytes
from retrofit.bench.models import FULL, NONE, RandomModels, decode_step, prompt
from retrofit.bench.roofline import active_memories, peaks, roofline
from retrofit.bench.timing import interleaved, mib, ratios, spread, spread_columns
from retrofit.costs.estimate import Device
from retrofit.evaluation.baselines import window_only, with_kind
from retrofit.evaluation.scores import prefill
from retrofit.families import is_retrofit
from retrofit.loading import load_base

WHO = {"name": ("", ""), "length": ("tokens", ",d")}
PREFILL = {
    **WHO,
    **spread_columns("prefill_seconds", "seconds", ".3f"),
    "prefill_to_full": ("x full", ".2f"),
    "prefill_roofline_share": ("roofline", ".0%"),
    "whole_seconds": ("in one call", ".3f"),
}
DECODE = {
    **WHO,
    **spread_columns("decode_tokens_per_second", "tokens/s", ",.1f"),
    "decode_to_full": ("x full", ".2f"),
    "decode_roofline_share": ("roofline", ".0%"),
}
MEMORY = {
    **WHO,
    "peak_mib": ("peak MiB", ",.1f"),
    "whole_peak_mib": ("in one call", ",.1f"),
    "cache_bytes": ("cache bytes", ",d"),
    "cache_share": ("of full's", ".1%"),
}
TABLES = {"bench run: prefill": PREFILL, "bench run: decode": DECODE, "bench run: memory": MEMORY}


class Case(cases.Run, RandomModels):
    """Prompts, and the models that read them."""

    def load(self) -> Any:
        """The base, or the exported retrofit with its memory, on the device in eval mode."""
        if self.model is None:
            return self.base(max(self.lengths) + self.tokens + 1)
        base = load_base(self.model, dtype=self.torch_dtype()).eval()
        if is_retrofit(base) and (self.window, self.sinks) != (None, None):
            base.set_window(base.config.memory["window"] if self.window is None else self.window, self.sinks)
        return base.to(self.place())

    def names(self, base: Any) -> list[str]:
        """The arms on ``base``, full attention first."""
        own = (base.config.memory["kind"],) if is_retrofit(base) else ("ahn-gdn",)
        return [FULL, *(self.kinds() if self.memories else dict.fromkeys([NONE, *own]))]

    def arm(self, base: Any, name: str) -> Any:
        """The model of one arm, on the storage of ``base``."""
        if not is_retrofit(base):
            window, sinks = 512 if self.window is None else self.window, 4 if self.sinks is None else self.sinks
            return base if name == FULL else retrofit.patch(base, name, window, sinks)
        if name == base.config.memory["kind"]:
            return base
        if name not in (FULL, NONE):
            return with_kind(base, name)
        model = window_only(base)
        model.model.memory_enabled = name == NONE  # a model of its own, so that its memory can stay off
        return model


def run(case: Case, repeats: int = 3) -> list[dict[str, Any]]:
    """Rows for each length: full attention, `none`, the memories.

    A prompt is read in one call and in chunks, ``repeats`` interleaved rounds each; at the shortest length one more
    comes first and is not counted. On the caches that the chunks left, ``case.tokens`` tokens are decoded, interleaved.

    Returns:
        Rows of figures under the keys of ``PREFILL``, ``DECODE`` and ``MEMORY``, with ``prefill_roofline`` (seconds, at
        least), ``decode_roofline`` (tokens per second, at most), and ``machine_tflops`` and ``machine_bandwidth``
        (10^9 bytes per second) that these come from. ``peak_mib`` is what reading holds beyond the weights, the cache
        included. Speeds relative to full attention are medians of the rounds' ratios. What there was no room for is not
        in the row.

    Raises:
        RetrofitError: as the loaders and :func:`retrofit.patch`; or the arms differ where they must be one model.
    """
    best = Device(case.peak_tflops, case.bandwidth) if case.peak_tflops and case.bandwidth else peaks(case)
    base = case.load()
    models = {name: case.arm(base, name) for name in case.names(base)}
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        check_alike(models)
        for position, length in enumerate(sorted(set(case.lengths))):
            rows += _at(case, models, length, repeats, best, warm_up=position == 0)
    return rows


def check_alike(models: dict[str, Any]) -> None:
    """Up to S + W tokens all arms must be the base, bit for bit: what is timed beyond is then the memory alone."""
    budgets = [memory.capacity for model in models.values() for memory in active_memories(model)]
    ids = prompt(models[FULL], min([*budgets, 256]))
    expected = models[FULL](ids).logits
    for name, model in models.items():
        if not torch.equal(model(ids).logits, expected):
            raise RetrofitError(f"{name} differs from full attention within its window: these are different models")


def _at(
    case: Case, models: dict[str, Any], length: int, repeats: int, best: Device, warm_up: bool
) -> list[dict[str, Any]]:
    """The rows of one length."""
    ids = prompt(models[FULL], length)
    rows: dict[str, dict[str, Any]] = {name: {"name": name, "length": length} for name in models}
    caches: dict[str, Any] = {}

    def read(name: str, chunk: int) -> None:
        caches.pop(name, None)  # of the round before
        caches[name] = prefill(models[name], ids, chunk)[1]

    prefilled: dict[str, list[float]] = {}
    for prefix, peak, chunk in (("whole", "whole_peak_mib", length), ("prefill", "peak_mib", case.chunk)):
        caches.clear()
        room = [name for name in models if _find_peak(case, models[name], rows[name], peak, length, chunk)]
        prefilled = interleaved({name: partial(read, name, chunk) for name in room}, repeats, warm_up)
        for name in room:
            rows[name] |= spread(f"{prefix}_seconds", prefilled[name])
    held = {name: retrofit.cache_bytes(cache) for name, cache in caches.items()}
    steps = {name: partial(decode_step, models[name], ids, cache) for name, cache in caches.items()}
    decoded = interleaved(steps, case.tokens)
    for name in prefilled:
        row = rows[name]
        row |= spread("decode_tokens_per_second", [1 / second for second in decoded[name]])
        row["cache_bytes"] = held[name]
        if FULL in prefilled:
            row["prefill_to_full"] = spread("x", ratios(prefilled[FULL], prefilled[name]))["x"]
            row["decode_to_full"] = spread("x", ratios(decoded[FULL], decoded[name]))["x"]
            row["cache_share"] = held[name] / held[FULL]
        row |= roofline(models[name], length, best)
        row["prefill_roofline_share"] = row["prefill_roofline"] / row["prefill_seconds"]
        row["decode_roofline_share"] = row["decode_tokens_per_second"] / row["decode_roofline"]
    return list(rows.values())


def _find_peak(case: Case, model: Any, row: dict[str, Any], key: str, length: int, chunk: int) -> bool:
    """Put the peak memory of one way of reading under ``key`` of ``row``; False if there is no room for it.

    On a CPU a process of its own measures it, which has no model yet.
    """
    device = case.place()
    try:
        if device.type == "cuda":
            row[key] = mib(peak_bytes(device, _reading, model, length, chunk))
        else:
            row[key] = mib(peak_bytes(device, _reading_alone, case, row["name"], length, chunk))
    except MemoryError:
        return False
    return True


def _reading_alone(case: Case, name: str, length: int, chunk: int) -> Callable[[], object]:
    model = case.arm(case.load(), name)
    _reading(model, 1, 1)()  # loads kernels; holds next to nothing
    return _reading(model, length, chunk)


def _reading(model: Any, length: int, chunk: int) -> Callable[[], object]:
    return torch.no_grad()(partial(prefill, model, prompt(model, length), chunk))

"""`retrofit bench run`: reading, decoding and memory of full attention, window-only and each memory, side by side.

Every figure stands beside full attention's and beside the roofline: what the machine would need if it did nothing but
the products (retrofit/flops.py) at its best speed, or nothing but move weights and cache once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import retrofit
from patches.config import MemoryConfig
from patches.errors import RetrofitError
from retrofit.baselines import window_only
from retrofit.bench.decode import check_hidden, named_kinds, random_base, stepper
from retrofit.bench.machine import find_device, finished, peak_bytes, peaks
from retrofit.bench.timing import interleaved, ratios, spread
from retrofit.estimate import DTYPES, Device, costs, layer_memories
from retrofit.evaluation.feeding import CHUNK, prefill
from retrofit.families import is_retrofit
from retrofit.loading import load_base

FULL, NONE = "full attention", "none"

WHO = {"name": ("", ""), "length": ("tokens", ",d")}
PREFILL = {
    **WHO,
    "prefill_seconds": ("seconds", ".3f"),
    "prefill_seconds_low": ("quartile", ".3f"),
    "prefill_seconds_high": ("quartile", ".3f"),
    "prefill_to_full": ("x full", ".2f"),
    "prefill_roofline_share": ("roofline", ".0%"),
    "whole_seconds": ("in one call", ".3f"),
}
DECODE = {
    **WHO,
    "decode_tokens_per_second": ("tokens/s", ",.1f"),
    "decode_tokens_per_second_low": ("quartile", ",.1f"),
    "decode_tokens_per_second_high": ("quartile", ",.1f"),
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


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        memories: kinds, or ``"all"``; none given means an exported model's own, or ahn-gdn. Full attention and `none`
            are always there.
        lengths: of the prompts, tokens.
        model: a base or an exported retrofit (path or Hub id); None means a random Qwen2 of ``layers`` and ``hidden``.
        window, sinks: W and S; None means an exported model's own, or 512 and 4.
        tokens: decoded at each length.
        chunk: tokens per call in which a prompt is read, as `retrofit eval` does; and once more in one call.
        device, dtype: where, and in what.
        best: peak figures of the device; None means known or measured ones.
    """

    memories: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    model: str | None = None
    window: int | None = None
    sinks: int | None = None
    layers: int = 4
    hidden: int = 256
    tokens: int = 32
    chunk: int = CHUNK
    device: str = "cpu"
    dtype: str = "float32"
    best: Device | None = None

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or self.tokens < 1 or self.chunk < 1:
            raise RetrofitError(
                f"lengths={self.lengths}, tokens={self.tokens}, chunk={self.chunk}: all must be 1 or more"
            )
        if self.dtype not in DTYPES:
            raise RetrofitError(f"dtype={self.dtype!r} is not known: use {', '.join(DTYPES)}")
        check_hidden(self.hidden)
        find_device(self.device)
        named_kinds(self.memories)


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
    device = find_device(case.device)
    best = case.best or peaks(device, DTYPES[case.dtype])
    base = load(case)
    models = {name: contender(case, base, name) for name in names(case, base)}
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        check_alike(models, device)
        for position, length in enumerate(sorted(set(case.lengths))):
            rows += _at(case, models, length, repeats, best, warm_up=position == 0)
    return rows


def load(case: Case) -> Any:
    """The base, or the exported retrofit with its memory, on the device in eval mode."""
    if case.model is None:
        base: Any = random_base(case.layers, case.hidden, max(case.lengths) + case.tokens + 1).to(DTYPES[case.dtype])
    else:
        base = load_base(case.model, dtype=DTYPES[case.dtype]).eval()
    if is_retrofit(base) and (case.window, case.sinks) != (None, None):
        base.set_window(base.config.memory["window"] if case.window is None else case.window, case.sinks)
    return base.to(find_device(case.device))


def names(case: Case, base: Any) -> list[str]:
    """The arms, full attention first."""
    own = base.config.memory["kind"] if is_retrofit(base) else "ahn-gdn"
    return [FULL, *named_kinds(case.memories or (own,))]


def contender(case: Case, base: Any, name: str) -> Any:
    """The model of one arm, on the storage of ``base``."""
    if not is_retrofit(base):
        if name == FULL:
            return base
        window, sinks = 512 if case.window is None else case.window, 4 if case.sinks is None else case.sinks
        return retrofit.patch(base, name, window, sinks)
    memory = base.config.memory
    if name == memory["kind"]:
        return base
    if name not in (FULL, NONE):
        return retrofit.patch(base, name, memory["window"], memory["sinks"])
    model = window_only(base)
    model.model.memory_enabled = name == NONE  # a model of its own, so that its memory can stay off
    return model


def check_alike(models: dict[str, Any], device: torch.device) -> None:
    """Up to S + W tokens all arms must be the base, bit for bit: what is timed beyond is then the memory alone."""
    budgets = [memory.capacity for model in models.values() for memory in _memories(model)]
    ids = prompt(models[FULL], min([*budgets, 256]), device)
    expected = models[FULL](ids).logits
    for name, model in models.items():
        if not torch.equal(model(ids).logits, expected):
            raise RetrofitError(f"{name} differs from full attention within its window: these are different models")


def prompt(model: Any, length: int, device: torch.device) -> Tensor:
    """Random tokens ``(1, length)``: speed does not depend on what they say."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (1, length), generator=generator).to(device)


def _at(
    case: Case, models: dict[str, Any], length: int, repeats: int, best: Device, warm_up: bool
) -> list[dict[str, Any]]:
    """The rows of one length."""
    device = find_device(case.device)
    ids = prompt(models[FULL], length, device)
    rows: dict[str, dict[str, Any]] = {name: {"name": name, "length": length} for name in models}

    def read(prefix: str, chunk: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
        """Fill in the columns of one way of reading; each arm's seconds, and the cache that it left."""
        caches: dict[str, Any] = {}

        def reader(name: str) -> Callable[[], None]:
            def call() -> None:
                caches.pop(name, None)  # of the round before
                caches[name] = prefill(models[name], ids, chunk)[1]

            return finished(call, device)

        peak = "whole_peak_mib" if prefix == "whole" else "peak_mib"
        room = [name for name in models if _find_peak(case, models[name], rows[name], peak, length, chunk)]
        seconds = interleaved({name: reader(name) for name in room}, repeats, warm_up)
        for name in room:
            rows[name] |= spread(f"{prefix}_seconds", seconds[name])
        return seconds, caches

    read("whole", length)
    prefilled, caches = read("prefill", case.chunk)
    held = {name: retrofit.cache_bytes(cache) for name, cache in caches.items()}
    decoded = interleaved(
        {name: finished(stepper(models[name], ids, cache), device) for name, cache in caches.items()}, case.tokens
    )
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


def roofline(model: Any, length: int, best: Device) -> dict[str, float]:
    """Seconds that reading ``length`` tokens takes at least, tokens per second that can be decoded behind them at most.

    Reading: its operations at the peak, or the weights and the final cache moved once, whichever takes longer. Decoding
    one sequence: weights and cache moved once per token, a matrix state written back.
    """
    memories: list[Any] = [None] * model.config.num_hidden_layers
    extra = 0
    if _memories(model):
        memories = layer_memories(model.config, MemoryConfig.from_dict(model.config.memory))
        extra = sum(parameter.numel() for _, parameter in model.memory_parameters())
    cost = costs(model.config, memories, length, 1, model.dtype, extra)
    moving = cost["decode_bytes"] / (best.bandwidth * 1e9)
    return {
        "prefill_roofline": max(cost["prefill_flops"] / (best.tflops * 1e12), moving),
        "decode_roofline": 1 / moving,
        "machine_tflops": best.tflops,
        "machine_bandwidth": best.bandwidth,
    }


def _find_peak(case: Case, model: Any, row: dict[str, Any], key: str, length: int, chunk: int) -> bool:
    """Put the peak memory of one way of reading under ``key`` of ``row``; False if there is no room for it."""
    device = find_device(case.device)
    try:
        if device.type == "cuda":
            held = peak_bytes(device, _reading, model, length, chunk, device)
        else:
            held = peak_bytes(device, _reading_alone, case, row["name"], length, chunk)
    except MemoryError:
        return False
    row[key] = None if held is None else held / 2**20
    return True


def _reading_alone(case: Case, name: str, length: int, chunk: int) -> Callable[[], object]:
    """For a process of its own, which has no model yet."""
    device = find_device(case.device)
    model = contender(case, load(case), name)
    _reading(model, 1, 1, device)()  # loads kernels; holds next to nothing
    return _reading(model, length, chunk, device)


def _reading(model: Any, length: int, chunk: int, device: torch.device) -> Callable[[], object]:
    ids = prompt(model, length, device)
    return torch.no_grad()(lambda: prefill(model, ids, chunk))


def _memories(model: Any) -> list[Any]:
    """Of the layers, where they are on."""
    on = is_retrofit(model) and model.model.memory_enabled
    return list(model.model.memories().values()) if on else []

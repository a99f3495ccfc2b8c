"""`retrofit estimate`: what a memory costs and saves on a base, from the base's configuration alone.

Parameters are counted on the patched model itself, built without weights; bytes by the memories' own accounting, which
a test holds to what a cache really holds; operations by retrofit/costs/flops.py.
"""

from dataclasses import dataclass
from typing import Any

import torch

from patches.config import MemoryConfig, check_base
from patches.errors import one_of
from patches.kinds import new_memory
from patches.memory import Memory
from patches.options import whole_number
from retrofit.costs.bases import base_config
from retrofit.costs.flops import Shape, forward_flops
from retrofit.costs.held import cache_parts, layer_memories
from retrofit.patching import skeleton

COLUMNS = {
    "name": ("", ""),
    "extra_m": ("extra M", ".2f"),
    "prefill_tflops": ("prefill TFLOP", ",.0f"),
    "prefill_ratio": ("ratio", ".1%"),
    "cache_mb": ("cache MB", ",.0f"),
    "gates_mb": ("gates MB", ",.0f"),
    "state_mb": ("state MB", ",.0f"),
    "cache_ratio": ("ratio", ".1%"),
    "decode_mb": ("MB per step", ",.0f"),
    "decode_ratio": ("ratio", ".1%"),
}
SECONDS = {
    "name": ("", ""),
    "prefill_seconds": ("prefill s", ".2f"),
    "decode_ms": ("step ms", ".2f"),
}
LEGEND = (
    "extra: parameters of the memory, in millions; prefill: operations to read the prompt; cache: bytes kept after it, "
    "write gates and states (float32) among them; MB per step: weights and cache that one more token of every sequence "
    "moves"
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Device:
    """Peak figures of an accelerator, as its maker gives them.

    Attributes:
        tflops: dense matrix products in the run's dtype, 10^12 per second.
        bandwidth: of its memory, 10^9 bytes per second.
    """

    tflops: float
    bandwidth: float


def estimate(
    base: str,
    memory: str,
    window: int,
    sinks: int,
    length: int,
    *,
    batch: int = 1,
    dtype: str = "auto",
    device: Device | None = None,
    layers: list[int] | None = None,
    others: str = "full",
    by_layer: dict[str, dict[str, Any]] | None = None,
    **options: Any,
) -> tuple[list[dict[str, Any]], str]:
    """Rows for full attention, sinks + window, and ``memory`` after ``length`` tokens of ``batch`` sequences.

    Args:
        base: anything :func:`retrofit.costs.bases.base_config` takes.
        dtype: of weights and cache; ``"auto"`` is the checkpoint's own.
        device: adds the seconds below which nothing can go on it: operations at its peak, bytes at its bandwidth.
        layers, others, by_layer, options: as for :func:`retrofit.patch`.

    Returns:
        The rows, and in words what they were computed for.

    Raises:
        RetrofitError: as :func:`retrofit.patch`, or ``length``, ``batch`` or ``dtype`` mean nothing.
    """
    whole_number("length", length)
    whole_number("batch", batch)
    config, origin = base_config(base)
    one_of("dtype", dtype, "auto", *DTYPES)
    own = getattr(config, "dtype", None)
    kept = DTYPES[dtype] if dtype != "auto" else own if isinstance(own, torch.dtype) else torch.float32
    asked = new_memory(memory, window, sinks, layers, others, options, by_layer=by_layer or {})
    plain = asked.window_only()
    check_base(config, plain)
    rows = []
    kinds: dict[str, MemoryConfig | None] = {"full": None, "window": plain, memory: asked}
    if memory == "none":
        del kinds["none"]
    for name, settings in kinds.items():
        memories = layer_memories(config, settings)
        extra = sum(parameter.numel() for _, parameter in skeleton(config, settings or plain).memory_parameters())
        rows.append({"name": name, "extra_parameters": extra, **costs(config, memories, length, batch, kept, extra)})
    for row in rows:
        row["prefill_ratio"] = row["prefill_flops"] / rows[0]["prefill_flops"]
        row["cache_ratio"] = row["cache_bytes"] / rows[0]["cache_bytes"]
        row["decode_ratio"] = row["decode_bytes"] / rows[0]["decode_bytes"]
        row["extra_m"] = row["extra_parameters"] / 1e6
        row["prefill_tflops"] = row["prefill_flops"] / 1e12
        for name in ("cache", "gates", "state", "decode"):
            row[f"{name}_mb"] = row[f"{name}_bytes"] / 1e6
        if device is not None:
            row["prefill_seconds"] = row["prefill_flops"] / (device.tflops * 1e12)
            row["decode_ms"] = row["decode_bytes"] / (device.bandwidth * 1e9) * 1e3
    precision = str(kept).removeprefix("torch.")
    said = f"{base} ({origin}), {precision}: {batch} x {length:,} tokens, S = {sinks}, W = {window}"
    said += " or as by_layer says" if asked.by_layer else ""
    return rows, said


def costs(
    config: Any, memories: list[Memory | None], length: int, batch: int, dtype: torch.dtype, extra: int
) -> dict[str, int]:
    """Operations to read the prompt, bytes kept after it, bytes that one more token of every sequence moves."""
    shape = Shape.of(config)
    cache = gates = state = rewritten = 0
    exact = min((memory.capacity for memory in memories if memory is not None), default=None)
    for memory in memories:
        parts = cache_parts(config, memory, length, dtype, exact)
        cache, gates, state = cache + sum(parts), gates + parts[1], state + parts[2]
        if memory is not None and memory.writes_back:
            rewritten += parts[2]
    weights = (shape.body + shape.head) * dtype.itemsize + extra * torch.promote_types(dtype, torch.float32).itemsize
    return {
        "prefill_flops": batch * forward_flops(shape, memories, length, head=1),
        "cache_bytes": batch * cache,
        "gates_bytes": batch * gates,
        "state_bytes": batch * state,
        "decode_bytes": weights + batch * (cache - gates + rewritten),  # of the gates one token's are read
    }

"""The ways to spend equal bytes that ``make real`` compares, by the name that each has in its tables.

Bytes are those that one sequence keeps in a layer on average: sinks, window and entries, the cache in bfloat16.
"""

from typing import Any

import torch

from patches.kinds import build_memory, find_kind, new_memory
from retrofit.costs.held import layer_bytes, row_bytes

SINKS = 4
DTYPE = torch.bfloat16  # of the cache whose bytes are counted, whatever the base runs in
TOTALS = (50_000, 75_000, 100_000, 149_676)
BESIDE = (12_090, 48_360)  # of the entries beside W = 128
BARE = "window-only"
# window and bits that `--choose` finds for so many bytes, on texts that no page reports
FOUND: dict[int, tuple[int, list[float]]] = {
    50_000: (8, [3, 3.5]),
    75_000: (16, [3, 3.5]),
    100_000: (16, [3.5, 4.5]),
    149_676: (16, [4.5, 5.5]),
    # for rows of 4,096 tokens: not searched, windows of as large a part of the bytes
    222_294: (32, [3, 3.5]),
    444_588: (64, [3, 3.5]),
}

Ways = dict[str, dict[str, Any]]  # {name: arguments of retrofit.patch}


def contenders(config: Any, window: int, totals: tuple[int, ...] = TOTALS) -> Ways:
    """Windows, windows in few bits and chosen tokens of each of ``totals`` bytes; and chosen tokens beside W."""
    ways: Ways = {BARE: {"memory": "none"}}
    for total in totals:
        narrow, bits = FOUND.get(total, (window // 8, [3, 3.5]))
        ways[f"window, {total:,}"] = {"memory": "none", "window": total // row_bytes(config, DTYPE) - SINKS}
        in_bits = chosen(config, narrow, bits, total)
        ways[f"window in few bits, {total:,}"] = in_bits | {"latest": 1}
        ways[f"expected, {total:,}"] = in_bits | {"shares": "need"}
    for size in BESIDE:
        total = size + (window + SINKS) * row_bytes(config, DTYPE)
        ways[f"expected beside W = {window}, {size:,}"] = chosen(config, window, [3, 3.5], total) | {"shares": "need"}
    return ways


def chosen(config: Any, window: int, bits: list[float], total: int) -> dict[str, Any]:
    """``expected`` with as many entries in each head as ``total`` bytes hold."""
    with torch.device("meta"):
        memory: Any = build_memory(config, new_memory("expected", window, SINKS, options={"bits": bits, "rows": 1}))
    left = total - (window + SINKS) * row_bytes(config, DTYPE)
    rows = left // (memory.kv_heads * memory.entry_bytes(DTYPE))
    return {"memory": "expected", "window": window, "bits": bits, "rows": rows}


def untrained(config: Any, window: int, totals: tuple[int, ...] = ()) -> Ways:
    """The other kinds without any training, and the window, with ``BESIDE``'s last bytes beside W."""
    size = BESIDE[-1]
    tokens = size // row_bytes(config, DTYPE)
    ways: Ways = {BARE: {"memory": "none"}, "window of equal bytes": {"memory": "none", "window": window + tokens}}
    marks = _bytes(config, "tova", window + tokens, {})  # where its tokens stand
    ways["joint, calibrated"] = {"memory": "joint"}
    ways["joint, calibrated, linear branch alone"] = {"memory": "joint", "branches": "linear", "features": 62}
    ways["tova"] = {"memory": "tova", "window": window + (size - marks) * tokens // size}
    for kind, option in (("h2o", "heavy"), ("compressive", "rows"), ("kvm", "rows")):
        few, more = (_bytes(config, kind, window, {option: tokens - less}) for less in (16, 8))
        each = (more - few) // 8
        ways[f"{kind}, not fitted" if find_kind(kind).trainable else kind] = {
            "memory": kind,
            option: tokens - 16 + (size - few) // each,
        }
    return ways


def _bytes(config: Any, kind: str, window: int, options: dict[str, Any]) -> int:
    """Bytes per layer beside the window."""
    with torch.device("meta"):
        memory = build_memory(config, new_memory(kind, window, SINKS, options=options))
    return layer_bytes(config, memory, DTYPE) - window * row_bytes(config, DTYPE)

"""The ways to spend equal bytes that ``make real`` compares, by the name that each has in its tables."""

from typing import Any

import torch

from patches.kinds import build_memory, find_kind, new_memory
from retrofit.costs.held import layer_bytes, row_bytes

SINKS = 4
BYTES = 16_120  # per layer and key/value head: what the state of `joint` takes of heads of 64
TILT = 0.004  # nats per token in favour of later ones: chosen by --choose, on other documents than those reported
RECENT, NEED = 1e6, "need"
TILTS = (0.0, 0.002, 0.004, 0.008)
THRICE = "3 x"
BARE, EQUAL = "window-only", "window of equal bytes"
WIDTH = {"float32": 4, "bfloat16": 2}  # bytes of a number

Ways = dict[str, dict[str, Any]]  # {name: arguments of retrofit.patch}


def fitting(config: Any, size: int, dtype: str = "float32") -> dict[str, int]:
    """How many tokens ``size`` bytes per head hold, of a window (``"exact"``) and as rows in 16 to 4 bits."""
    exact = row_bytes(config, getattr(torch, dtype)) // config.num_key_value_heads
    each = {"exact": exact, "16": exact + 4}
    each |= {str(bits): 2 * (exact // WIDTH[dtype] // 2 * bits // 8 + 2) + 8 for bits in (8, 6, 5, 4)}
    return {name: size // bytes_ for name, bytes_ in each.items()}


def contenders(config: Any, window: int, dtype: str) -> Ways:
    """Every way to spend ``BYTES`` per head beside the window, and the best ones at three times as many.

    In float32, which CPUs are slower in, without the latter and without what needs a base in bfloat16.
    """
    ways: Ways = {BARE: {"memory": "none"}}
    for size, note in ((BYTES, ""), (3 * BYTES, f", {THRICE}")):
        wide, narrow = fitting(config, size), fitting(config, size, "bfloat16")
        ways[EQUAL + note] = {"memory": "none", "window": window + wide["exact"]}
        ways[f"{EQUAL}, bfloat16 base{note}"] = {"memory": "none", "window": window + narrow["exact"]}
        if not note:
            ways |= {f"window in {bits} bits": _rows(wide, bits, RECENT) for bits in (8, 4)}
            ways["expected"] = _rows(wide, 16, TILT)
            ways["expected, bfloat16 base"] = _rows(narrow, 16, TILT)
            ways["expected, bfloat16 base, by need"] = _rows(narrow, 16, TILT, NEED)
        else:
            ways[f"window in 8 bits{note}"] = _rows(wide, 8, RECENT)
        ways |= {f"expected, {bits} bits{note}": _rows(wide, bits, TILT) for bits in (8, 4)}
        ways |= {f"window in {bits} bits, by need{note}": _rows(wide, bits, RECENT, NEED) for bits in (4, 5)}
        ways |= {f"expected, {bits} bits, by need{note}": _rows(wide, bits, TILT, NEED) for bits in (4, 5)}
    if dtype == "float32":
        ways = {name: how for name, how in ways.items() if "bfloat16" not in name and THRICE not in name}
    return ways


def candidates(config: Any, window: int, dtype: str) -> Ways:
    """What ``--choose`` compares, in any dtype: bits, tilts, shares at ``BYTES``, and tilts at three times as many."""
    ways: Ways = {BARE: {"memory": "none"}}
    for size, note, all_bits in ((BYTES, "", (16, 8, 4)), (3 * BYTES, f", {THRICE}", (8,))):
        for bits in all_bits:
            for tilt in TILTS:
                ways[f"{bits} bits, tilt {tilt:g}{note}"] = _rows(fitting(config, size), bits, tilt)
    for bits in (8, 6, 5, 4):
        for tilt in TILTS[1:]:
            ways[f"{bits} bits, tilt {tilt:g}, by need"] = _rows(fitting(config, BYTES), bits, tilt, NEED)
    return ways


def untrained(config: Any, window: int, dtype: str) -> Ways:
    """The other kinds without any training, at ``BYTES`` beside a base in ``dtype``; ``joint`` and the windows."""
    tokens = fitting(config, BYTES, dtype)["exact"]
    ways: Ways = {BARE: {"memory": "none"}, EQUAL: {"memory": "none", "window": window + tokens}}
    size = BYTES * config.num_key_value_heads
    marks = _bytes(config, "tova", window + tokens, {}, dtype)  # where its tokens stand
    ways["joint, calculated"] = {"memory": "joint"}
    ways["joint, calculated, linear branch alone"] = {"memory": "joint", "branches": "linear", "features": 62}
    ways["tova"] = {"memory": "tova", "window": window + (size - marks) * tokens // size}
    for kind, option in (("h2o", "heavy"), ("compressive", "rows"), ("kvm", "rows")):
        few, more = (_bytes(config, kind, window, {option: tokens - less}, dtype) for less in (16, 8))
        each = (more - few) // 8
        ways[f"{kind}, not fitted" if find_kind(kind).trainable else kind] = {
            "memory": kind,
            option: tokens - 16 + (size - few) // each,
        }
    return ways


def _bytes(config: Any, kind: str, window: int, options: dict[str, Any], dtype: str) -> int:
    """Bytes per layer beside the window."""
    with torch.device("meta"):
        memory = build_memory(config, new_memory(kind, window, SINKS, options=options))
    own = getattr(torch, dtype)
    return layer_bytes(config, memory, own) - window * row_bytes(config, own)


def _rows(fit: dict[str, int], bits: int, tilt: float, shares: str = "even") -> dict[str, Any]:
    return {"memory": "expected", "bits": bits, "rows": fit[str(bits)], "tilt": tilt, "shares": shares}

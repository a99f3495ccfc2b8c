"""Perplexity by size of state: the table of TOVA's paper (arXiv 2401.06104, Table 3), its policies side by side.

The paper reads PG-19's test set in texts of 4,096 tokens with LLaMA-2-7B, at 64 to 2,048 tokens. A policy's size is
what it holds from one token to the next, sinks included: a column of the table costs every policy the same bytes of
keys and values. The token that is being read comes on top with TOVA and H2O; with the windows it is one of the W.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from retrofit.evaluation.scores import CHUNK, evaluate
from retrofit.patching import patch
from retrofit.table import show_progress

SIZES = (64, 128, 256, 512, 1024, 2048)
FULL = "full"


def _window(size: int, sinks: int = 0) -> dict[str, Any]:
    return {"memory": "none", "window": size - sinks, "sinks": sinks}


# how each policy spends a size: arguments of retrofit.patch
POLICIES: dict[str, Callable[[int], dict[str, Any]]] = {
    "window": _window,
    "window+4": lambda size: _window(size, 4),
    "h2o": lambda size: {"memory": "h2o", "window": size - size // 2, "heavy": size // 2, "prefill": "token"},
    "tova": lambda size: {"memory": "tova", "window": size, "prefill": "token"},
}


def perplexity_by_size(
    base: Any,
    sequences: Tensor,
    sizes: Sequence[int] = SIZES,
    policies: Sequence[str] = tuple(POLICIES),
    *,
    chunk: int = CHUNK,
) -> dict[str, dict[int | None, float]]:
    """Perplexity of texts under each policy at each size of its state, and under full attention.

    Texts are read in chunks through one cache: a policy's memory does not grow with them, full attention's does.

    Args:
        base: a base, or a patched model, whose base is taken.
        sequences: (N, T) token ids, without padding; all but the first token of each are predicted.
        sizes: tokens held per layer, sinks included; 5 or more for "window+4", 2 for the others.
        policies: of :data:`POLICIES`.
        chunk: tokens per forward pass.

    Returns:
        ``{policy: {size: perplexity}}``, ``"full"`` first, under the size None.
    """
    found: dict[str, dict[int | None, float]] = {name: {} for name in (FULL, *policies)}
    cells: list[tuple[str, int | None]] = [(FULL, None), *((policy, size) for size in sizes for policy in policies)]
    for policy, size in show_progress(cells, "sizes of state"):
        model = patch(base, **(_window(1) if size is None else POLICIES[policy](size)))
        with model.memory_off() if size is None else nullcontext():
            found[policy][size] = perplexity(model, sequences, chunk=chunk)
    return found


def perplexity(model: Any, sequences: Tensor, *, chunk: int = CHUNK) -> float:
    """Perplexity of texts (N, T), each read by itself in chunks of so many tokens; every token but the first counts."""
    scores = evaluate({"model": model}, sequences, start=0, teacher=False, batch_size=1, chunk=chunk)
    return math.exp(scores["model"].mean_nll)


def table(found: Mapping[str, Mapping[int | None, float]]) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """Rows and columns of :func:`perplexity_by_size` for :func:`retrofit.table.print_table`: a column for each size."""
    sizes = sorted({size for scores in found.values() for size in scores if size is not None})
    rows = [
        {"policy": policy, **{str(size): scores.get(None, scores.get(size)) for size in sizes}}
        for policy, scores in found.items()
    ]
    return rows, {"policy": ("", "")} | {str(size): (str(size), ".2f") for size in sizes}

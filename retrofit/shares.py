"""Rows by need: which key heads lack tokens that have left the window, and how many of all rows each of them gets.

A few heads copy from far behind; their queries look at single tokens that no head's usual queries tell beforehand, and
they need nearly all of them. Most heads are served by a handful. With full attention on a few texts, each head's output
is computed again as if it had only so many rows, and what that changes in the residual stream is weighed against the
rows that would prevent it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from patches.config import MemoryConfig
from patches.errors import RetrofitError
from patches.precision import wide
from patches.rotary import rotate

from .observer import LayerCall

GRID = (0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)  # shares of what has left the window
TEXT = 8  # a text must be so many windows long; else a narrower window stands for the model's, and its rows for more
EVERY = 4  # query of a text counts


class Needs:
    """What each key/value head loses with so many rows, added up over texts that the teacher reads.

    Args:
        memories: the memories that have shares, by layer.
        shortest: tokens of the shortest text.

    Raises:
        RetrofitError: the texts are too short for anything to leave a window.
    """

    def __init__(self, memories: dict[int, Any], shortest: int):
        first = next(iter(memories.values()))
        self.sinks = first.sinks
        self.windows = {index: max(1, min(one.window, shortest // TEXT)) for index, one in memories.items()}
        self.evicted = {index: shortest - window - first.sinks for index, window in self.windows.items()}
        if min(self.evicted.values()) < TEXT:
            raise RetrofitError(
                f"shares='need' is measured on what leaves a window, and a text of {shortest} tokens is too short for "
                "that: calibrate on longer ones, or leave shares='even'"
            )
        self.losses = {index: torch.zeros(one.kv_heads, len(GRID)) for index, one in memories.items()}

    def add(self, body: Any, call: LayerCall) -> None:
        """Add one layer's share of a text."""
        index, attention, step = call.index, call.attention, call.step(body)
        memory, window, n = attention.memory, self.windows[index], step.x.shape[1]
        dtype = wide(step.k.dtype)
        q, k = (rotate(x.to(dtype), *step.now.tables(0, n, dtype)) for x in (step.q, step.k))
        v, arrival = step.v.to(dtype), torch.arange(n, device=k.device)
        tilt = memory.options.tilt * memory.window / window
        lengths = call.residual.norm(dim=-1).to(k.device, dtype)  # the layer before may be on another one
        scores = memory.score(step.k.to(dtype), step.v, step) + tilt * arrival
        queries = arrival[window + self.sinks :: EVERY]
        near = (queries[:, None] - arrival < window) | (arrival < self.sinks)
        near &= arrival <= queries[:, None]
        rows = [round(share * self.evicted[index]) for share in GRID]
        heads = q[:, :, queries].unflatten(1, (memory.kv_heads, -1))  # (B, H_kv, G, m, D)
        for text in range(len(k)):
            for head in range(memory.kv_heads):
                logits = heads[text, head] @ k[text, head].T * step.scale  # (G, m, n)
                weights = logits.masked_fill(arrival > queries[:, None], float("-inf")).softmax(-1)
                full, above = weights @ v[text, head], _above(scores[text, head, self.sinks : n - window])
                above = above[queries - window - self.sinks]
                missing = []
                for number in rows:
                    seen = near.clone()
                    seen[:, self.sinks : n - window] |= above < number
                    left = weights * seen
                    seen_mass = left.sum(-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
                    missing.append((left @ v[text, head]) / seen_mass - full)
                change = _projected(attention, torch.stack(missing), head, step.x.dtype).norm(dim=-1)  # (rows, m)
                relative = change / lengths[text, queries]
                self.losses[index][head] += relative.square().mean(-1).cpu().float()

    def rows(self, model: Any) -> list[int]:
        """The rows of all key/value heads, head after head and layer after layer, as :meth:`give` takes them."""
        memories = model.get_decoder().memories()
        return [number for index in self.losses for number in memories[index].rows]

    def by_need(self, model: Any) -> list[int]:
        """:meth:`rows` of ``model`` divided anew, each to the head where it prevents most."""
        curves = []
        for index, losses_of_heads in self.losses.items():
            scale = model.get_decoder().memories()[index].window / self.windows[index]
            grid = [round(share * self.evicted[index] * scale) for share in GRID]
            for losses in losses_of_heads:
                points = dict(zip(grid, losses.tolist(), strict=True))  # shares of few tokens may be the same number
                curves.append((list(points), list(points.values())))
        return divide(curves, sum(self.rows(model)))

    def give(self, model: Any, rows: Sequence[int] | None = None) -> None:
        """Give each key/value head its rows, and write them to the configuration, so that they are saved.

        Args:
            model: the one that was measured, or one of the same base, windows, sinks and tilt.
            rows: as :meth:`rows` has them; :meth:`by_need` by default.
        """
        given = iter(self.by_need(model) if rows is None else rows)
        named = MemoryConfig.from_dict(model.config.memory).named_layers()
        for index in self.losses:
            memory = model.get_decoder().memories()[index]
            own = [next(given) for _ in range(memory.kv_heads)]
            named[index] = {**named.get(index, {}), "rows": own}
            memory.options = replace(memory.options, rows=own)
        model.config.memory = {**model.config.memory, "by_layer": {str(index): named[index] for index in sorted(named)}}


def between(before: Sequence[int], after: Sequence[int], part: float) -> tuple[int, ...]:
    """``part`` of the way from some rows to as many others, in whole numbers of the same sum.

    >>> between([4, 4], [7, 1], 0.5)
    (6, 2)
    """
    wanted = [old + part * (new - old) for old, new in zip(before, after, strict=True)]
    whole = [int(number) for number in wanted]
    rest = sorted(range(len(whole)), key=lambda at: whole[at] - wanted[at])[: sum(before) - sum(whole)]
    return tuple(number + (at in rest) for at, number in enumerate(whole))


def divide(curves: Sequence[tuple[list[int], list[float]]], total: int) -> list[int]:
    """``total`` rows over heads so that the sum of what they lose is least.

    Args:
        curves: of each head, numbers of rows, from 0 upwards, and what it loses with each of them.

    The first head loses 4 of its 5 by its first two rows, the second everything evenly:

    >>> divide([([0, 2, 6], [5.0, 1.0, 0.0]), ([0, 6], [3.0, 0.0])], total=6)
    [2, 4]
    """
    steps = []
    for head, (numbers, losses) in enumerate(curves):
        at = 0
        while at < len(numbers) - 1:  # to the point that is reached most steeply: the curve's lower hull
            gains = [(losses[at] - losses[to]) / (numbers[to] - numbers[at]) for to in range(at + 1, len(numbers))]
            best = max(gains)
            to = at + 1 + max(i for i, gain in enumerate(gains) if gain == best)
            steps.append((best, head, numbers[to] - numbers[at]))
            at = to
    rows = [0] * len(curves)
    for gain, head, count in sorted(steps, key=lambda one: -one[0]):
        if gain > 0:
            taken = min(count, total - sum(rows))
            rows[head] += taken
    spare, rest = divmod(total - sum(rows), len(rows))  # nobody lacks any more
    return [number + spare + (head < rest) for head, number in enumerate(rows)]


def _above(scores: Tensor) -> Tensor:
    """How many of the tokens that have been evicted so far stand above each, after each eviction: ``(n, n)``.

    A token that is yet to come counts as beaten by all.
    """
    n = len(scores)
    rank = scores.argsort(stable=True).argsort()  # of equals the later stands above
    above = (rank[:, None] > rank).cumsum(0)
    return above.masked_fill(torch.ones_like(above, dtype=torch.bool).triu(1), n + 1)


def _projected(attention: Any, heads: Tensor, key_head: int, dtype: torch.dtype) -> Tensor:
    """What the output projection makes of the query heads ``(.., G, m, D)`` of one key/value head: ``(.., m, E)``."""
    group = heads.shape[-3]
    whole = heads.new_zeros(*heads.shape[:-3], heads.shape[-2], attention.memory.heads, heads.shape[-1])
    whole[..., key_head * group : (key_head + 1) * group, :] = heads.transpose(-3, -2)
    whole = whole.flatten(-2)
    nothing = attention.o_proj(torch.zeros_like(whole[..., :1, :]).to(dtype))
    return (attention.o_proj(whole.to(dtype)) - nothing).to(heads.dtype)

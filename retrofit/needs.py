"""Entries by need: which key heads lack tokens that have left the window, and how many entries each of them gets.

A few heads copy from far behind; their queries look at single tokens that no head's usual queries tell beforehand, and
they need nearly all of them. Most heads are served by a handful. With full attention on a few texts, each head's output
is computed again as if it had only so many entries, and what that changes in the residual stream is weighed against the
entries that would prevent it.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from patches.errors import RetrofitError
from patches.memory import Evicted, Step
from patches.precision import wide
from patches.rotary import rotate

# parts of what has left the window
GRID = (0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)
TIMES = 3  # as long as what is kept of it a text must be to show what is missing
LEAST = 8  # tokens that must leave the window
QUERIES = 128  # of a text that count, or some more


class Needs:
    """What each key/value head of a model loses with so many entries, added up over texts that the teacher reads.

    Texts should be :data:`TIMES` times as long as what the memory keeps. For shorter ones let ``scale`` say how much
    smaller a memory to measure, window and entries alike; its numbers are then multiplied.

    Args:
        model: whose memories have entries by need; measured as it is calibrated when texts are added.
        costs: of each layer, what :func:`weigh_outputs` says.
        texts: token ids ``(B, T)`` each, that will be read; only their lengths are looked at.
        scale: how large the memory is that is measured, beside the model's own.

    Raises:
        RetrofitError: the texts are too short for anything to leave a window.
    """

    def __init__(self, model: Any, costs: dict[int, Tensor], texts: Sequence[Tensor], scale: float = 1.0):
        self.model, self.costs = model, costs
        memories = {index: one for index, one in model.get_decoder().memories().items() if one.calibrates}
        self.sinks = next(iter(memories.values())).sinks
        self.scale, shortest = scale, min(ids.shape[1] for ids in texts)
        self.windows = {index: max(1, round(one.window * self.scale)) for index, one in memories.items()}
        self.evicted = {index: shortest - window - self.sinks for index, window in self.windows.items()}
        if min(self.evicted.values()) < LEAST:
            raise RetrofitError(
                f"entries by need are measured on what leaves a window, and a text of {shortest} tokens is too short "
                "for that: calibrate on longer ones, or leave shares='even'"
            )
        self.losses = {index: torch.zeros(one.kv_heads, len(GRID)) for index, one in memories.items()}

    def add(self, index: int, step: Step, residual: Tensor) -> None:
        """Add a layer's share of a text.

        Args:
            step: what the layer's memory is shown of it, see :meth:`retrofit.observer.LayerCall.step`.
            residual: what the layer was given ``(B, T, E)``.
        """
        memory, window, n = self.model.get_decoder().memories()[index], self.windows[index], step.x.shape[1]
        dtype = wide(step.k.dtype)
        q, k = (rotate(x.to(dtype), *step.now.tables(0, n, dtype)) for x in (step.q, step.k))
        v, token = step.v.to(dtype), torch.arange(n, device=k.device)
        lengths = residual.norm(dim=-1).to(k.device, dtype)  # the layer before may be on another one
        gone = Evicted(k[:, :, self.sinks : n - window], v[:, :, self.sinks : n - window], None, 0, self.sinks)
        entries = memory._make_entries(step, gone)
        far_k, far_v = (x.to(dtype) for x in memory._restore_entries(entries, step))
        first = window + self.sinks
        queries = token[first :: max(1, (n - first) // QUERIES)]
        near = (queries[:, None] - token < window) | (token < self.sinks)
        near &= token <= queries[:, None]
        newest = queries - first  # the number of the token that the query evicts
        numbers = [round(share * self.evicted[index]) for share in GRID]
        heads = q[:, :, queries].unflatten(1, (memory.kv_heads, -1))  # (B, H_kv, G, m, D)
        costs = self.costs[index].to(k)
        for text, head in product(range(len(k)), range(memory.kv_heads)):
            logits = heads[text, head] @ k[text, head].T * step.scale  # (G, m, n)
            largest = logits.masked_fill(token > queries[:, None], float("-inf")).amax(-1, keepdim=True)
            weights = (logits - largest).exp() * (token <= queries[:, None])
            full = weights @ v[text, head] / weights.sum(-1, keepdim=True)
            weights = weights * near
            near_sum, near_mass = weights @ v[text, head], weights.sum(-1, keepdim=True)
            far = (heads[text, head] @ far_k[text, head].T * step.scale - largest).exp()
            missing = []
            for number in numbers:
                seen = far * memory.kept_after(entries["score"][text, head], newest, number)
                total = near_sum + seen @ far_v[text, head]
                missing.append(total / (near_mass + seen.sum(-1, keepdim=True)) - full)
            change = torch.stack(missing).transpose(1, 2).flatten(2)  # (numbers, m, G D)
            cost = (change @ costs[head] * change).sum(-1)
            self.losses[index][head] += (cost / lengths[text, queries].square()).mean(-1).cpu().float()

    def rows(self) -> list[int]:
        """The entries that all key/value heads have now, head after head and layer after layer."""
        memories = self.model.get_decoder().memories()
        return [number for index in self.losses for number in memories[index].rows]

    def curves(self) -> list[tuple[list[int], list[float]]]:
        """Of each key/value head, numbers of entries and what it loses with them, as :func:`divide` takes them."""
        curves = []
        for index, losses_of_heads in self.losses.items():
            grid = [round(share * self.evicted[index] / self.scale) for share in GRID]
            for losses in losses_of_heads:
                points = dict(zip(grid, losses.tolist(), strict=True))  # shares of few tokens may be the same number
                curves.append((list(points), list(points.values())))
        return curves

    def give(self) -> float:
        """Divide the model's entries anew, each to the head where it prevents most; written to its configuration.

        Returns:
            What all heads together lose with them.
        """
        curves = self.curves()
        rows = divide(curves, sum(self.rows()))
        given = iter(rows)
        self.model.get_decoder().set_entries(
            {index: [next(given) for _ in losses] for index, losses in self.losses.items()}
        )
        return sum(lost_with(number, *curve) for number, curve in zip(rows, curves, strict=True))


def kept_tokens(memories: Iterable[Any]) -> int:
    """Tokens that a layer keeps on average: sinks, window and entries."""
    each = [memory.capacity + sum(memory.rows) / memory.kv_heads for memory in memories]
    return round(sum(each) / len(each))


def divide(curves: Sequence[tuple[list[int], list[float]]], total: int) -> list[int]:
    """``total`` entries over heads so that the sum of what they lose is least.

    Args:
        curves: of each head, numbers of entries, from 0 upwards, and what it loses with each of them.

    The first head loses 4 of its 5 by its first two entries, the second everything evenly:

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


def lost_with(number: int, numbers: list[int], losses: list[float]) -> float:
    """What a head loses with ``number`` entries, between the points of its curve in a straight line.

    >>> lost_with(3, [0, 2, 6], [5.0, 1.0, 0.0]), lost_with(9, [0, 2, 6], [5.0, 1.0, 0.0])
    (0.75, 0.0)
    """
    for low, high, before, after in zip(numbers, numbers[1:], losses, losses[1:], strict=False):
        if number <= high:
            return before + (after - before) * (number - low) / (high - low)
    return losses[-1]


def weigh_outputs(attention: Any, base_dtype: torch.dtype) -> Tensor:
    """What changes of a layer's heads cost in the residual stream, for each key/value head ``(H_kv, G D, G D)``.

    A change ``c`` of the outputs of its G query heads has the squared length ``c M c'`` behind the output projection.
    """
    memory, device = attention.memory, attention.o_proj.weight.device
    units = torch.eye(memory.heads * memory.head_dim, dtype=base_dtype, device=device)
    nothing = attention.o_proj(torch.zeros_like(units[:1]))
    columns = (attention.o_proj(units) - nothing).float().unflatten(0, (memory.kv_heads, -1))
    return columns @ columns.mT

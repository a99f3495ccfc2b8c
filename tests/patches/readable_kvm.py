"""KVM for a rotated base as one writes it down: one sequence, one key head at a time, lists of rows, no batching."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from patches.rotary import rotate, unrotate


class Row:
    """Sums of what it holds, and the lengths it was founded with."""

    def __init__(self, key: Tensor, value: Tensor, index: int, weight: Tensor | float = 1.0):
        self.key, self.value, self.weight, self.index = weight * key, weight * value, weight, weight * index
        self.key_length, self.value_length = self.key.norm(), self.value.norm()

    def join(self, key: Tensor, value: Tensor, index: int, gate: Tensor) -> None:
        self.key, self.value = self.key + gate * key, self.value + gate * value
        self.weight, self.index = self.weight + gate, self.index + gate * index


def turned(x: Tensor, position: Tensor | float, rotary, back: bool = False) -> Tensor:
    """A vector (D,) turned to a rotary position, or back from it."""
    cos, sin = (t.to(x.dtype) for t in rotary(torch.as_tensor(position).reshape(1, 1)))
    return (unrotate if back else rotate)(x[None, None, None], cos, sin)[0, 0, 0]


def likeness(key: Tensor, row: Row) -> float:
    return float(normalize(key, dim=0) @ normalize(row.key, dim=0))


def absorb(rows: list[Row], block: list[tuple[Tensor, Tensor, int, Tensor]], found: int) -> None:
    """Append the ``found`` tokens (key, value, index, gate) least like any row, then merge the others, all at once."""
    scores = [max((likeness(key, row) for row in rows), default=0.0) for key, _, _, _ in block]
    founders = sorted(sorted(range(len(block)), key=lambda j: (scores[j], j))[:found])
    rows += [Row(*block[j][:3]) for j in founders]
    choice = {}
    for j in set(range(len(block))) - set(founders):
        near = [likeness(block[j][0], row) for row in rows]
        choice[j] = near.index(max(near))
    for j, i in sorted(choice.items()):
        rows[i].join(*block[j])


def attention(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, temperature: Tensor, rotary, *, chunk: int, window: int, sinks: int,
    budget, bias: Tensor, positions: str,
) -> Tensor:  # fmt: skip
    """Heads ``(T, G, D)`` of the G query heads ``q`` (G, T, D) on one key head ``k``, ``v`` (T, D), ``gates`` (T,)."""
    out, rows, left = [], [], 0  # left: tokens that have left the window
    for t in range(q.shape[1]):
        begin = max(0, ((t - sinks) // chunk + 1) * chunk - window)
        while left < begin:
            block = [
                (turned(k[j], j, rotary, back=True) - bias, v[j], j, gates[j])
                for j in range(sinks + left, sinks + left + chunk)
            ]
            allowed = min(budget(left + window), left + chunk)
            absorb(rows, block, chunk if not rows else min(max(allowed - len(rows), 0), chunk))
            left += chunk
        seen = [j for j in range(t + 1) if j < sinks or j >= sinks + begin]
        values = [v[j] for j in seen] + [row.value_length * normalize(row.value, dim=0) for row in rows]
        heads = []
        for query, tau in zip(q[:, t], temperature, strict=True):
            logits = [query @ k[j] for j in seen]
            for row in rows:
                key = row.key_length * normalize(row.key, dim=0) + bias
                if positions == "nope":
                    moved = turned(turned(query, t, rotary, back=True), 0, rotary)
                    logits.append(tau * (moved @ turned(key, 0, rotary)))
                else:
                    at = row.index / row.weight if positions == "row" else sinks + begin - 1
                    logits.append(tau * (query @ turned(key, at, rotary)))
            weights = (torch.stack(logits) * q.shape[-1] ** -0.5).softmax(0)
            heads.append(weights @ torch.stack(values))
        out.append(torch.stack(heads))
    return torch.stack(out)

"""KVM's rows (Key-Value Means, arXiv 2605.09877): how many there are, how a block of tokens becomes or joins them.

Rows are one tensor ``(B, H_kv, M, 2 D + 4)``: sums of keys and of values, of weights and of weighted indices, and the
lengths of the key and of the value that founded the row. Writing is then one product: a token's own such vector, added
to the row it founds or joins.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.functional import pad as fill

ROUNDINGS = 64  # likenesses that differ by less, in units of the last place of 1, are equal


@dataclass(frozen=True)
class Budget:
    """B(e), the rows a head may hold after ``e`` tokens: never fewer than ``rows``.

    Attributes:
        kind: ``"fixed"``; ``"power_law"``, ``factor * e ** exponent``; or ``"saturating"``, ``N e / (N + e)``.
        rows: the number itself if fixed, the least otherwise.
        factor, exponent: of the power law.
        saturation: N.
        multiple: growing budgets are rounded down to a multiple of this.
    """

    kind: str = "fixed"
    rows: int = 1
    factor: float = 16.0
    exponent: float = 0.5
    saturation: int = 1024
    multiple: int = 1

    def __call__(self, tokens: int) -> int:
        if self.kind == "fixed":
            return self.rows
        if self.kind == "power_law":
            allowed = math.floor(self.factor * float(tokens) ** self.exponent)
        else:
            allowed = math.floor(self.saturation * tokens / (self.saturation + tokens))
        return max(self.rows, allowed // self.multiple * self.multiple)


class Schedule:
    """How many rows there are once so many blocks of ``chunk`` tokens have left a window of ``window``.

    The first block founds a row per token. The block ``[b, b + C)`` that leaves when ``e = b + W`` tokens have been
    seen adds as many as B(e) allows, ``b + C`` in all at most.
    """

    def __init__(self, budget: Budget, chunk: int, window: int):
        self.budget, self.chunk, self.window = budget, chunk, window
        self._counts = [0, chunk]

    def rows(self, blocks: int) -> int:
        """Rows after ``blocks`` blocks; 0 or fewer blocks leave none."""
        while len(self._counts) <= blocks:
            left, now = (len(self._counts) - 1) * self.chunk, self._counts[-1]
            allowed = min(self.budget(left + self.window), left + self.chunk)
            self._counts.append(min(max(now, allowed), now + self.chunk))
        return self._counts[max(blocks, 0)]


@lru_cache
def schedule(budget: Budget, chunk: int, window: int) -> Schedule:
    """The schedule of these settings, made once."""
    return Schedule(budget, chunk, window)


class Keys(Protocol):
    """In which form keys are summed, compared and read."""

    def written(self, k: Tensor, index: Tensor) -> Tensor:
        """What is summed, of cached keys ``k`` (B, H_kv, n, D) at ``index`` (1 or B, n); float32 or wider."""

    def probe(self, key: Tensor) -> Tensor:
        """A token's side of the comparison, of what :meth:`written` gave."""

    def address(self, sums: Tensor) -> Tensor:
        """A row's side of the comparison, of its key sum."""

    def read(self, sums: Tensor, length: Tensor, index: Tensor, edge: Tensor) -> Tensor:
        """Keys that queries see, of ``N`` states of the rows.

        Args:
            sums: key sums ``(B, N, H_kv, M, D)``.
            length: of the founders' keys ``(B, N, H_kv, M, 1)``.
            index: mean index of what the row holds ``(B, N, H_kv, M, 1)``.
            edge: index of the last token before the window ``(1 or B, N)``.
        """

    def queries(self, q: Tensor, index: Tensor) -> Tensor | None:
        """Queries (B, H, n, D) at ``index`` (1 or B, n) as they meet the rows, or None if they do so as they are."""


@dataclass
class Blocks:
    """``N`` blocks of tokens ready to be written; all but the choice of rows is computed for all blocks at once.

    Attributes:
        probe: ``(B, H_kv, N, C, D)``.
        alike: each token's probe against the row each token would found, ``(B, H_kv, N, C, C)``.
        vector: what founding adds, ``(B, H_kv, N, C, 2 D + 4)``.
        gates: factor of what merging adds, ``(B, H_kv, N, C, 1)``.
    """

    probe: Tensor
    alike: Tensor
    vector: Tensor
    gates: Tensor


def prepare(k: Tensor, v: Tensor, gates: Tensor, index: Tensor, keys: Keys, chunk: int) -> Blocks:
    """Blocks of cached keys and values ``(B, H_kv, N * C, D)``, gates ``(B, H_kv, N * C, 1)``, ``index`` (1 or B, N C)."""
    key = keys.written(k, index)
    value = v.to(key.dtype)
    at = index[:, None, :, None].to(key.dtype).expand(*key.shape[:3], 1)
    lengths = key.norm(dim=-1, keepdim=True), value.norm(dim=-1, keepdim=True)
    vector = torch.cat([key, value, torch.ones_like(at), at, *lengths], -1)
    with torch.no_grad():
        probe, address = (x.unflatten(2, (-1, chunk)) for x in (keys.probe(key), keys.address(key)))
        alike = probe @ address.transpose(-1, -2)
    vector, gates = (x.unflatten(2, (-1, chunk)) for x in (vector, gates.to(key.dtype)))
    return Blocks(probe, alike, vector, gates)


def absorb(
    rows: Tensor,
    blocks: Blocks,
    number: int,
    keys: Keys,
    before: list[int],
    after: list[int],
    active: list[bool],
    barred: int = 0,
    gate_appends: bool = False,
) -> Tensor:
    """Append-then-merge (section 3): the tokens least like any row found rows, each other one joins the likest.

    Args:
        rows: ``(B, H_kv, M, 2 D + 4)``; M at least the largest of ``before``.
        blocks, number: the block to write.
        keys: the form of the keys.
        before, after: rows of each batch row (or of all, if one is given) before and after.
        active: whether the block is written there at all.
        barred: the first so many rows are sinks, which nothing joins.
        gate_appends: whether the gate weakens appended tokens too (as one of the two public codes does), the first
            block's excepted.

    Returns:
        The new rows, as many as the largest of ``after``.
    """
    vector, gates = blocks.vector[:, :, number], blocks.gates[:, :, number]
    target, founds = choose(rows, blocks, number, keys, before, after, barred)
    joined = (target.unsqueeze(-1) == torch.arange(max(after), device=rows.device)).to(rows.dtype)  # (B, H, C, M')
    plain = founds & (_column(before, rows) == 0) if gate_appends else founds
    weight = torch.where(plain.unsqueeze(-1), 1.0, gates)
    # the lengths at the end are the founder's alone
    own = torch.where(founds.unsqueeze(-1), weight, 0.0)
    scaled = torch.cat([vector[..., :-2] * weight, vector[..., -2:] * own], -1)
    if not all(active):
        scaled = scaled * torch.tensor(active, device=rows.device)[:, None, None, None]
    return fill(rows, (0, 0, 0, max(after) - rows.shape[2])) + joined.transpose(-1, -2) @ scaled


@torch.no_grad()
def choose(
    rows: Tensor, blocks: Blocks, number: int, keys: Keys, before: list[int], after: list[int], barred: int = 0
) -> tuple[Tensor, Tensor]:
    """The row of each token of a block ``(B, H_kv, C)``, and whether it founds it. Arguments as :func:`absorb`.

    Ties go to the earlier token and to the first row. What differs by a few roundings is a tie: in a model's first
    layer equal tokens have equal keys, and which of them is chosen must not hang on how a product was computed.
    """
    probe, alike = blocks.probe[:, :, number], blocks.alike[:, :, number]
    M = rows.shape[2]
    near = probe @ keys.address(rows[..., : probe.shape[-1]]).transpose(-1, -2)  # (B, H, C, M)
    if before == after == [M] * len(before):  # a fixed budget once it is full: everything merges
        return _first_best(near[..., barred:]) + barred, near.new_zeros(near.shape[:3], dtype=torch.bool)
    had, new = _column(before, rows), _column([y - x for x, y in zip(before, after, strict=True)], rows)
    place = torch.arange(M, device=rows.device)
    near = near.masked_fill(place >= had.unsqueeze(-1), float("-inf"))
    best = near.amax(-1) if M else near.new_zeros(near.shape[:3])
    founds = _rank(best) < new
    founded = had + founds.cumsum(-1) - 1
    near = near.masked_fill(place < barred, float("-inf"))
    first = _first_best(torch.cat([near, alike.masked_fill(~founds.unsqueeze(2), float("-inf"))], -1))
    joined = torch.where(first < M, first, founded.gather(-1, (first - M).clamp_min(0)))
    return torch.where(founds, founded, joined), founds


def _first_best(near: Tensor) -> Tensor:
    """Index of the first of the largest numbers along the last dimension."""
    best = near.amax(-1, keepdim=True)
    return (near >= best - _roundings(near)).to(torch.uint8).argmax(-1)


def _rank(score: Tensor) -> Tensor:
    """Place of each number in ascending order along the last dimension; equal ones keep their order."""
    ordered, order = score.sort(-1)
    steps = fill(ordered.diff(dim=-1) > _roundings(score), (1, 0)).cumsum(-1)
    return torch.empty_like(order).scatter(-1, order, steps).argsort(dim=-1, stable=True).argsort(-1)


def _roundings(like: Tensor) -> float:
    return ROUNDINGS * torch.finfo(like.dtype).eps


def read_rows(states: Tensor, keys: Keys, edge: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values that queries see, ``(B, N, H_kv, M, D)`` each, of ``N`` states ``(B, N, H_kv, M, 2 D + 4)``.

    Sums become directions here and not before ("just-in-time" norms): each has the length of what founded its row.
    """
    D = (states.shape[-1] - 4) // 2
    key, value, weight, at, key_length, value_length = states.split([D, D, 1, 1, 1, 1], -1)
    index = at / weight.clamp_min(torch.finfo(weight.dtype).tiny)
    return keys.read(key, key_length, index, edge), value_length * normalize(value, dim=-1)


def _column(counts: list[int], like: Tensor) -> Tensor:
    return torch.tensor(counts, device=like.device)[:, None, None]

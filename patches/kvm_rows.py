"""KVM's rows (Key-Value Means, arXiv 2605.09877): how a block of tokens becomes or joins them.

Rows are one tensor ``(B, H_kv, M, 2 D + 4)``: sums of keys and of values, of weights and of weighted indices, and the
lengths of the key and of the value that founded the row. Writing is then one addition: a token's own such vector to the
row it founds or joins.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.functional import pad as fill

from .kernels import choose as kernel
from .kvm_merge import add_to_rows, first_best, roundings
from .precision import cast, wide
from .rotary import rotate, unrotate
from .step import Pass


class Keys(Protocol):
    """In which form keys are summed, compared and read.

    Attributes:
        cosine: whether :meth:`address` is the direction of the sum, and :meth:`probe` that of the key.
    """

    cosine: bool

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
class RotaryKeys:
    """Keys of a base that rotates all their channels and does not normalise them.

    Sums hold keys turned back to position 0 and without the projection's bias, which all keys share and which would
    make all of them alike. Likeness is the cosine. A row is read with the length of its founder, with the bias, and
    turned to a position: a row of one token is that token's key.

    Attributes:
        now: the pass, for the model's tables.
        origin: rotary position of index 0 in each row ``(1 or B, 1)``.
        bias: of the key projection ``(H_kv, 1, D)``, or None.
        positions: as in :class:`patches.kvm.KVMOptions`.
    """

    now: Pass
    origin: Tensor
    bias: Tensor | None
    positions: str
    cosine = True

    def written(self, k: Tensor, index: Tensor) -> Tensor:
        k = k.to(wide(k.dtype))
        key = unrotate(k, *self._tables(index, k.dtype))
        return key if self.bias is None else key - self.bias

    def probe(self, key: Tensor) -> Tensor:
        return normalize(key, dim=-1)

    def address(self, sums: Tensor) -> Tensor:
        return normalize(sums, dim=-1)

    def read(self, sums: Tensor, length: Tensor, index: Tensor, edge: Tensor) -> Tensor:
        key = length * normalize(sums, dim=-1)
        if self.bias is not None:
            key = key + self.bias
        if self.positions == "row":
            index = index.squeeze(-1)  # (B, N, H, M)
        elif self.positions == "edge":
            index = edge[:, :, None, None]
        else:
            index = self._zero()[:, :, None, None]
        cos, sin = (x.unflatten(1, index.shape[1:]) for x in self._tables(index.flatten(1), key.dtype))
        return rotate(key.unsqueeze(1), cos, sin).squeeze(1)

    def queries(self, q: Tensor, index: Tensor) -> Tensor | None:
        if self.positions != "nope":
            return None
        dtype = wide(q.dtype)
        moved = unrotate(q.to(dtype), *self._tables(index, dtype))
        return rotate(moved, *self._tables(self._zero(), dtype)).to(q.dtype)

    def _tables(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = self.now.turn(index + self.origin)
        return cast(cos, dtype), cast(sin, dtype)

    def _zero(self) -> Tensor:
        """The index ``(1 or B, 1)`` that has rotary position 0: where queries and rows meet without any."""
        return -self.origin


@dataclass
class Blocks:
    """``N`` blocks of tokens ready to be written; what does not depend on which rows are chosen is computed for all.

    Attributes:
        key: what is summed, ``(N, B, H_kv, C, D)``.
        value: likewise.
        index: ``(N, 1 or B, 1, C, 1)``.
        probe: what is compared with the rows, ``(N, B, H_kv, C, D)``.
        joining: what a token adds to a row it joins, ``(N, B, H_kv, C, 2 D + 4)``.
        weight: of tokens that found rows ``(N, B, H_kv, C, 1)``; None is 1.
        head: number of each head in the batch ``(B, H_kv, 1)``.
    """

    key: Tensor
    value: Tensor
    index: Tensor
    probe: Tensor
    joining: Tensor
    weight: Tensor | None
    head: Tensor

    def founding(self, number: int) -> Tensor:
        """What a token of block ``number`` adds to a row it founds, ``(B, H_kv, C, 2 D + 4)``."""
        key, value, index = self.key[number], self.value[number], self.index[number]
        lengths = key.norm(dim=-1, keepdim=True), value.norm(dim=-1, keepdim=True)
        one = torch.ones_like(lengths[0])
        added = torch.cat([key, value, one, one * index, *lengths], -1)
        return added if self.weight is None else added * self.weight[number]


def prepare(
    k: Tensor, v: Tensor, gates: Tensor, index: Tensor, keys: Keys, chunk: int, gate_appends: bool = False
) -> Blocks:
    """Blocks of cached tokens.

    Args:
        k, v: keys and values ``(B, H_kv, N * C, D)``.
        gates: merge gates ``(B, H_kv, N * C, 1)``.
        index: of the tokens ``(1 or B, N * C)``.
        keys: the form of the keys.
        chunk: C.
        gate_appends: whether the gate weakens appended tokens too (as one of the two public codes does), the first
            block's excepted.
    """
    key = keys.written(k, index)
    at = index[:, None, :, None]
    # blocks first: they are written one by one, and each then lies in one piece
    key, value, gates, at = (x.to(key.dtype).unflatten(2, (-1, chunk)).movedim(2, 0) for x in (key, v, gates, at))
    with torch.no_grad():
        probe = keys.probe(key).contiguous()
    nothing = torch.zeros_like(gates).expand(*gates.shape[:-1], 2)
    joining = torch.cat([key * gates, value * gates, gates, at * gates, nothing], -1)
    weight = gates.where(at >= chunk, 1.0) if gate_appends else None
    head = torch.arange(k.shape[0] * k.shape[1], device=k.device).view(*k.shape[:2], 1)
    return Blocks(key, value, at, probe, joining, weight, head)


def absorb(
    rows: Tensor,
    blocks: Blocks,
    number: int,
    keys: Keys,
    before: list[int],
    after: list[int],
    active: list[bool],
    barred: int = 0,
) -> Tensor:
    """Append-then-merge (section 3): the tokens least like any row found rows, each other one joins the likest.

    Args:
        rows: ``(B, H_kv, M, 2 D + 4)``; M at least the largest of ``before``.
        blocks, number: the block to write.
        keys: the form of the keys.
        before, after: rows of each batch row (or of all, if one is given) before and after.
        active: whether the block is written there at all.
        barred: the first so many rows are sinks, which nothing joins.

    Returns:
        The new rows, as many as the largest of ``after``.

    One row with key 1 meets tokens with keys 2 and -1, and may become two rows: the second token is least like it and
    founds one, the first joins it. Sums of keys, of values and of weights are then

    >>> from types import SimpleNamespace
    >>> plain = SimpleNamespace(written=lambda k, index: k, probe=lambda k: k, address=lambda sums: sums)
    >>> k = torch.tensor([[[[2.0], [-1.0]]]])
    >>> blocks = prepare(k, k, torch.ones(1, 1, 2, 1), torch.tensor([[1, 2]]), plain, chunk=2)
    >>> row = torch.tensor([[[[1.0, 1.0, 1.0, 0.0, 1.0, 1.0]]]])
    >>> absorb(row, blocks, 0, plain, before=[1], after=[2], active=[True])[0, 0, :, :3].tolist()
    [[3.0, 3.0, 2.0], [-1.0, -1.0, 1.0]]
    """
    written = blocks.joining[number]
    full = before == after == [rows.shape[2]] * len(before)
    if full and keys.cosine and not barred:
        written = _where(active, written)
        return kernel("merge", rows, written)(rows, blocks.probe[number], written, blocks.head)
    with torch.no_grad():
        target, founds = choose(rows, blocks, number, keys, before, after, barred)
    if founds is not None:
        written = torch.where(founds.unsqueeze(-1), blocks.founding(number), written)
    written = _where(active, written)
    if rows.shape[2] != max(after):
        rows = fill(rows, (0, 0, 0, max(after) - rows.shape[2]))
    return add_to_rows(rows, target, written, blocks.head)


def choose(
    rows: Tensor, blocks: Blocks, number: int, keys: Keys, before: list[int], after: list[int], barred: int = 0
) -> tuple[Tensor, Tensor | None]:
    """The row of each token of a block ``(B, H_kv, C)``, and whether it founds it (None: none does).

    Arguments as :func:`absorb`. Ties go to the earlier token and to the first row. What differs by a few roundings is a
    tie: in a model's first layer equal tokens have equal keys, and which of them is chosen must not depend on how a
    product was computed.
    """
    probe, M = blocks.probe[number], rows.shape[2]
    near = probe @ keys.address(rows[..., : probe.shape[-1]]).transpose(-1, -2)  # (B, H, C, M)
    if before == after == [M] * len(before):  # a fixed budget once it is full
        return (first_best(near[..., barred:]) + barred if barred else first_best(near)), None
    had, new = (_by_row(x, rows.device) for x in (before, after))  # (1 or B, 1, 1, 1)
    place = torch.arange(M, device=rows.device)
    near = near.masked_fill(place >= had, float("-inf"))
    best = near.amax(-1) if M else near.new_zeros(near.shape[:3])
    founds = _rank(best) < (new - had).squeeze(-1)
    # -1 where there are no rows yet: nothing is written there
    founded = (had.squeeze(-1) + founds.cumsum(-1) - 1).clamp_min(0)
    fresh = probe @ keys.address(blocks.key[number]).transpose(-1, -2)
    near = near.masked_fill(place < barred, float("-inf"))
    first = first_best(torch.cat([near, fresh.masked_fill(~founds.unsqueeze(2), float("-inf"))], -1))
    joined = torch.where(first < M, first, founded.gather(-1, (first - M).clamp_min(0)))
    return torch.where(founds, founded, joined), founds


def _by_row(values: list[int] | list[bool], device: torch.device) -> Tensor:
    """A number for each row of the batch ``(1 or B, 1, 1, 1)``; a single one is filled in, not copied from the host."""
    if len(values) == 1:
        return torch.full((1, 1, 1, 1), values[0], device=device)
    return torch.tensor(values, device=device)[:, None, None, None]


def _where(active: list[bool], written: Tensor) -> Tensor:
    return written if all(active) else written * _by_row(active, written.device)


def _rank(score: Tensor) -> Tensor:
    """Place of each number in ascending order along the last dimension; equal ones keep their order."""
    ordered, order = score.sort(-1)
    steps = fill(ordered.diff(dim=-1) > roundings(score), (1, 0)).cumsum(-1)
    return torch.empty_like(order).scatter(-1, order, steps).argsort(dim=-1, stable=True).argsort(-1)


def read_rows(states: Tensor, keys: Keys, edge: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values that queries see, ``(B, N, H_kv, M, D)`` each, of ``N`` states ``(B, N, H_kv, M, 2 D + 4)``.

    Sums become directions here and not before ("just-in-time" norms): each has the length of what founded its row.
    """
    D = (states.shape[-1] - 4) // 2
    key, value, weight, at, key_length, value_length = states.split([D, D, 1, 1, 1, 1], -1)
    index = at / weight.clamp_min(torch.finfo(weight.dtype).tiny)
    return keys.read(key, key_length, index, edge), value_length * normalize(value, dim=-1)

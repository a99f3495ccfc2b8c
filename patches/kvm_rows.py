"""KVM's rows (Key-Value Means, arXiv 2605.09877): how a block of tokens becomes or joins them.

Rows are one tensor ``(B, H_kv, M, 2 D + 4)``: sums of keys and of values, of weights and of weighted indices, and the
lengths of the key and of the value that founded the row. Writing is then one addition: a token's own such vector to the
row it founds or joins.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.functional import pad as fill

from .kernels import choose as kernel
from .kvm_merge import add_to_rows, first_best, roundings
from .precision import cast, wide
from .rotary import rotate, unrotate
from .sequence import Pass


@dataclass
class RotaryKeys:
    """In which form keys are summed, compared and read, for a base that rotates them and does not normalise them.

    Sums hold keys as they were before rotation and without the projection's bias, which all keys share and which would
    make all of them alike. Likeness is the cosine. A row is read with the length of its founder, with the bias, and
    rotated to a position: a row of one token is that token's key.

    Attributes:
        now: the pass, for the model's tables.
        origin: rotary position of index 0, the first token behind the sinks ``(1,)``.
        bias: of the key projection ``(H_kv, 1, D)``, or None.
        positions: as in :class:`patches.kvm.KVMOptions`.
    """

    now: Pass
    origin: Tensor
    bias: Tensor | None
    positions: str

    def written(self, k: Tensor, index: Tensor) -> Tensor:
        """What is summed, of cached keys ``k`` (B, H_kv, n, D) at ``index`` (n,); float32 or wider."""
        k = k.to(wide(k.dtype))
        key = unrotate(k, *self._make_tables(index[None], k.dtype))
        return key if self.bias is None else key - self.bias

    def probe(self, key: Tensor) -> Tensor:
        """A token's side of the comparison, of what :meth:`written` gave."""
        return normalize(key, dim=-1)

    def address(self, sums: Tensor) -> Tensor:
        """A row's side of the comparison, of its key sum."""
        return normalize(sums, dim=-1)

    def read(self, sums: Tensor, length: Tensor, index: Tensor, edge: Tensor) -> Tensor:
        """Keys that queries see, of ``N`` states of the rows: key ``sums`` (B, N, H_kv, M, D), ``length`` of the
        founders' keys and mean ``index`` (B, N, H_kv, M, 1), and the index before the window, ``edge`` (N,)."""
        key = length * normalize(sums, dim=-1)
        if self.bias is not None:
            key = key + self.bias
        if self.positions == "row":
            index = index.squeeze(-1)  # (B, N, H, M)
        elif self.positions == "edge":
            index = edge[None, :, None, None]
        else:
            index = self._find_zero()[:, None, None]
        cos, sin = (x.unflatten(1, index.shape[1:]) for x in self._make_tables(index.flatten(1), key.dtype))
        return rotate(key.unsqueeze(1), cos, sin).squeeze(1)

    def queries(self, q: Tensor, index: Tensor) -> Tensor:
        """Queries (B, H, n, D) at ``index`` (n,) as they meet the rows."""
        if self.positions != "nope":
            return q
        dtype = wide(q.dtype)
        moved = unrotate(q.to(dtype), *self._make_tables(index[None], dtype))
        return rotate(moved, *self._make_tables(self._find_zero(), dtype)).to(q.dtype)

    def _make_tables(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = self.now.turn(index + self.origin)
        return cast(cos, dtype), cast(sin, dtype)

    def _find_zero(self) -> Tensor:
        """The index ``(1, 1)`` that has rotary position 0: where queries and rows meet without any."""
        return -self.origin[None]


@dataclass
class Blocks:
    """``N`` blocks of tokens ready to be written; what does not depend on which rows are chosen is computed for all."""

    key: Tensor  # what is summed (N, B, H_kv, C, D)
    value: Tensor  # likewise
    index: Tensor  # (N, C, 1)
    probe: Tensor  # what is compared with the rows (N, B, H_kv, C, D)
    joining: Tensor  # what a token adds to a row it joins (N, B, H_kv, C, 2 D + 4)
    weight: Tensor | None  # of tokens that found rows (N, B, H_kv, C, 1); None is 1
    head: Tensor  # number of each head in the batch (B, H_kv, 1)

    def founding(self, number: int) -> Tensor:
        """What a token of block ``number`` adds to a row it founds, ``(B, H_kv, C, 2 D + 4)``."""
        key, value, index = self.key[number], self.value[number], self.index[number]
        lengths = key.norm(dim=-1, keepdim=True), value.norm(dim=-1, keepdim=True)
        one = torch.ones_like(lengths[0])
        added = torch.cat([key, value, one, one * index, *lengths], -1)
        return added if self.weight is None else added * self.weight[number]


def prepare(
    k: Tensor, v: Tensor, gates: Tensor, index: Tensor, keys: RotaryKeys, chunk: int, gate_appends: bool = False
) -> Blocks:
    """Blocks of cached tokens: ``k``, ``v`` (B, H_kv, N * C, D), ``gates`` (B, H_kv, N * C), ``index`` (N * C,).

    With ``gate_appends`` the gate weakens appended tokens too (as one of the two public codes has it), the first
    block's excepted.
    """
    key, gates = keys.written(k, index), gates.unsqueeze(-1)
    # blocks first: they are written one by one, and each then lies in one piece
    key, value, gates = (x.to(key.dtype).unflatten(2, (-1, chunk)).movedim(2, 0) for x in (key, v, gates))
    at = index.to(key.dtype).view(-1, chunk, 1)
    with torch.no_grad():
        probe = keys.probe(key).contiguous()
    nothing = torch.zeros_like(gates).expand(*gates.shape[:-1], 2)
    joining = torch.cat([key * gates, value * gates, gates, at[:, None, None] * gates, nothing], -1)
    weight = gates.where((at >= chunk)[:, None, None], 1.0) if gate_appends else None
    head = torch.arange(k.shape[0] * k.shape[1], device=k.device).view(*k.shape[:2], 1)
    return Blocks(key, value, at, probe, joining, weight, head)


def absorb(rows: Tensor, blocks: Blocks, number: int, keys: RotaryKeys, after: int) -> Tensor:
    """Append-then-merge (section 3): the tokens least like any row found rows, each other one joins the likest.

    ``rows`` are ``(B, H_kv, M, 2 D + 4)`` before the block ``number`` is written, and ``after`` afterwards.

    One row with key 1 meets tokens with keys 2 and -1, and may become two rows: the second token is least like it and
    founds one, the first joins it. Sums of keys, of values and of weights are then

    >>> from types import SimpleNamespace
    >>> plain = SimpleNamespace(written=lambda k, index: k, probe=lambda k: k, address=lambda sums: sums)
    >>> k = torch.tensor([[[[2.0], [-1.0]]]])
    >>> blocks = prepare(k, k, torch.ones(1, 1, 2), torch.tensor([1, 2]), plain, chunk=2)
    >>> row = torch.tensor([[[[1.0, 1.0, 1.0, 0.0, 1.0, 1.0]]]])
    >>> absorb(row, blocks, 0, plain, after=2)[0, 0, :, :3].tolist()
    [[3.0, 3.0, 2.0], [-1.0, -1.0, 1.0]]
    """
    written = blocks.joining[number]
    if rows.shape[2] == after:  # a fixed budget once it is full
        return kernel("merge", rows, written)(rows, blocks.probe[number], written, blocks.head)
    with torch.no_grad():
        target, founds = choose(rows, blocks, number, keys, after)
    written = torch.where(founds.unsqueeze(-1), blocks.founding(number), written)
    return add_to_rows(fill(rows, (0, 0, 0, after - rows.shape[2])), target, written, blocks.head)


def choose(rows: Tensor, blocks: Blocks, number: int, keys: RotaryKeys, after: int) -> tuple[Tensor, Tensor]:
    """The row of each token of a block ``(B, H_kv, C)``, and whether it founds it.

    Arguments as :func:`absorb`. Ties go to the earlier token and to the first row. What differs by a few roundings is a
    tie: in a model's first layer equal tokens have equal keys, and which of them is chosen must not depend on how a
    product was computed.
    """
    probe, M = blocks.probe[number], rows.shape[2]
    near = probe @ keys.address(rows[..., : probe.shape[-1]]).transpose(-1, -2)  # (B, H, C, M)
    founds = _rank(near.amax(-1) if M else near.new_zeros(near.shape[:3])) < after - M
    founded = M + founds.cumsum(-1) - 1
    fresh = probe @ keys.address(blocks.key[number]).transpose(-1, -2)
    first = first_best(torch.cat([near, fresh.masked_fill(~founds.unsqueeze(2), float("-inf"))], -1))
    joined = torch.where(first < M, first, founded.gather(-1, (first - M).clamp_min(0)))
    return torch.where(founds, founded, joined), founds


def _rank(score: Tensor) -> Tensor:
    """Place of each number in ascending order along the last dimension; equal ones keep their order."""
    ordered, order = score.sort(-1)
    steps = fill(ordered.diff(dim=-1) > roundings(score), (1, 0)).cumsum(-1)
    return torch.empty_like(order).scatter(-1, order, steps).argsort(dim=-1, stable=True).argsort(-1)


def read_rows(states: Tensor, keys: RotaryKeys, edge: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values that queries see, ``(B, N, H_kv, M, D)`` each, of ``N`` states ``(B, N, H_kv, M, 2 D + 4)``.

    Sums become directions here and not before ("just-in-time" norms): each has the length of what founded its row.
    """
    D = (states.shape[-1] - 4) // 2
    key, value, weight, at, key_length, value_length = states.split([D, D, 1, 1, 1, 1], -1)
    index = at / weight.clamp_min(torch.finfo(weight.dtype).tiny)
    return keys.read(key, key_length, index, edge), value_length * normalize(value, dim=-1)

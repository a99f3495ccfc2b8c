"""Tokens counted from the first of their row that is neither padding nor sink, so that blocks begin as in it alone.

Row memories work in blocks. In a left-padded batch the blocks of two rows lie at different slots; a :class:`Frame`
shifts the rows until they coincide, and back.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad as fill
from torch.nn.functional import scaled_dot_product_attention

T = TypeVar("T")


class Frame:
    """The ``n`` tokens of a call, each row shifted so that index 0 is the start of the block its first token is in.

    The *index* of a token counts from the first one that is neither padding nor sink; padding and sinks have negative
    indices. Where no row is padded, all rows are the same and the lists below have one entry.

    Tokens 6 to 9 in blocks of 4, S = 1: row 0 has no padding, so that slot 6 is index 5; row 1 has 3 slots of it, so
    that slot 6 is index 2. Both begin where their block does.

    >>> frame = Frame(6, 4, [0, 3], sinks=1, unit=4, device=torch.device("cpu"))
    >>> frame.start, frame.base, frame.size
    ([5, 2], [4, 0], 8)
    >>> slots = torch.arange(10).view(1, 1, 10, 1).expand(2, -1, -1, -1)
    >>> frame.lay(slots, slot=0)[:, 0, :, 0].tolist()  # behind slot 9 anything
    [[5, 6, 7, 8, 9, 9, 9, 9], [4, 5, 6, 7, 8, 9, 9, 9]]

    Attributes:
        start: index of each row's first new token.
        base: index of the frame's first token in each row: a multiple of ``unit``, never negative.
        size: tokens in the frame, a multiple of ``unit``; those before ``start`` and behind the last new token are
            there to fill it up, and what they read or write must not count.
    """

    def __init__(self, seen: int, n: int, pads: list[int], sinks: int, unit: int, device: torch.device):
        """Args: tokens before this call, new tokens, each row's padding (one 0: no row has any), S, the block size."""
        self.n, self.unit, self.sinks, self.seen, self.device = n, unit, sinks, seen, device
        self.skip = [pad + sinks for pad in pads]  # slot of index 0
        self.start = [seen - skip for skip in self.skip]
        self.base = [max(start, 0) // unit * unit for start in self.start]
        ahead = max(start - base for start, base in zip(self.start, self.base, strict=True)) + n
        self.size = max(-(-ahead // unit), 1) * unit
        self._made: dict[Any, Any] = {}

    def once(self, name: Any, make: Callable[[], T]) -> T:
        """What ``make`` gives, made for the first layer that asks for ``name`` and kept for the others."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @property
    def last(self) -> list[int]:
        """Index of the last new token of each row."""
        return [start + self.n - 1 for start in self.start]

    def column(self, values: list[int]) -> Tensor:
        """One number per row as a tensor ``(1 or B, 1)``."""
        if len(values) == 1:  # filled in, not copied from the host
            return torch.full((1, 1), values[0], device=self.device)
        return torch.tensor(values, device=self.device)[:, None]

    def indices(self, first: int, last: int) -> Tensor:
        """Indices of the frame's tokens ``first .. last - 1`` in each row, ``(1 or B, last - first)``."""
        return torch.arange(first, last, device=self.device) + self.column(self.base)

    def lay(self, x: Tensor, slot: int, first: int = 0) -> Tensor:
        """The frame's tokens from ``first`` on, out of ``x`` (B, H, L, D) that begins with slot ``slot``.

        Returns:
            ``(B, H, size - first, D)``; what ``x`` does not have is some other token or zero.
        """
        length = self.size - first
        at = [skip + base + first - slot for skip, base in zip(self.skip, self.base, strict=True)]
        if len(at) == 1:
            low, high = max(at[0], 0), min(at[0] + length, x.shape[2])
            return fill(x[:, :, low:high], (0, 0, low - at[0], at[0] + length - high))
        return take(x, torch.arange(length, device=self.device) + self.column(at))

    def collect(self, framed: Tensor, sink: Tensor | None) -> Tensor:
        """The new tokens' outputs, from those of the frame's tokens ``(B, size, H, D)`` and of the sinks (B, S, H, D).

        Returns:
            ``(B, n, H, D)``; zero where a token is padding.
        """
        at = [start - base for start, base in zip(self.start, self.base, strict=True)]
        if len(at) == 1 and at[0] >= 0:
            return framed[:, at[0] : at[0] + self.n]
        sinks = 0 if sink is None else sink.shape[1]
        zero = framed.new_zeros(len(framed), 1, *framed.shape[2:])
        everything = torch.cat([zero, framed] if sink is None else [zero, sink, framed], 1)
        index = torch.arange(self.n, device=self.device) + self.column(at)
        index = (index + 1 + sinks).masked_fill(index < -sinks, 0)
        return take(everything.transpose(1, 2), index).transpose(1, 2)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Tokens of ``x`` (B, H, L, D) at ``index`` (1 or B, n), clamped into range -> (B, H, n, D)."""
    index = index.clamp(0, x.shape[2] - 1)
    if len(index) == 1:
        return x.index_select(2, index[0])
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def sink_attention(
    frame: Frame, q: Tensor, sink_k: Tensor, sink_v: Tensor, scale: float, dropout: float
) -> Tensor | None:
    """What the sinks among the new tokens read: each other, causally. ``(B, S, H, D)``, or None if there are none.

    Args:
        q: queries of the new tokens ``(B, H, n, D)``.
        sink_k, sink_v: ``(B, H_kv, S, D)``.
    """
    sinks = frame.sinks
    if not sinks or min(frame.start) >= 0:
        return None
    at = torch.arange(sinks, device=frame.device) - frame.column(frame.start) - sinks
    q = take(q, at)
    groups = q.shape[1] // sink_k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (sink_k, sink_v))
    mask = torch.ones(sinks, sinks, dtype=torch.bool, device=q.device).tril()
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale).transpose(1, 2)

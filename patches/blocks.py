"""Tokens counted in blocks from the first one behind the sinks, however a text is cut into calls."""

import torch
from torch import Tensor
from torch.nn.functional import pad as fill

from .merged_softmax import look


class Frame:
    """The ``n`` tokens of a call, and those before them in the block that the first one is in.

    Tokens 6 to 9 behind one sink, in blocks of 4: token 6 has index 5, and its block begins with index 4.

    >>> frame = Frame(seen=6, n=4, sinks=1, unit=4)
    >>> frame.start, frame.base, frame.size
    (5, 4, 8)
    >>> tokens = torch.arange(10).view(1, 1, 10, 1)
    >>> frame.lay(tokens, first=0).flatten().tolist()  # zeros behind the last token
    [5, 6, 7, 8, 9, 0, 0, 0]

    Attributes:
        start: index of the first new token, 0 being the first behind the sinks; negative if it is a sink.
        base: index of the frame's first token: a multiple of ``unit``, never negative.
        size: tokens in the frame, a multiple of ``unit``; what those read and write that are not new must not count.
        last: index of the last new token.
    """

    def __init__(self, seen: int, n: int, sinks: int, unit: int):
        self.n, self.sinks = n, sinks
        self.start, self.last = seen - sinks, seen - sinks + n - 1
        self.base = max(self.start, 0) // unit * unit
        self.size = max(-(-(self.start - self.base + n) // unit), 1) * unit

    def lay(self, x: Tensor, first: int, skip: int = 0) -> Tensor:
        """The frame's tokens from its ``skip``-th on, of ``x`` (B, H, L, ...) that begins with token ``first``.

        Returns:
            ``(B, H, size - skip, ...)``; zero where ``x`` has no such token.
        """
        begin = self.sinks + self.base + skip - first
        end = begin + self.size - skip
        low = max(begin, 0)
        high = max(min(end, x.shape[2]), low)
        return fill(x[:, :, low:high], (0, 0) * (x.dim() - 3) + (low - begin, end - high))

    def collect(self, framed: Tensor, of_sinks: Tensor | None) -> Tensor:
        """The new tokens' outputs ``(B, H, n, D)``, from those of the frame's tokens and of the sinks among them."""
        if of_sinks is None:
            return framed[:, :, self.start - self.base :][:, :, : self.n]
        return torch.cat([of_sinks, framed[:, :, : self.n - of_sinks.shape[2]]], 2)

    def sink_attention(self, q: Tensor, sink_k: Tensor, sink_v: Tensor, scale: float, dropout: float) -> Tensor | None:
        """What the sinks among the new tokens read: each other, causally. None if there are none.

        Args:
            q: queries of the new tokens ``(B, H, n, D)``.
            sink_k, sink_v: ``(B, H_kv, S, D)``.
        """
        new = min(-self.start, self.n)
        if new <= 0:
            return None
        seen = self.sinks + self.start + new
        return look(q[:, :, :new], sink_k[:, :, :seen], sink_v[:, :, :seen], None, scale, dropout, causal=True)[0]

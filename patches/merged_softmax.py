"""One softmax over keys that lie in several places: each place is looked at by itself, none is copied to another."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .kernels import decode_attention
from .precision import cast
from .window import Place, attend_in_blocks, attention_lse

# what queries see in one place (N, H, n, D), and the log-sum-exp of their logits there (N, H, n)
Part = tuple[Tensor, Tensor]


def look(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float, causal: bool = False
) -> Part:
    """Attention in one place, of which a query may see nothing: its log-sum-exp is then -inf.

    Args:
        q: ``(N, H, n, D)``.
        k, v: ``(N, H_kv, m, D)``.
        mask: True where a query sees a key, ``(1 or N, n, m)``; None: everywhere.
        causal: without a mask, the queries are those of the last n keys, and see no later ones.
    """
    if mask is None:
        return decode_attention(q, k, v, scale=scale, dropout=dropout, lse=True, causal=causal)  # type: ignore
    kv_heads, n = k.shape[1], q.shape[2]
    q = q.unflatten(1, (kv_heads, -1)).flatten(0, 1)  # (N H_kv, G, n, D)
    nothing = ~mask.any(-1, keepdim=True)  # no key at all would be NaN
    mask = (mask | nothing).unsqueeze(1)
    if len(mask) > 1:
        mask = mask.repeat_interleave(kv_heads, 0)
    if n == 1:  # the heads of a group as queries of one head: the kernel then reads each key once, not once for each
        q = q.transpose(1, 2)
    out, lse = attention_lse(q, k.flatten(0, 1), v.flatten(0, 1), mask, scale, dropout)
    if n == 1:
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    out, lse = (x.unflatten(0, (-1, kv_heads)).flatten(1, 2) for x in (out, lse))
    return out, lse.masked_fill(nothing.mT, float("-inf"))


def join(*parts: Part) -> Tensor:
    """What one softmax over all places gives ``(N, H, n, D)``; in the first one a query always sees something.

    Two places with logits (0, 0) and (0): every key weighs a third, so the shares of the places are 2/3 and 1/3.

    >>> first, second = torch.tensor([[[[3.0]]]]), torch.tensor([[[[6.0]]]])
    >>> join((first, torch.tensor([[[2.0]]]).log()), (second, torch.tensor([[[1.0]]]).log())).item()
    4.0
    """
    shares = torch.stack([lse for _, lse in parts]).softmax(0).unsqueeze(-1)
    joined = sum(out * share for (out, _), share in zip(parts, shares, strict=True))
    return cast(joined, parts[0][0].dtype)


def look_in_blocks(
    q: Tensor,
    size: int,
    places: Sequence[Place],
    sight: Tensor,
    there: Callable[[range], Tensor | None],
    scale: float,
    dropout: float,
    causal: bool = False,
) -> Part:
    """:func:`look` for many queries, ``size`` at a time, each block with its own stretch of every place.

    Args:
        q: ``(B, H, F, D)``.
        sight: which keys the queries of a block see if they are there, ``(1, size, keys)``.
        there: for some blocks, which of their keys are there ``(1 or B, blocks, keys)``; None: all.
        causal: whether ``sight`` hides from a query nothing but the keys behind its own, the last ``size`` of all.

    Returns:
        Both for ``(B, H, F)``.
    """

    def look_at(q: Tensor, k: Tensor, v: Tensor, blocks: range) -> Part:
        held, mask = there(blocks), None if causal else sight
        if held is not None:
            mask = (sight & held.unsqueeze(2)).expand(len(q) // len(blocks), -1, -1, -1).flatten(0, 1)
        return look(q, k, v, mask, scale, dropout, causal)

    length, extra = q.shape[2], -q.shape[2] % size
    out, lse = attend_in_blocks(pad(q, (0, 0, 0, extra)) if extra else q, size, places, look_at)
    return out[:, :, :length], lse[:, :, :length]


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
        return pad(x[:, :, low:high], (0, 0) * (x.dim() - 3) + (low - begin, end - high))

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

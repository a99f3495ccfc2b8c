"""Sinks + sliding window attention in blocks: O(T (W + S)) time and memory, on any device, differentiable."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .lse import attention_lse, shared_attention_lse

# the shared arguments of one piece of work: q, k, v, mask, scale, dropout
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, float], tuple[Tensor, ...]]

GATHERED = 2**22  # keys gathered at a time on a CPU, in elements: bounds the extra memory of the overlapping blocks
GPU_GATHERED = 2**28  # and on a GPU, where launches count; not measured


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    *,
    window: int,
    start: int,
    scale: float,
    pad: Tensor | None = None,
    max_pad: int = 0,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention of each query over its window and the sinks that have left it.

    A *slot* is a place in the padded sequence. Query ``t`` sees slot ``j`` of the window iff ``0 <= t - j < W``, and
    sink ``i`` (slot ``pad + i``) iff that slot is no longer in the window. Padding is seen by nobody but itself.

    Args:
        q: queries of the slots ``start .. start + n - 1``, ``(B, H, n, D)``.
        k, v: keys and values of the slots ``start - W .. start + n - 1``, ``(B, H_kv, W + n, D)``; what lies before
            slot 0 may hold any finite number.
        sink_k, sink_v: the sinks of each row ``(B, H_kv, S, D)``.
        window: W.
        start: slot of the first query.
        scale: factor of the logits.
        pad: left padding of each row, ``(B,)``; None means none.
        max_pad: the largest of ``pad``.
        dropout: probability, as in the base's attention.

    Returns:
        ``(B, n, H, D)``: heads last but one, as the output projection wants them.
    """
    return _blocks(_attend, q, k, v, sink_k, sink_v, window, start, scale, pad, max_pad, dropout)[0]


def window_attention_lse(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, **how: Any
) -> tuple[Tensor, Tensor]:
    """:func:`window_attention` and, ``(B, n, H)``, the log-sum-exp of each query's logits, in float32 or wider.

    For a memory that joins the window's softmax; the gradient flows through both. (With a detached log-sum-exp the
    merged output is right and the gradients of queries and keys are wrong.)
    """
    out, lse = _blocks(_attend_lse, q, k, v, sink_k, sink_v, **how)
    return out, lse


def _blocks(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    window: int,
    start: int,
    scale: float,
    pad: Tensor | None = None,
    max_pad: int = 0,
    dropout: float = 0.0,
) -> tuple[Tensor, ...]:
    """What ``attend`` gives for all queries, each ``(B, n, H, ...)``; the rest as in :func:`window_attention`."""
    n, sinks = q.shape[2], sink_k.shape[2]
    block = min(window, n, max(64, window // 4))
    # from this slot on every row sees its whole window and all its sinks: one mask serves all blocks
    regular = min(max(window + max_pad + max(sinks - 1, 0) - start, 0), n)
    pieces = []
    for first in range(0, regular, block):
        last = min(first + block, regular)
        mask = _mask(first, last - first, start, window, sinks, pad, q)
        pieces.append(
            attend(
                q[:, :, first:last],
                torch.cat([sink_k, k[:, :, first : last + window]], 2),
                torch.cat([sink_v, v[:, :, first : last + window]], 2),
                mask.unsqueeze(2),
                scale,
                dropout,
            )
        )
    count = (n - regular) // block  # whole blocks, folded into the batch
    if count:
        band = _band(block, window, sinks, q.device)
        most = GATHERED if k.device.type == "cpu" else GPU_GATHERED
        group = max(1, most // ((sinks + window + block) * k.shape[0] * k.shape[1] * k.shape[3]))
        for first in range(0, count, group):
            blocks = min(group, count - first)
            at = regular + first * block
            folded = q[:, :, at : at + blocks * block].unflatten(2, (blocks, block))  # (B, H, N, C, D)
            out = attend(
                folded.transpose(1, 2).flatten(0, 1),
                _gather(sink_k, k[:, :, at : at + blocks * block + window], blocks, block),
                _gather(sink_v, v[:, :, at : at + blocks * block + window], blocks, block),
                band,
                scale,
                dropout,
            )
            pieces.append(tuple(part.unflatten(0, (-1, blocks)).flatten(1, 2) for part in out))
    rest = n - regular - count * block
    if rest:
        pieces.append(
            attend(
                q[:, :, n - rest :],
                torch.cat([sink_k, k[:, :, n - rest :]], 2),
                torch.cat([sink_v, v[:, :, n - rest :]], 2),
                _band(rest, window, sinks, q.device),
                scale,
                dropout,
            )
        )
    return pieces[0] if len(pieces) == 1 else tuple(torch.cat(parts, 1) for parts in zip(*pieces, strict=True))


def _mask(first: int, count: int, start: int, window: int, sinks: int, pad: Tensor | None, like: Tensor) -> Tensor:
    """Who sees whom for ``count`` queries from index ``first``: ``(B or 1, 1, count, S + W + count)``, True if seen."""
    device = like.device
    t = torch.arange(start + first, start + first + count, device=device)[:, None]  # (n, 1)
    j = torch.arange(start + first - window, start + first + count, device=device)  # (W + n)
    near = (j <= t) & (t - j < window)
    i = torch.arange(sinks, device=device)
    edge = torch.zeros(1, dtype=torch.long, device=device) if pad is None else pad
    edge = edge.view(-1, 1, 1, 1)
    near = (near & (j >= edge)) | (j == t)  # padding sees itself: a row of nothing would be NaN
    return torch.cat([edge + i <= t - window, near], -1)


def _band(count: int, window: int, sinks: int, device: torch.device) -> Tensor:
    """The mask of a block well inside the sequence, ``(1, 1, 1, count, S + W + count)``: all sinks, W tokens each."""
    row = torch.arange(count, device=device)[:, None]
    column = torch.arange(window + count, device=device)
    near = (column > row) & (column <= row + window)
    return torch.cat([near.new_ones(count, sinks), near], 1)[None, None, None]


def _gather(sinks: Tensor, stream: Tensor, blocks: int, block: int) -> Tensor:
    """Overlapping keys of each block behind the sinks: ``(B * N, H_kv, S + W + C, D)``."""
    size = stream.shape[2] - (blocks - 1) * block
    overlapping = stream.unfold(2, size, block).permute(0, 2, 1, 4, 3)  # (B, N, H_kv, W + C, D)
    shared = sinks.unsqueeze(1).expand(-1, blocks, -1, -1, -1)
    return torch.cat([shared, overlapping], 3).flatten(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> tuple[Tensor, ...]:
    """``q`` (B, H, n, D) on ``k``, ``v`` (B, H_kv, m, D) -> (B, n, H, D), alone in a tuple.

    ``mask`` broadcasts against ``(B, H_kv, groups, n, m)``.
    """
    B = len(q)
    q, k, v, mask = _fold(q, k, v, mask)
    k, v = (x.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))  # shared by stride, never repeated
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return (_unfold(out, B),)


def _attend_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float
) -> tuple[Tensor, ...]:
    """:func:`_attend`, and behind the output the log-sum-exp ``(B, n, H)``."""
    out, lse = attention_lse(*_fold(q, k, v, mask), scale, dropout)
    return _unfold(out, len(q)), _unfold(lse, len(q))


def _fold(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Key heads into the batch: ``q`` (B * H_kv, G, n, D), ``k``, ``v`` (B * H_kv, m, D), the mask to match."""
    kv_heads = k.shape[1]
    if mask is not None:
        mask = mask[:, 0] if mask.shape[0] == 1 else mask.expand(-1, kv_heads, -1, -1, -1).flatten(0, 1)
    return q.unflatten(1, (kv_heads, -1)).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask


def _unfold(x: Tensor, rows: int) -> Tensor:
    """``(B * H_kv, G, n, ...) -> (B, n, H, ...)`` for ``rows`` = B."""
    return x.unflatten(0, (rows, -1)).movedim(3, 1).flatten(2, 3)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0, lse: bool = False, causal: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Queries that see all keys, or with ``causal`` those up to their own; arguments as in kernels.py."""
    B, H, n, D = q.shape
    if n > 1:
        mask = torch.ones(n, k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - n) if causal else None
        parts = (q, k, v, None if mask is None else mask[None, None, None], scale, dropout)
        found = (_attend_lse if lse else _attend)(*parts)
        return found[0], found[1] if lse else None
    # the heads of a group as queries of one head: the kernel then reads each key once, not once for each head
    q = q.reshape(B, k.shape[1], -1, D)
    if not lse:
        return scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale).reshape(B, 1, H, D), None
    out, sums = shared_attention_lse(q, k, v, scale, dropout)
    return out.reshape(B, 1, H, D), sums.reshape(B, 1, H)

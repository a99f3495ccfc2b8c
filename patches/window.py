"""Sinks + sliding window attention in blocks: O(T (W + S)) time and memory, on any device, differentiable."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .lse import attention_lse, shared_attention_lse

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
    dropout: float = 0.0,
    lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention of each query over its window and the sinks that have left it, and its log-sum-exp.

    Arguments and results as in kernels.py. The gradient flows through both results: with a detached log-sum-exp a
    merged output is right and the gradients of queries and keys are wrong.
    """
    n, sinks = q.shape[2], sink_k.shape[2]
    attend = _attend_lse if lse else _attend
    block = min(window, n, max(64, window // 4))
    # from this token on every query sees a whole window and all sinks: one mask serves all blocks
    regular = min(max(window + max(sinks - 1, 0) - start, 0), n)
    pieces = []
    for first in range(0, regular, block):
        last = min(first + block, regular)
        mask = _mask(first, last - first, start, window, sinks, q.device)
        near_k, near_v = (torch.cat([s, x[:, :, first : last + window]], 2) for s, x in ((sink_k, k), (sink_v, v)))
        pieces.append(attend(q[:, :, first:last], near_k, near_v, mask, scale, dropout))
    count = (n - regular) // block  # whole blocks, folded into the batch
    if count:
        band = _band(block, window, sinks, q.device)
        most = GATHERED if k.device.type == "cpu" else GPU_GATHERED
        group = max(1, most // ((sinks + window + block) * k.shape[0] * k.shape[1] * k.shape[3]))
        for first in range(0, count, group):
            blocks = min(group, count - first)
            at = regular + first * block
            stretch = slice(at, at + blocks * block + window)
            folded = q[:, :, at : at + blocks * block].unflatten(2, (blocks, block))  # (B, H, N, C, D)
            near_k, near_v = (_gather(s, x[:, :, stretch], blocks, block) for s, x in ((sink_k, k), (sink_v, v)))
            parts = attend(folded.transpose(1, 2).flatten(0, 1), near_k, near_v, band, scale, dropout)
            pieces.append(tuple(part.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3) for part in parts))
    rest = n - regular - count * block
    if rest:
        near_k, near_v = (torch.cat([s, x[:, :, n - rest :]], 2) for s, x in ((sink_k, k), (sink_v, v)))
        band = _band(rest, window, sinks, q.device)
        pieces.append(attend(q[:, :, n - rest :], near_k, near_v, band, scale, dropout))
    found = pieces[0] if len(pieces) == 1 else [torch.cat(parts, 2) for parts in zip(*pieces, strict=True)]
    return found[0], found[1] if lse else None


def _mask(first: int, count: int, start: int, window: int, sinks: int, device: torch.device) -> Tensor:
    """Who sees whom for ``count`` queries from the ``first`` on: ``(count, S + W + count)``, True if seen."""
    t = torch.arange(start + first, start + first + count, device=device)[:, None]
    j = torch.arange(start + first - window, start + first + count, device=device)
    near = (j <= t) & (t - j < window) & (j >= 0)
    return torch.cat([torch.arange(sinks, device=device) <= t - window, near], -1)


def _band(count: int, window: int, sinks: int, device: torch.device) -> Tensor:
    """The mask of a block well inside the sequence, ``(count, S + W + count)``: all sinks, W tokens each."""
    row = torch.arange(count, device=device)[:, None]
    column = torch.arange(window + count, device=device)
    near = (column > row) & (column <= row + window)
    return torch.cat([near.new_ones(count, sinks), near], 1)


def _gather(sinks: Tensor, stream: Tensor, blocks: int, block: int) -> Tensor:
    """Overlapping keys of each block behind the sinks: ``(B * N, H_kv, S + W + C, D)``."""
    size = stream.shape[2] - (blocks - 1) * block
    overlapping = stream.unfold(2, size, block).permute(0, 2, 1, 4, 3)  # (B, N, H_kv, W + C, D)
    shared = sinks.unsqueeze(1).expand(-1, blocks, -1, -1, -1)
    return torch.cat([shared, overlapping], 3).flatten(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> tuple[Tensor, ...]:
    """``q`` (B, H, n, D) on ``k``, ``v`` (B, H_kv, m, D), ``mask`` (n, m) -> (B, H, n, D), alone in a tuple."""
    shape = q.shape
    q, k, v = _fold(q, k, v)
    k, v = (x.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))  # shared by stride, never repeated
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return (out.reshape(shape),)


def _attend_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float
) -> tuple[Tensor, ...]:
    """:func:`_attend`, and behind the output the log-sum-exp ``(B, H, n)``."""
    shape, mask = q.shape, None if mask is None else mask[None, None]
    out, lse = attention_lse(*_fold(q, k, v), mask, scale, dropout)
    return out.reshape(shape), lse.reshape(shape[:3])


def _fold(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Key heads into the batch: ``q`` (B * H_kv, G, n, D), ``k``, ``v`` (B * H_kv, m, D)."""
    return q.unflatten(1, (k.shape[1], -1)).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0, lse: bool = False, causal: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Queries that see all keys, or with ``causal`` those up to their own; arguments as in kernels.py."""
    B, H, n, D = q.shape
    if n > 1:
        mask = torch.ones(n, k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - n) if causal else None
        found = (_attend_lse if lse else _attend)(q, k, v, mask, scale, dropout)
        return found[0], found[1] if lse else None
    # the heads of a group as queries of one head: the kernel then reads each key once, not once for each head
    q = q.reshape(B, k.shape[1], -1, D)
    if not lse:
        return scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale).reshape(B, H, 1, D), None
    out, sums = shared_attention_lse(q, k, v, scale, dropout)
    return out.reshape(B, H, 1, D), sums.reshape(B, H, 1)

"""Sinks + sliding window attention in blocks: O(T (W + S)) time and memory, on any device, differentiable."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

GATHERED = 2**22  # keys gathered at a time, in elements: bounds the extra memory of the overlapping blocks


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
    n, sinks = q.shape[2], sink_k.shape[2]
    block = min(window, n, max(64, window // 4))
    # from this slot on every row sees its whole window and all its sinks: one mask serves all blocks
    regular = min(max(window + max_pad + max(sinks - 1, 0) - start, 0), n)
    pieces = []
    for first in range(0, regular, block):
        last = min(first + block, regular)
        mask = _mask(first, last - first, start, window, sinks, pad, q)
        pieces.append(
            _attend(
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
        group = max(1, GATHERED // ((sinks + window + block) * k.shape[0] * k.shape[1] * k.shape[3]))
        for first in range(0, count, group):
            blocks = min(group, count - first)
            at = regular + first * block
            folded = q[:, :, at : at + blocks * block].unflatten(2, (blocks, block))  # (B, H, N, C, D)
            out = _attend(
                folded.transpose(1, 2).flatten(0, 1),
                _gather(sink_k, k[:, :, at : at + blocks * block + window], blocks, block),
                _gather(sink_v, v[:, :, at : at + blocks * block + window], blocks, block),
                band,
                scale,
                dropout,
            )
            pieces.append(out.unflatten(0, (-1, blocks)).flatten(1, 2))
    rest = n - regular - count * block
    if rest:
        pieces.append(
            _attend(
                q[:, :, n - rest :],
                torch.cat([sink_k, k[:, :, n - rest :]], 2),
                torch.cat([sink_v, v[:, :, n - rest :]], 2),
                _band(rest, window, sinks, q.device),
                scale,
                dropout,
            )
        )
    return torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]


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


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """``q`` (B, H, n, D) on ``k``, ``v`` (B, H_kv, m, D) -> (B, n, H, D); key heads are shared by stride, never
    repeated.

    ``mask`` broadcasts against ``(B, H_kv, groups, n, m)``.
    """
    B, kv_heads = k.shape[:2]
    q = q.unflatten(1, (kv_heads, -1)).flatten(0, 1)  # (B * H_kv, G, n, D)
    k, v = (x.flatten(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))
    if mask is not None:
        mask = mask[:, 0] if mask.shape[0] == 1 else mask.expand(-1, kv_heads, -1, -1, -1).flatten(0, 1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return out.unflatten(0, (B, kv_heads)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    """One token on a full cache, no mask: ``q`` (B, H, n, D), ``k``, ``v`` (B, H_kv, m, D) -> (B, n, H, D)."""
    return _attend(q, k, v, None, scale, dropout)

"""Sinks + sliding window attention in blocks, O(T (W + S)) time and memory, differentiable on any device.

And attention that tells its log-sum-exp, with the gradient of both: what joins a memory to the window's softmax.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

GATHERED = 2**22  # keys gathered at a time on a CPU, in elements: bounds the extra memory of overlapping blocks
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
    rest = n - (n - regular) % block  # whole blocks between the two, folded into the batch

    def attend_alone(first: int, last: int) -> tuple[Tensor, ...]:
        mask = _make_mask(last - first, start + first, window, sinks, q.device)
        near_k, near_v = (torch.cat([s, x[:, :, first : last + window]], 2) for s, x in ((sink_k, k), (sink_v, v)))
        return attend(q[:, :, first:last], near_k, near_v, mask, scale, dropout)

    pieces = [attend_alone(first, min(first + block, regular)) for first in range(0, regular, block)]
    if regular < rest:
        band = _make_mask(block, window + sinks, window, sinks, q.device)
        stream = Place(k[:, :, regular:], v[:, :, regular:], block, window + block)
        places = Place(sink_k, sink_v, 0, sinks), stream

        def attend_blocks(q: Tensor, k: Tensor, v: Tensor, which: range) -> tuple[Tensor, ...]:
            return attend(q, k, v, band, scale, dropout)

        pieces.append(attend_in_blocks(q[:, :, regular:rest], block, places, attend_blocks))
    if rest < n:
        pieces.append(attend_alone(rest, n))
    found = pieces[0] if len(pieces) == 1 else [torch.cat(parts, 2) for parts in zip(*pieces, strict=True)]
    return found[0], found[1] if lse else None


def _make_mask(count: int, first: int, window: int, sinks: int, device: torch.device) -> Tensor:
    """Who sees whom for the ``count`` queries from index ``first`` on: ``(count, S + W + count)``, True if seen."""
    t = torch.arange(first, first + count, device=device)[:, None]
    j = torch.arange(first - window, first + count, device=device)
    near = (j <= t) & (t - j < window) & (j >= 0)
    return torch.cat([torch.arange(sinks, device=device) <= t - window, near], -1)


class Place(NamedTuple):
    """Keys that blocks of queries slide over: block j sees ``width`` of them from ``j * step`` on."""

    k: Tensor  # (B, H_kv, L, D); what lies behind the last is zero
    v: Tensor
    step: int
    width: int


def attend_in_blocks(
    q: Tensor, size: int, places: Sequence[Place], attend: Callable[[Tensor, Tensor, Tensor, range], Sequence[Tensor]]
) -> tuple[Tensor, ...]:
    """Queries ``(B, H, F, D)``, ``size`` at a time, each block with its own stretch of every place.

    ``attend`` is given queries ``(B N, H, size, D)``, keys and values ``(B N, H_kv, all widths, D)`` and which N blocks
    these are; its results ``(B N, H, size, ..)`` are returned for all blocks, ``(B, H, F, ..)``.
    """
    q = q.unflatten(2, (-1, size)).transpose(1, 2)  # (B, blocks, H, size, D)
    together = count_together(places[0].k, sum(place.width for place in places))
    parts = []
    for first in range(0, q.shape[1], together):
        blocks = range(first, min(first + together, q.shape[1]))
        k = torch.cat([_gather_blocks(place.k, place, blocks) for place in places], 3).flatten(0, 1)
        v = torch.cat([_gather_blocks(place.v, place, blocks) for place in places], 3).flatten(0, 1)
        part = attend(q[:, blocks.start : blocks.stop].flatten(0, 1), k, v, blocks)
        parts.append([join_blocks(x, len(blocks)) for x in part])
    return tuple(parts[0] if len(parts) == 1 else (torch.cat(x, 2) for x in zip(*parts, strict=True)))


def count_together(k: Tensor, keys: int) -> int:
    """How many blocks may be gathered at a time that each see so many ``keys`` like ``k`` (B, H_kv, L, D)."""
    most = GATHERED if k.device.type == "cpu" else GPU_GATHERED
    return max(1, most // (k.shape[0] * k.shape[1] * k.shape[3] * keys))


def join_blocks(x: Tensor, blocks: int) -> Tensor:
    """``(B N, H, size, ..) -> (B, H, N size, ..)`` for so many blocks N."""
    return x.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)


def _gather_blocks(x: Tensor, place: Place, blocks: range) -> Tensor:
    """The keys of each block ``(B, blocks, H_kv, width, D)``."""
    if not place.step:
        return x.unsqueeze(1).expand(-1, len(blocks), -1, -1, -1)
    first, length = blocks.start * place.step, (len(blocks) - 1) * place.step + place.width
    x = x[:, :, first : first + length]
    x = pad(x, (0, 0, 0, length - x.shape[2])) if x.shape[2] < length else x
    return x.unfold(2, place.width, place.step).permute(0, 2, 1, 4, 3)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> tuple[Tensor, ...]:
    """``q`` (B, H, n, D) on ``k``, ``v`` (B, H_kv, m, D), ``mask`` (n, m) -> (B, H, n, D), alone in a tuple."""
    shape = q.shape
    q, k, v = _fold_heads(q, k, v)
    k, v = (x.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))  # shared by stride, never repeated
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return (out.reshape(shape),)


def _attend_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float
) -> tuple[Tensor, ...]:
    """:func:`_attend`, and behind the output the log-sum-exp ``(B, H, n)``."""
    shape, mask = q.shape, None if mask is None else mask[None, None]
    out, lse = attention_lse(*_fold_heads(q, k, v), mask, scale, dropout)
    return out.reshape(shape), lse.reshape(shape[:3])


def _fold_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    if q.device.type == "cpu" and dropout == 0 and not torch.is_grad_enabled():
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    else:
        out, sums = attention_lse(q.flatten(0, 1).unsqueeze(1), k.flatten(0, 1), v.flatten(0, 1), None, scale, dropout)
    return out.reshape(B, H, 1, D), sums.reshape(B, H, 1)


# ---- attention with its log-sum-exp ----

SCORES = 2**24  # logits held at a time where no kernel computes them on the fly, in elements: on a CPU
GPU_SCORES = 2**28  # and on a GPU, where launches count; not measured


def attention_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Softmax attention and the log of its normaliser, in whichever form suits the device.

    Args:
        q: queries ``(N, G, n, D)``, G of them to a key/value head.
        k, v: ``(N, m, D)``.
        mask: True where a query sees a key, broadcast against ``(N, G, n, m)``; every query sees one. None: all.
        scale: factor of the logits.
        dropout: probability of leaving a key out of the output; the normaliser is that of all keys.

    Returns:
        The output ``(N, G, n, D)``, on a CPU bit for bit that of ``scaled_dot_product_attention``, and the log-sum-exp
        of the logits ``(N, G, n)``, float32 or wider. Both carry their gradient.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):  # which would cast what ``scaled_dot_product_attention`` is given
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    if device == "cpu" and dropout == 0:
        if mask is not None:
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
        return _Flash.apply(q, k, v, mask, scale)
    with torch.autocast(device, enabled=False):
        return recomputed_attention_lse(q, k, v, mask, scale, dropout)


def recomputed_attention_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """:func:`attention_lse` on any device, some queries at a time; the logits of a long window are never kept, but
    computed again in the backward pass."""
    most = SCORES if q.device.type == "cpu" else GPU_SCORES
    rows = max(1, most // (q.shape[0] * q.shape[1] * k.shape[1]))
    pieces = []
    for first in range(0, q.shape[2], rows):
        part = mask if mask is None or mask.shape[2] == 1 else mask[:, :, first : first + rows]
        arguments = (q[:, :, first : first + rows], k, v, part, scale, dropout)
        if torch.is_grad_enabled():
            pieces.append(checkpoint(naive_attention_lse, *arguments, use_reentrant=False))
        else:
            pieces.append(naive_attention_lse(*arguments))
    return torch.cat([out for out, _ in pieces], 2), torch.cat([lse for _, lse in pieces], 2)


def naive_attention_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """:func:`attention_lse` as one writes it down: all logits at once, float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    shape = q.shape[1:3]
    scores = (q.to(wide).flatten(1, 2) @ k.to(wide).transpose(1, 2) * scale).unflatten(1, shape)  # (N, G, n, m)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    seen = drop((scores - lse.unsqueeze(-1)).exp(), dropout)
    return (seen.flatten(1, 2) @ v.to(wide)).unflatten(1, shape).to(q.dtype), lse


class _Flash(torch.autograd.Function):
    """The kernel that ``scaled_dot_product_attention`` runs on a CPU, called directly: it knows the log-sum-exp.

    Its backward kernel takes no gradient for that, but can be made to. With P the softmax, the gradient of the logits
    is ``P (dO V^T - (dO . O) + dLSE)``. One more column, 1 in V, dLSE in dO and 0 in O, adds dLSE to the first
    product and nothing to the second.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        # called directly, the kernel reads a row as if its numbers lay side by side
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        shared = (x.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, *shared, attn_mask=mask, scale=scale)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.scale = scale
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        grad_out = torch.cat([grad_out, grad_lse.unsqueeze(-1).to(grad_out.dtype)], -1)
        q, k, out, v = pad(q, (0, 1)), pad(k, (0, 1)), pad(out, (0, 1)), pad(v, (0, 1), value=1.0)
        k, v = (x.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=ctx.scale
        )
        q_grad, k_grad, v_grad = (grad[..., :-1] for grad in grads)
        return q_grad, k_grad.sum(1), v_grad.sum(1), None, None

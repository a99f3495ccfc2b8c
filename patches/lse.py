"""Attention that also tells its log-sum-exp, with the gradient of both: what joins a memory to the window's softmax."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

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


def shared_attention_lse(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    """:func:`attention_lse` of queries ``(B, H, n, D)`` that all see the keys ``(B, H, m, D)`` of their own head."""
    if q.device.type == "cpu" and dropout == 0 and not torch.is_grad_enabled():
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    out, lse = attention_lse(q.flatten(0, 1).unsqueeze(1), k.flatten(0, 1), v.flatten(0, 1), None, scale, dropout)
    return out.view_as(q), lse.view(q.shape[:3])


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

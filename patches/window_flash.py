"""Window attention by torch's own flash kernel (CUDA, 16 bits): no mask, no gathered keys, gradients of both results.

The kernel knows a sliding window but no sinks, and its backward ignores the gradient of the log-sum-exp that its
forward returns. So the sinks are a small product of their own, merged by log-sum-exp, and the backward is called in
such a way that it is exact for the merged softmax.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad as fill

WIDEST = 256  # of the kernel's heads; they come in multiples of 8
COLUMN = 8  # what one more column costs


def needs_flash(function: Callable[..., Any]) -> Callable[[str, bool], Any]:
    """A loader of ``function``, with an ``ImportError`` where torch's flash kernel cannot run."""

    def load(device: str, gradient: bool) -> Any:
        if device != "cuda" or (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8):
            raise ImportError("torch's flash kernel needs an NVIDIA GPU of the Ampere generation or later")
        return function

    return load


def fits(head_dim: int, lse: bool) -> bool:
    """Whether the kernel takes heads of this width, with a column to spare if the log-sum-exp has a gradient."""
    return head_dim % 8 == 0 and head_dim + (COLUMN if lse else 0) <= WIDEST


def flash_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    *,
    window: int,
    start: int,
    scale: float,
    lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """As ``window_attention`` of kernels.py, without dropout."""
    nothing = max(window - start, 0)  # places before token 0
    rows = (x.transpose(1, 2) for x in (q, k[:, :, nothing:], v[:, :, nothing:], sink_k, sink_v))
    out, sums = _Window.apply(*rows, window, start, scale)
    return out.transpose(1, 2), sums if lse else None


def flash_decode(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """``decode_attention`` of kernels.py with the log-sum-exp and without a gradient."""
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = flash_forward(rows, k.shape[2] if causal else None, scale)[:2]
    return out.transpose(1, 2), lse


def sink_logits(q: Tensor, sink_k: Tensor, window: int, start: int, scale: float) -> Tensor:
    """Logits ``(B, H, n, S)`` of queries from index ``start`` on and the sinks, in float32 or wider; minus infinity
    before a sink has left the window."""
    left = torch.arange(start - window, start - window + q.shape[2], device=q.device)[:, None]
    unseen = torch.arange(sink_k.shape[2], device=q.device) > left
    return (product(q, sink_k.transpose(-1, -2)) * scale).masked_fill_(unseen, float("-inf"))


class _Window(torch.autograd.Function):
    """Queries ``(B, n, H, D)``, keys and values ``(B, L, H_kv, D)``, sinks ``(B, S, H_kv, D)`` -> the output as the
    queries, log-sum-exp ``(B, H, n)``.

    With P the softmax over window and sinks, O the output and dO, dLSE the incoming gradients, the gradient of the
    logits is ``P (dO V^T - (dO . O) + dLSE)``. The kernel's backward computes P from the logits and a log-sum-exp that
    it is given, and ``dO . O`` from an output that it is given: with those of the merged softmax it is exact for the
    window's part. For dLSE there is one more column, 1 in V, dLSE in dO and 0 in O: the first product gains it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_k: Tensor,
        sink_v: Tensor,
        window: int,
        start: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        out, lse, *random = flash_forward((q, k, v), window, scale)
        if sink_k.shape[1]:
            by_head = out.transpose(1, 2)
            logits = sink_logits(q.transpose(1, 2), _per_query(sink_k, q), window, start, scale)
            logits = torch.cat([lse.unsqueeze(-1), logits], -1)
            shares, lse = logits.softmax(-1), logits.logsumexp(-1)
            by_head.mul_(shares[..., :1])  # in place: it may be gigabytes
            by_head.add_(shares[..., 1:].to(q.dtype) @ _per_query(sink_v, q))
        ctx.save_for_backward(q, k, v, sink_k, sink_v, out, lse, *random)
        ctx.settings = window, start, scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink_k, sink_v, out, lse, *random = ctx.saved_tensors
        window, start, scale = ctx.settings
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grads = _window_grads(window, scale, grad_out, grad_lse, q, k, v, out, lse, random)
        nothing = None, None, None
        if not sink_k.shape[1]:
            return *grads, None, None, *nothing
        rows = [x.transpose(1, 2) for x in (grad_out, q, out)]
        sinks_k, sinks_v = _per_query(sink_k, q), _per_query(sink_v, q)
        seen = (sink_logits(rows[1], sinks_k, window, start, scale) - lse.unsqueeze(-1)).exp()  # (B, H, n, S)
        mean = (rows[0] * rows[2]).sum(-1, dtype=seen.dtype)
        mean = mean if grad_lse is None else mean - grad_lse
        logits = seen * (product(rows[0], sinks_v.transpose(-1, -2)) - mean.unsqueeze(-1)) * scale
        logits, seen = logits.to(q.dtype), seen.to(q.dtype)
        q_grad = grads[0] + product(logits, sinks_k).to(q.dtype).transpose(1, 2)
        sink_grads = (
            product(left.transpose(-1, -2), right).unflatten(1, (sink_k.shape[2], -1)).sum(2).transpose(1, 2)
            for left, right in ((logits, rows[1]), (seen, rows[0]))
        )
        return q_grad, *grads[1:], *(x.to(q.dtype) for x in sink_grads), *nothing


def _window_grads(
    window: int,
    scale: float,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    random: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of queries, keys and values of the window, from output and log-sum-exp of the whole softmax."""
    dim = q.shape[-1]
    if grad_lse is not None:
        column = grad_lse.transpose(1, 2).unsqueeze(-1).to(grad_out.dtype)
        grad_out = fill(torch.cat([grad_out, column], -1), (0, COLUMN - 1))
        q, k, out = (fill(x, (0, COLUMN)) for x in (q, k, out))
        v = fill(fill(v, (0, 1), value=1.0), (0, COLUMN - 1))
    grads = flash_backward([grad_out, q, k, v, out], lse.contiguous(), window, scale, random)
    return [grad[..., :dim] for grad in grads]


def flash_forward(rows: Sequence[Tensor], window: int | None, scale: float) -> Sequence[Tensor]:
    """Output, log-sum-exp and the state of its random numbers; the last query stands beside the last key.

    Args:
        rows: q, k, v ``(B, n, H, D)``.
        window: how many keys a query sees, its own included; None: all there are.
    """
    left, right = (-1, -1) if window is None else (window - 1, 0)
    lengths = rows[0].shape[1], rows[1].shape[1]
    sides = {"window_size_left": left, "window_size_right": right}
    settings = (None, None, *lengths, 0.0, window is not None, False)
    out, lse, *random, _ = torch.ops.aten._flash_attention_forward(*rows, *settings, scale=scale, **sides)
    return [out, lse, *random]


def flash_backward(
    rows: Sequence[Tensor], lse: Tensor, window: int, scale: float, random: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of ``q``, ``k`` and ``v``; ``rows`` are dO, q, k, v and O, the rest as in :func:`flash_forward`."""
    lengths = rows[1].shape[1], rows[2].shape[1]
    sides = {"window_size_left": window - 1, "window_size_right": 0}
    settings = (None, None, *lengths, 0.0, True)
    return list(torch.ops.aten._flash_attention_backward(*rows, lse, *settings, *random, scale=scale, **sides))


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of ``(B, H, m, d)`` and ``(B, H, d, s)``, accumulated and returned in float32 or wider."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and a.dtype != wide:  # without a wide copy of what may be every query
        out = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=wide)
        return out.unflatten(0, a.shape[:2])
    return a.to(wide) @ b.to(wide)


def _per_query(x: Tensor, q: Tensor) -> Tensor:
    """Sinks ``(B, S, H_kv, D)`` once for each query head of ``q`` (B, n, H, D): ``(B, H, S, D)``."""
    return x.transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], 1)

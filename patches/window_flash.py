"""Window attention by torch's own flash kernel (CUDA, 16 bits): no mask, no gathered keys, gradients of both results.

The kernel knows a sliding window but no sinks, and its backward ignores the gradient of the log-sum-exp that its
forward returns. So the sinks are a small product of their own, merged by log-sum-exp, and the backward is called in
such a way that it is exact for the merged softmax.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    pad: Tensor | None,
    lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """As ``window_attention`` of kernels.py, without dropout."""
    nothing = max(window - start, 0)  # places before slot 0
    plan = Plan.make(q, k.shape[1] - nothing, window, start, scale, pad)
    out, sums = _Window.apply(q, k[:, nothing:], v[:, nothing:], sink_k, sink_v, plan)
    return out, sums.transpose(1, 2) if lse else None


def flash_decode(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """``decode_attention`` of kernels.py with the log-sum-exp and without a gradient, tokens before heads."""
    keys = k.shape[1]
    out, lse = flash_forward((q, k, v), None, None, q.shape[1], keys, keys if causal else None, scale)[:2]
    return out, lse.transpose(1, 2)


@dataclass(frozen=True)
class Plan:
    """What a call needs besides its tensors.

    Attributes:
        window, start, scale: as there.
        edge: slot of each row's first token ``(B,)``; None without padding.
        queries, keys: with padding, where each row's padding and its text begin among all rows' queries and keys
            ``(2 B + 1,)``: two sequences to the kernel, of which neither sees the other. None without.
    """

    window: int
    start: int
    scale: float
    edge: Tensor | None
    queries: Tensor | None
    keys: Tensor | None

    @classmethod
    def make(cls, q: Tensor, length: int, window: int, start: int, scale: float, pad: Tensor | None) -> "Plan":
        """The plan for queries ``(B, n, H, D)`` on ``length`` keys that end with the same slot."""
        n = q.shape[1]
        if pad is None:
            return cls(window, start, scale, None, None, None)
        marks = []
        for tokens in (n, length):
            padding = (pad - (start + n - tokens)).clamp(0, tokens)
            ends = torch.stack([padding, torch.full_like(padding, tokens)], 1)
            ends = ends + tokens * torch.arange(len(ends), device=q.device)[:, None]
            marks.append(fill(ends.flatten(), (1, 0)).int())
        return cls(window, start, scale, pad, *marks)

    def sink_logits(self, q: Tensor, sink_k: Tensor) -> Tensor:
        """Logits ``(B, H, n, S)`` of all queries and the sinks, in float32 or wider; minus infinity before a sink has
        left the window."""
        left = torch.arange(self.start - self.window, self.start - self.window + q.shape[2], device=q.device)[:, None]
        slot = torch.arange(sink_k.shape[2], device=q.device)
        unseen = (slot if self.edge is None else self.edge[:, None, None, None] + slot) > left
        return (product(q, sink_k.transpose(-1, -2)) * self.scale).masked_fill_(unseen, float("-inf"))


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
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        n, length = q.shape[1], k.shape[1]
        rows = [_flat(x) if plan.keys is not None else x for x in (q, k, v)]
        out, lse, *random = flash_forward(rows, plan.queries, plan.keys, n, length, plan.window, plan.scale)
        if plan.keys is not None:
            out, lse = out.unflatten(0, (-1, n)), lse.unflatten(1, (-1, n)).transpose(0, 1)
        if sink_k.shape[1]:
            by_head = out.transpose(1, 2)
            logits = plan.sink_logits(q.transpose(1, 2), _per_query(sink_k, q))
            logits = torch.cat([lse.unsqueeze(-1), logits], -1)
            shares, lse = logits.softmax(-1), logits.logsumexp(-1)
            by_head.mul_(shares[..., :1])  # in place: it may be gigabytes
            by_head.add_(shares[..., 1:].to(q.dtype) @ _per_query(sink_v, q))
        ctx.save_for_backward(q, k, v, sink_k, sink_v, out, lse, *random)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink_k, sink_v, out, lse, *random = ctx.saved_tensors
        plan: Plan = ctx.plan
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grads = _window_grads(plan, grad_out, grad_lse, q, k, v, out, lse, random)
        if not sink_k.shape[1]:
            return *grads, None, None, None
        rows = [x.transpose(1, 2) for x in (grad_out, q, out)]
        sinks_k, sinks_v = _per_query(sink_k, q), _per_query(sink_v, q)
        seen = (plan.sink_logits(rows[1], sinks_k) - lse.unsqueeze(-1)).exp()  # (B, H, n, S)
        mean = (rows[0] * rows[2]).sum(-1, dtype=seen.dtype)
        mean = mean if grad_lse is None else mean - grad_lse
        logits = seen * (product(rows[0], sinks_v.transpose(-1, -2)) - mean.unsqueeze(-1)) * plan.scale
        logits, seen = logits.to(q.dtype), seen.to(q.dtype)
        q_grad = grads[0] + product(logits, sinks_k).to(q.dtype).transpose(1, 2)
        sink_grads = (
            product(left.transpose(-1, -2), right).unflatten(1, (sink_k.shape[2], -1)).sum(2).transpose(1, 2)
            for left, right in ((logits, rows[1]), (seen, rows[0]))
        )
        return q_grad, *grads[1:], *(x.to(q.dtype) for x in sink_grads), None


def _window_grads(
    plan: Plan,
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
    (batch, n, _, dim), length = q.shape, k.shape[1]
    if grad_lse is not None:
        column = grad_lse.transpose(1, 2).unsqueeze(-1).to(grad_out.dtype)
        grad_out = fill(torch.cat([grad_out, column], -1), (0, COLUMN - 1))
        q, k, out = (fill(x, (0, COLUMN)) for x in (q, k, out))
        v = fill(fill(v, (0, 1), value=1.0), (0, COLUMN - 1))
    rows = [grad_out, q, k, v, out]
    if plan.keys is not None:
        rows, lse = [_flat(x) for x in rows], lse.transpose(0, 1).flatten(1)
    grads = flash_backward(rows, lse.contiguous(), plan.queries, plan.keys, n, length, plan.window, plan.scale, random)
    if plan.keys is not None:
        grads = [grad.unflatten(0, (batch, -1)) for grad in grads]
    return [grad[..., :dim] for grad in grads]


def flash_forward(
    rows: Sequence[Tensor],
    queries: Tensor | None,
    keys: Tensor | None,
    most_queries: int,
    most_keys: int,
    window: int | None,
    scale: float,
) -> Sequence[Tensor]:
    """Output, log-sum-exp and the state of its random numbers; the last query stands beside the last key.

    Args:
        rows: q, k, v ``(B, n, H, D)``, or ``(tokens, H, D)`` with the first token of each sequence in ``queries``.
        most_queries, most_keys: length of the longest sequence.
        window: how many keys a query sees, its own included; None: all there are.
    """
    left, right = (-1, -1) if window is None else (window - 1, 0)
    out, lse, *random, _ = torch.ops.aten._flash_attention_forward(
        *rows,
        queries,
        keys,
        most_queries,
        most_keys,
        0.0,
        window is not None,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return [out, lse, *random]


def flash_backward(
    rows: Sequence[Tensor],
    lse: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    most_queries: int,
    most_keys: int,
    window: int,
    scale: float,
    random: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of ``q``, ``k`` and ``v``; ``rows`` are dO, q, k, v and O, the rest as in :func:`flash_forward`."""
    return list(
        torch.ops.aten._flash_attention_backward(
            *rows,
            lse,
            queries,
            keys,
            most_queries,
            most_keys,
            0.0,
            True,
            *random,
            scale=scale,
            window_size_left=window - 1,
            window_size_right=0,
        )
    )


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


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)

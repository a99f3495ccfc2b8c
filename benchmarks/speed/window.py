"""Blocked sinks + window attention beside the dense mask it replaces."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.speed import cases
from benchmarks.speed.two_forms import TIME_AND_MEMORY, side_by_side
from patches.window import window_attention
from retrofit.bench.machine import Where

COLUMNS = TIME_AND_MEMORY
DENSE, BLOCKED = "dense mask", "blocked"


class Case(cases.Window, Where):
    """One attention layer's work: T tokens, H query heads on H_kv key/value heads of D, window W and S sinks."""


def run(case: Case, repeats: int = 3) -> list[dict[str, Any]]:
    """Seconds and peak extra memory of both forms, and their ratios: see :func:`side_by_side`.

    The dense form has its mask from the second call on, since a model builds it once for all layers: the time is
    without it, the memory, which is that of a first call, with it.
    """
    return side_by_side(prepare, case, (DENSE, BLOCKED), (DENSE, BLOCKED), "dense / blocked", repeats)


def dense_mask(case: Case) -> Tensor:
    """(T, T), True where a query sees a key: the last W tokens and the first S."""
    j = torch.arange(case.length, device=case.place())
    t = j[:, None]
    return (j <= t) & ((j > t - case.window) | (j < case.sinks))  # booleans only: t - j would take 8 T^2 bytes


def prepare(case: Case, form: str) -> Callable[[], Tensor]:
    """Inputs, and one form on them: (B, H, T, D) out."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, case.length, case.head_dim) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    inputs = [torch.randn(shape, generator=generator).to(case.place(), case.torch_dtype()) for shape in shapes]
    q, k, v = (x.requires_grad_(case.backward) for x in inputs)
    masks: list[Tensor] = []

    def dense() -> Tensor:
        if not masks:
            masks.append(dense_mask(case))
        return scaled_dot_product_attention(q, k, v, attn_mask=masks[0], enable_gqa=True)

    def blocked() -> Tensor:
        before = k.new_zeros(1, case.kv_heads, case.window, case.head_dim)  # there is nothing before slot 0
        stream = (torch.cat([before, x], 2) for x in (k, v))
        sinks = (x[:, :, : case.sinks] for x in (k, v))
        return window_attention(q, *stream, *sinks, window=case.window, start=0, scale=case.head_dim**-0.5)[0]

    def arm() -> Tensor:
        out = dense() if form == DENSE else blocked()
        if case.backward:
            torch.autograd.grad(out.sum(), (q, k, v))
        return out.detach()

    return arm

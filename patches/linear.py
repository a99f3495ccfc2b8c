"""The modules that memories are made of. Each computes with its own weights when it is called, and nobody else does.

Who stands between a module and its weights (accelerate's offloading, ZeRO-3, a LoRA) acts when it is called.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

UNIT_EPS = 1e-6  # inside the root of the l2 norm, as in the kernels of AHN's published models
NORM_EPS = 1e-5  # of the RMSNorm after the read
# torch 2.9 has a new switch for products on CUDA, and complains where the old one is read when both were used
SWITCH: Any = torch.backends.cuda.matmul
NAME, EXACT = ("fp32_precision", ("ieee", "none")) if hasattr(SWITCH, "fp32_precision") else ("allow_tf32", (False,))


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 where the model itself is: what states and gates are in."""
    return torch.float64 if dtype == torch.float64 else torch.float32  # promote_types is dispatched like an operation


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``; a cast that changes nothing is dispatched like any operation."""
    return x if x.dtype == dtype else x.to(dtype)


@contextmanager
def exact_products(tf32: bool = False) -> Iterator[None]:
    """Inside the block float32 products on CUDA are exact, whatever torch's global switch says; not with ``tf32``.

    A compiler does not see this: what it compiles follows the switch.
    """
    if tf32 or torch.compiler.is_compiling() or (before := getattr(SWITCH, NAME)) in EXACT:
        yield
        return
    setattr(SWITCH, NAME, EXACT[0])
    try:
        yield
    finally:
        setattr(SWITCH, NAME, before)


def unit(x: Tensor) -> Tensor:
    """``x`` scaled to length 1 along its last dimension, a zero to zero."""
    longer = F.pad(x, (0, 1), value=math.sqrt(UNIT_EPS))  # what is added inside the root is one more component
    return x / torch.linalg.vector_norm(longer, dim=-1, keepdim=True)


class WideLinear(nn.Linear):
    """A linear layer computed in float32 or wider, whatever the dtype of its input and of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = wide(x.dtype)
        bias = None if self.bias is None else cast(self.bias, dtype)
        return F.linear(cast(x, dtype), cast(self.weight, dtype), bias)


class LargeLinear(WideLinear):
    """One whose weights are worth not being copied: in bfloat16 they are read as they are, and summed up in float32.

    What goes in is rounded like them. float16 has not the range that a reading may need.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype != torch.bfloat16:
            return super().forward(x)
        return F.linear(cast(x, self.weight.dtype), self.weight, self.bias)


class HeadLinear(nn.Module):
    """One square matrix per head, multiplied from the right: ``(B, n, H, D) -> (B, n, H, D)``."""

    def __init__(self, heads: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bnhi,hio->bnho", x, cast(self.weight, x.dtype))


class ReadNorm(nn.Module):
    """RMSNorm over the last dimension: one head (its weight shared by all), or all heads together."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, cast(self.weight, x.dtype), NORM_EPS)

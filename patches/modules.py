"""The modules that memories are made of. Each computes with its own weights when it is called, and nobody else does.

Who stands between a module and its weights (accelerate's offloading, ZeRO-3, a LoRA) acts when it is called.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .precision import cast, wide

UNIT_EPS = 1e-6  # inside the root of the l2 norm, as in the kernels of the delta rules that AHN is published with
NORM_EPS = 1e-5  # of the RMSNorm after the read


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
    """One square matrix per head, multiplied from the right: ``(B, H, n, D) -> (B, H, n, D)``."""

    def __init__(self, heads: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bhni,hio->bhno", x, cast(self.weight, x.dtype))


class ReadNorm(nn.Module):
    """RMSNorm of ``(.., H, D)`` over one head, its weight shared by all, or over all heads together."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        weight = cast(self.weight, x.dtype)
        weight = weight if len(weight) == x.shape[-1] else weight.view(x.shape[-2:])
        return F.rms_norm(x, weight.shape, weight, NORM_EPS)

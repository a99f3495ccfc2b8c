"""Artificial Hippocampus Networks (arXiv 2510.07318): a matrix per query head, added before the output projection.

The kinds called ``shared-...`` are ours: the same rules with a state per key head, which all its query heads read.

Three rules write it: the delta rule, the gated delta rule, and Mamba2's decayed sum. Shapes and initial values are
those of the published checkpoints, and so are names, but for ``read_proj`` and ``read_norm``: who aims at the base's
``o_proj`` by name must not hit a memory. Where the paper and the code that made them differ, the code is followed:
queries and keys have unit length, the read is normalised, the output gate is a silu; the delta rules scale the read by
``d**-0.5`` and gate after the norm of each head, Mamba2 does not scale and gates before one norm over all heads.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from .kernels import gated_delta_rule, linear_attention
from .memory import MatrixMemory, spread_by_head
from .modules import HeadLinear, ReadNorm, WideLinear
from .precision import cast
from .scan import per_state


class DeltaNet(MatrixMemory):
    """AHN-DN (appendix, eq. 10): the delta rule without decay. Write gate: ``beta``, from the written token's input."""

    kind = "ahn-dn"
    writes = 2  # one reads what the key recalls

    def __init__(self, config: Any, window: int, sinks: int, options: Any):
        super().__init__(config, window, sinks, options)
        self.b_proj = WideLinear(self.hidden_size, self.states, bias=False)
        self.g_proj = WideLinear(self.hidden_size, self.heads, bias=False)
        self.read_norm = ReadNorm(self.head_dim)
        self.read_proj = HeadLinear(self.heads, self.head_dim)

    def reset_parameters(self) -> None:
        init.normal_(self.b_proj.weight, std=0.02)
        init.normal_(self.g_proj.weight, std=0.02)
        init.ones_(self.read_norm.weight)
        init.zeros_(self.read_proj.weight)  # a fresh memory adds exactly nothing, and still has a gradient

    def write_gates(self, x: Tensor) -> Tensor:
        """``beta`` of each state, ``(B, n, H_s)``, float32."""
        return self.b_proj(x).sigmoid()

    def read(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        beta, *decay = gates.split(self.states, 1)
        fade, scale = decay[0] if decay else None, self.head_dim**-0.5
        read, state = gated_delta_rule(q, k, v, beta, fade, state, scale=scale, normalise=True, in_place=True)
        return self.read_proj(self.read_norm(read) * spread_by_head(F.silu(self.g_proj(x)))), state


class GatedDeltaNet(DeltaNet):
    """AHN-GDN (section 3.2, eq. 5 and 6): a decay per head and token besides; write gates ``beta`` and log decay."""

    kind = "ahn-gdn"

    def __init__(self, config: Any, window: int, sinks: int, options: Any):
        super().__init__(config, window, sinks, options)
        self.a_proj = WideLinear(self.hidden_size, self.states, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.states))
        self.dt_bias = nn.Parameter(torch.empty(self.states))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.normal_(self.a_proj.weight, std=0.02)
        init.copy_(self.A_log, torch.rand(self.states).mul(16).clamp_min(1e-4).log())
        # the inverse softplus of a step drawn log-uniformly from 0.001 to 0.1, as in Mamba2
        step = (torch.rand(self.states) * math.log(100) + math.log(1e-3)).exp()
        init.copy_(self.dt_bias, step + torch.log(-torch.expm1(-step)))

    def write_gates(self, x: Tensor) -> Tensor:
        """``beta`` and the log decay of each state, ``(B, n, 2 H_s)``, float32."""
        speed = self.a_proj(x)
        rate = cast(self.A_log, speed.dtype).exp()
        log_decay = rate * -F.softplus(speed + cast(self.dt_bias, speed.dtype))
        return torch.cat([super().write_gates(x), log_decay], -1)


class Mamba2(MatrixMemory):
    """AHN-Mamba2 (appendix, eq. 9): a decayed sum of outer products. Write gate: the step size, from the written token.

    The step is both how much is written and, times ``exp(A_log)``, how much is forgotten.
    """

    kind = "ahn-mamba2"

    def __init__(self, config: Any, window: int, sinks: int, options: Any):
        super().__init__(config, window, sinks, options)
        self.dt_proj = WideLinear(self.hidden_size, self.states)
        self.dt_bias = nn.Parameter(torch.empty(self.states))  # besides the projection's own: both are published
        self.A_log = nn.Parameter(torch.empty(self.states))
        self.g_proj = WideLinear(self.hidden_size, self.heads)
        self.read_norm = ReadNorm(self.heads * self.head_dim)
        self.read_proj = HeadLinear(self.heads, self.head_dim)

    def reset_parameters(self) -> None:
        for projection in (self.dt_proj, self.g_proj):
            init.normal_(projection.weight, std=0.02)
            init.zeros_(projection.bias)
        init.ones_(self.dt_bias)
        init.copy_(self.A_log, torch.arange(1.0, self.states + 1).log())
        init.ones_(self.read_norm.weight)
        init.zeros_(self.read_proj.weight)

    def write_gates(self, x: Tensor) -> Tensor:
        """The step size of each state, ``(B, n, H_s)``, float32."""
        step = self.dt_proj(x)
        return F.softplus(step + cast(self.dt_bias, step.dtype))

    def read(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        v = per_state(cast(v, gates.dtype), self.states) * gates.unsqueeze(-1)
        log_decay = -gates * cast(self.A_log, gates.dtype).exp().unsqueeze(-1)
        # as the authors do it, who leave it to the kernels of the delta rules, which add 1e-6
        both = cast(torch.cat([q, k], 1), gates.dtype)
        q, k = (both / both.norm(dim=-1, keepdim=True).clamp_min(1e-12)).split([self.heads, self.kv_heads], 1)
        read, state = linear_attention(q, k, v, log_decay, state, scale=1.0, in_place=True)
        read = read * spread_by_head(F.silu(self.g_proj(x)))  # (B, H, m, D)
        return self.read_proj(self.read_norm(read.transpose(1, 2)).transpose(1, 2)), state


class SharedGatedDeltaNet(GatedDeltaNet):
    kind = "shared-gdn"
    shared = True


class SharedDeltaNet(DeltaNet):
    kind = "shared-dn"
    shared = True


class SharedMamba2(Mamba2):
    kind = "shared-mamba2"
    shared = True

"""A forward pass of one layer made by hand, for memories that are tested without a model."""

from typing import Any

import torch
from torch import Tensor

from patches.cache import ScratchLayer
from patches.memory import Memory, Step
from patches.rotary import Rotary
from patches.sequence import Pass, Starts

CPU = torch.device("cpu")


def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``(B, n, 8)`` for heads of 8."""
    angles = positions.double().unsqueeze(-1) * torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=torch.float64)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def make_step(
    memory: Memory,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    turns: Rotary = rotary,
    starts: Starts | None = None,
    **changes: Any,
) -> Step:
    """An evicting pass without a cache over rotated ``q`` (B, H, n, 8) and ``k``, ``v`` (B, H_kv, n, 8)."""
    now = Pass(0, q.shape[2], starts or Starts(), True, turns, CPU, CPU)
    given: dict[str, Any] = {
        "x": q.new_zeros(q.shape[0], q.shape[2], 1),
        "layer": ScratchLayer(memory.kind, memory.window, memory.sinks),
        "scale": q.shape[-1] ** -0.5,
    }
    return Step(now, q=q, k=k, v=v, **{**given, **changes})

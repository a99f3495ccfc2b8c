"""A forward pass of one layer made by hand, for memories that are tested without a model."""

from typing import Any

import torch
from torch import Tensor

from patches.memory import Step


def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``(B, n, 8)`` for heads of 8."""
    angles = positions.double().unsqueeze(-1) * torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=torch.float64)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def make_step(q: Tensor, k: Tensor, v: Tensor, **changes: Any) -> Step:
    """A pass without a cache over rotated ``q`` (B, H, n, 8) and ``k``, ``v`` (B, H_kv, n, 8)."""
    given: dict[str, Any] = {
        "x": q.new_zeros(q.shape[0], q.shape[2], 1),
        "gates": None,
        "layer": None,
        "seen": 0,
        "pad": None,
        "min_pad": 0,
        "max_pad": 0,
        "offset": torch.zeros(1, dtype=torch.long),
        "rotary": rotary,
        "scale": q.shape[-1] ** -0.5,
        "dropout": 0.0,
    }
    return Step(q=q, k=k, v=v, **{**given, **changes})

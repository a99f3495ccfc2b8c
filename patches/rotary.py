"""Rotary positions after the fact: turning cached keys back, and to other positions."""

from collections.abc import Callable

import torch
from torch import Tensor

# positions (B, n), fractions allowed -> cos and sin (B, n, D); the model's own rotary embedding
Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` (B, H, n, D) turned by the angles of ``cos``, ``sin`` (B, n, D), its halves paired as in our families."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return x * cos + _quarter_turn(x) * sin


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of :func:`rotate`, for tables scaled by any factor (yarn scales them) too."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (x * cos - _quarter_turn(x) * sin) / (cos.square() + sin.square())


def _quarter_turn(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)

"""Rotary positions after the fact: turning cached keys back, and to other positions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Turn = tuple[Tensor, Tensor]  # cosines and sines (1 or B, n, D)
Rotary = Callable[[Tensor], Turn]  # of positions (1 or B, n), fractions allowed; the model's own rotary embedding


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


def longest_input(config: Any) -> int | None:
    """Tokens that a base's positions were made for, its rotary scaling included; None if it does not say."""
    rope = getattr(config, "rope_parameters", None) or {}
    stretched = int(rope.get("factor", 1) * rope.get("original_max_position_embeddings", 0))
    return max(getattr(config, "max_position_embeddings", None) or 0, stretched) or None

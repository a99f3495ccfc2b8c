"""Rotary positions after the fact: turning cached keys back, and to other positions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Turn = tuple[Tensor, Tensor]  # cosines and sines (1 or B, n, D)
Rotary = Callable[[Tensor], Turn]  # of positions (1 or B, n), fractions allowed; the model's own rotary embedding


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` (B, H, n, D) turned by the angles of ``cos``, ``sin`` (B, n, D), its halves paired as in our families."""
    return turned(x, *for_heads(cos, sin))


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of :func:`rotate`, for tables scaled by any factor (yarn scales them) too."""
    return turned(x, *for_heads(*back(cos, sin)))


def back(cos: Tensor, sin: Tensor) -> Turn:
    """The tables of the inverse turn."""
    length = square_length(cos, sin)
    return cos / length, sin / -length


def square_length(cos: Tensor, sin: Tensor) -> Tensor:
    """The square of what a turn lengthens vectors by; yarn scales its tables."""
    return torch.addcmul(cos.square(), sin, sin)


def after(first: Turn, second: Turn) -> Turn:
    """The tables of one turn and then another."""
    (cos, sin), (cos_2, sin_2) = first, second
    return cos * cos_2 - sin * sin_2, sin * cos_2 + cos * sin_2


def for_heads(cos: Tensor, sin: Tensor) -> Turn:
    """Tables ``(B, n, D)`` as :func:`turned` takes them, made once for all heads and layers."""
    signed = sin.unsqueeze(1).clone()
    signed[..., : sin.shape[-1] // 2].neg_()
    return cos.unsqueeze(1), signed


def turned(x: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
    """:func:`rotate` by the tables of :func:`for_heads`; bit for bit what the base's own rotation gives."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * signed


def longest_input(config: Any) -> int | None:
    """Tokens that a base's positions were made for, its rotary scaling included; None if it does not say."""
    rope = getattr(config, "rope_parameters", None) or {}
    stretched = int(rope.get("factor", 1) * rope.get("original_max_position_embeddings", 0))
    return max(getattr(config, "max_position_embeddings", None) or 0, stretched) or None

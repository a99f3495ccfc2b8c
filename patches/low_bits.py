"""Numbers in 8 to 4 bits: a scale per token, and one mean and spread per channel that were measured beforehand."""

from typing import NamedTuple

import torch
from torch import Tensor

BITS = (16, 8, 6, 5, 4)  # 16: the model's own dtype, nothing is rounded
SMALLEST = 1e-6  # a token's scale, so that a token of zeros divides by something


class Channels(NamedTuple):
    """What the channels of each head are like: their ``mean`` and ``spread``, both ``(H, D)``."""

    mean: Tensor
    spread: Tensor


def quantise(x: Tensor, channels: Channels, bits: int) -> tuple[Tensor, Tensor]:
    """Round ``x`` (B, H, n, D), less its channels' mean and over their spread, to ``bits`` bits.

    Levels lie at odd multiples of half a scale, as many below zero as above.

    Returns:
        The codes, packed, ``(B, H, n, D * bits / 8)`` uint8, and each token's scale ``(B, H, n, 1)``
        in float16.

    The scale of [-1, 1] in 4 bits is 1 / 7.5, and its ends are levels:

    >>> channels = Channels(torch.zeros(1, 2), torch.ones(1, 2))
    >>> codes, scale = quantise(torch.tensor([[[[-1.0, 1.0]]]]), channels, bits=4)
    >>> codes.tolist(), restore(codes, scale, channels, bits=4).round(decimals=2).tolist()
    ([[[[240]]]], [[[[-1.0, 1.0]]]])
    """
    z = (x - channels.mean.unsqueeze(-2)) / channels.spread.unsqueeze(-2)
    levels = 2**bits
    scale = (z.abs().amax(-1, keepdim=True) / ((levels - 1) / 2)).clamp_min(SMALLEST).to(torch.float16)
    codes = (z / scale.to(z.dtype) + (levels - 1) / 2).round().clamp(0, levels - 1).to(torch.uint8)
    return _pack(codes, bits), scale


def restore(codes: Tensor, scale: Tensor, channels: Channels, bits: int) -> Tensor:
    """What :func:`quantise` has rounded, ``(B, H, n, D)`` in the dtype of the channels' mean."""
    mean, spread = channels
    codes = _unpack(codes, bits)
    z = (codes.to(mean.dtype) - (2**bits - 1) / 2) * scale.to(mean.dtype)
    return z * spread.unsqueeze(-2) + mean.unsqueeze(-2)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of so many bits side by side, the lowest bit of the first code first."""
    if bits == 8:
        return codes
    if bits == 4:
        return codes[..., ::2] | (codes[..., 1::2] << 4)
    place = torch.arange(8, dtype=torch.uint8, device=codes.device)
    each = (codes.unsqueeze(-1) >> place[:bits]) & 1
    return (each.flatten(-2).unflatten(-1, (-1, 8)) << place).sum(-1, dtype=torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """What :func:`_pack` has packed."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    place = torch.arange(8, dtype=torch.uint8, device=packed.device)
    each = (packed.unsqueeze(-1) >> place) & 1
    return (each.flatten(-2).unflatten(-1, (-1, bits)) << place[:bits]).sum(-1, dtype=torch.uint8)

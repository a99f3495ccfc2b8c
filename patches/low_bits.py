"""Numbers in 8 or 4 bits: a scale per token, and one mean and spread per channel that were measured beforehand."""

from typing import NamedTuple

import torch
from torch import Tensor

BITS = (16, 8, 4)  # 16: the model's own dtype, nothing is rounded
SMALLEST = 1e-6  # a token's scale, so that a token of zeros divides by something


class Channels(NamedTuple):
    """What the channels of each head are like: their ``mean`` and ``spread``, both ``(H, D)``."""

    mean: Tensor
    spread: Tensor


def quantise(x: Tensor, channels: Channels, bits: int) -> tuple[Tensor, Tensor]:
    """Round ``x`` (B, H, n, D), less its channels' mean and over their spread, to ``bits`` bits.

    Levels lie at odd multiples of half a scale, as many below zero as above.

    Returns:
        The codes, two of 4 bits to a byte, ``(B, H, n, D * bits / 8)`` uint8, and each token's scale ``(B, H, n, 1)``
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
    return (codes[..., ::2] | (codes[..., 1::2] << 4) if bits == 4 else codes), scale


def restore(codes: Tensor, scale: Tensor, channels: Channels, bits: int) -> Tensor:
    """What :func:`quantise` has rounded, ``(B, H, n, D)`` in the dtype of the channels' mean."""
    mean, spread = channels
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    z = (codes.to(mean.dtype) - (2**bits - 1) / 2) * scale.to(mean.dtype)
    return z * spread.unsqueeze(-2) + mean.unsqueeze(-2)

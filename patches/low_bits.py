"""Numbers in 8 to 4 bits: a scale per token, and one mean and spread per channel that were measured beforehand."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

BITS = (16, 8, 6, 5, 4)  # 16: the model's own dtype, nothing is rounded
SMALLEST = 1e-12  # a step, so that a token that is its channels' mean divides by something
LARGEST = 2.0**15  # spreads from the mean, of which the scale in 4 bits is still a float16
COARSER = (
    4  # so many times as coarse as without spreads may their steps be: 1 token in 200 of a language model asks more
)


class Channels(NamedTuple):
    """What the channels of each head are like: their ``mean`` and ``spread``, both ``(H, D)``."""

    mean: Tensor
    spread: Tensor


def quantise(x: Tensor, channels: Channels, bits: int) -> tuple[Tensor, Tensor]:
    """Round ``x`` (B, H, n, D), less its channels' mean and over their spread, to ``bits`` bits.

    Levels lie at odd multiples of half a scale, as many below zero as above. A channel that hardly varied when it was
    measured must not set the scale of all: where it would, the token is not divided by the spreads. So no number is
    wrong by more than ``COARSER / (2**bits - 1)`` of the token's largest difference from the mean.

    Returns:
        The codes, packed, ``(B, H, n, D * bits / 8)`` uint8, and each token's scale ``(B, H, n, 1)``
        in float16, negative where the spreads have no part in it.

    The scale of [-1, 1] in 4 bits is 1 / 7.5, and its ends are levels:

    >>> channels = Channels(torch.zeros(1, 2), torch.ones(1, 2))
    >>> codes, scale = quantise(torch.tensor([[[[-1.0, 1.0]]]]), channels, bits=4)
    >>> codes.tolist(), restore(codes, scale, channels, bits=4).round(decimals=2).tolist()
    ([[[[240]]]], [[[[-1.0, 1.0]]]])
    """
    far, half = x - channels.mean.unsqueeze(-2), (2**bits - 1) / 2
    largest, farthest = (vector_norm(each, math.inf, -1, True) for each in (far / channels.spread.unsqueeze(-2), far))
    most = (farthest * (COARSER / channels.spread.amax(-1)[:, None, None])).clamp_max(LARGEST)
    scale = (torch.where(largest > most, -farthest, largest) / half).to(torch.float16)
    codes = (far / _steps(scale, channels.spread).clamp_min(SMALLEST) + half).round().clamp(0, 2 * half)
    return _pack(codes.to(torch.uint8), bits), scale


def restore(codes: Tensor, scale: Tensor, channels: Channels, bits: int) -> Tensor:
    """What :func:`quantise` has rounded, ``(B, H, n, D)`` in the dtype of the channels' mean."""
    mean, spread = channels
    codes = _unpack(codes, bits)
    levels = codes.to(mean.dtype).sub_((2**bits - 1) / 2)
    return _steps(scale, spread).mul_(levels).add_(mean.unsqueeze(-2))


def _steps(scale: Tensor, spread: Tensor) -> Tensor:
    """From one level of a number to the next ``(B, H, n, D)``, in the dtype of ``spread``."""
    scale = scale.to(spread.dtype)
    return (spread.unsqueeze(-2) * scale.clamp_min(0)).add_((-scale).clamp_min(0))  # choosing takes twice as long


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

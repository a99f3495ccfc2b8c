"""Vectors in a few bits per number: turned to where their errors matter one by one, and rounded to levels.

For keys an error ``e`` costs ``e M e'``: M says how queries will look at it. In the eigenbasis of ``M^1/2 C M^1/2``, C
the covariance of the vectors, coefficients are uncorrelated and all errors cost alike (transform coding). A coefficient
gets its bits by its variance: each next bit goes where it lowers the expected error most. Levels are those of a normal
distribution (Lloyd 1982, Max 1960), scaled for each vector.
"""

import math
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

MOST = 8  # bits of a coefficient
ROUNDS = 60  # of Lloyd's iteration, from levels that are near already
FLOOR = 1e-4  # of a metric's largest eigenvalue: the least that an error counts in any direction
TINY = 1e-20  # a variance
USUAL = 4.0  # a coefficient further out than so many spreads may be one that hardly varied in calibration
# candidates for a scale: times the root mean square of the coefficients, and of those cut at USUAL
TRIES, CUT_TRIES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.45), (0.8, 1.1)


class Code(NamedTuple):
    """How the vectors of each head are coded; all tensors are calibrated.

    Attributes:
        forward: turns vectors, less what is predicted of them, into coefficients ``(H, D, D)``.
        backward: its inverse.
        spread: of each coefficient ``(H, D)``.
        bits: of each coefficient ``(H, D)`` uint8, 0 to 8.
    """

    forward: Tensor
    backward: Tensor
    spread: Tensor
    bits: Tensor


def coded_bytes(dim: int, bits: float) -> int:
    """Bytes of the codes of a vector of ``dim`` numbers, ``bits`` each on average; whole bytes are filled.

    >>> coded_bytes(64, 3.5), coded_bytes(20, 2.1)
    (28, 6)
    """
    return math.ceil(dim * bits / 8)


@cache
def normal_levels(bits: int) -> tuple[tuple[float, ...], float]:
    """The 2^bits levels that represent a standard normal number best, rising, and their mean squared error.

    >>> levels, error = normal_levels(1)
    >>> [round(level, 3) for level in levels], round(error, 3)
    ([-0.798, 0.798], 0.363)
    """
    count, normal = 2**bits, NormalDist()
    # what they tend to where there are many (Panter and Dite 1951)
    levels = [math.sqrt(3) * normal.inv_cdf((at + 0.5) / count) for at in range(count)]
    for _ in range(ROUNDS):
        ends = [-math.inf, *((low + high) / 2 for low, high in pairwise(levels)), math.inf]
        weights = [normal.cdf(high) - normal.cdf(low) for low, high in pairwise(ends)]
        # the mean of a normal number between two ends
        levels = [
            (normal.pdf(low) - normal.pdf(high)) / max(weight, TINY)
            for (low, high), weight in zip(pairwise(ends), weights, strict=True)
        ]
    return tuple(levels), 1 - sum(weight * level**2 for weight, level in zip(weights, levels, strict=True))


def _level_tables(like: Tensor) -> tuple[Tensor, Tensor]:
    """Of 0 to 8 bits: the levels ``(9, 256)``, and what lies halfway between two of them ``(9, 255)``."""
    # a fake tensor's tables are fake themselves, and nobody else may find them
    return (_build_tables if is_fake(like) else _cached_tables)(like.device, like.dtype)


def _build_tables(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    levels = torch.zeros(MOST + 1, 2**MOST, dtype=torch.float64)
    halfway = torch.full((MOST + 1, 2**MOST - 1), math.inf, dtype=torch.float64)
    for bits in range(1, MOST + 1):
        own = torch.tensor(normal_levels(bits)[0], dtype=torch.float64)
        levels[bits, : len(own)] = own
        halfway[bits, : len(own) - 1] = (own[1:] + own[:-1]) / 2
    return levels.to(device, dtype), halfway.to(device, dtype)


_cached_tables = cache(_build_tables)


def divide_bits(variance: Tensor, total: int) -> Tensor:
    """``total`` bits of each head over its coefficients ``(H, D)``, each to where it lowers the error most.

    >>> divide_bits(torch.tensor([[16.0, 1.0, 0.0]]), 4).tolist()
    [[3, 1, 0]]
    """
    errors = torch.tensor([1.0, *(normal_levels(bits)[1] for bits in range(1, MOST + 1)), 0.0], dtype=torch.float64)
    gains = (errors[:-1] - errors[1:]).to(variance.device)
    gains[-1] = -1.0  # nothing has more than MOST
    bits = torch.zeros(variance.shape, dtype=torch.long, device=variance.device)
    variance = variance.double().clamp_min(TINY)
    for _ in range(total):
        best = (variance * gains[bits]).argmax(-1, keepdim=True)
        bits.scatter_add_(-1, best, torch.ones_like(best))
    return bits.to(torch.uint8)


def fit_code(covariance: Tensor, metric: Tensor, total: int) -> tuple[Code, Tensor]:
    """The code of vectors of some covariance whose errors ``e`` cost ``e metric e'``, both ``(H, D, D)``.

    Returns:
        The code, ``total`` bits for a vector, in float64; and the covariance of its errors ``(H, D, D)``.
    """
    values, vectors = torch.linalg.eigh(metric.double())
    values = values.clamp_min(TINY).clamp_min(FLOOR * values[..., -1:])
    root = (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT
    inverse = (vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mT
    variance, axes = torch.linalg.eigh(root @ covariance.double() @ root)
    variance = variance.clamp_min(TINY)
    bits = divide_bits(variance, total)
    code = Code(root @ axes, axes.mT @ inverse, variance.sqrt(), bits)
    errors = torch.tensor([1.0, *(normal_levels(count)[1] for count in range(1, MOST + 1))], dtype=torch.float64)
    left = variance * errors.to(variance.device)[bits.long()]
    return code, (code.backward.mT * left.unsqueeze(-2)) @ code.backward


def encode(x: Tensor, code: Code, size: int) -> tuple[Tensor, Tensor]:
    """Round vectors ``x`` (B, H, n, D), less what is predicted of them.

    Args:
        size: bytes of the codes of a vector.

    Returns:
        The codes ``(B, H, n, size)`` uint8, and each vector's scale ``(B, H, n, 1)`` in float16.
    """
    levels, halfway = _level_tables(x)
    bits = code.bits.long()
    spread = code.spread.to(x.dtype).unsqueeze(-2)
    z = (x @ code.forward.to(x.dtype)) / spread  # (B, H, n, D)
    used = (bits > 0).unsqueeze(-2)
    count = used.sum(-1, keepdim=True).clamp_min(1)
    found = []
    for x, tries in ((z, TRIES), (z.clamp(-USUAL, USUAL), CUT_TRIES)):
        rms = ((x.square() * used).sum(-1, keepdim=True) / count).sqrt()
        found += [rms * each for each in tries]
    limits = torch.finfo(torch.float16)
    scales = torch.stack(found).clamp(limits.tiny, limits.max).to(torch.float16)  # (tries, B, H, n, 1)
    ratio = z / scales.to(z.dtype)
    # for each coefficient the levels of its number of bits
    sorted_ends = halfway[bits]  # (H, D, 255)
    by_coefficient = ratio.movedim((2, 4), (0, 1)).flatten(2)  # (H, D, tries B n)
    codes = torch.searchsorted(sorted_ends, by_coefficient.contiguous())
    rounded = levels[bits].gather(-1, codes)
    shape = ratio.movedim((2, 4), (0, 1)).shape
    codes, rounded = (each.view(shape).movedim((0, 1), (2, 4)) for each in (codes, rounded))
    cost = ((z - rounded * scales.to(z.dtype)) * spread).square().sum(-1, keepdim=True)
    best = cost.argmin(0, keepdim=True)  # (1, B, H, n, 1)
    chosen = codes.gather(0, best.expand(1, *codes.shape[1:]))[0]
    return _pack(chosen, bits, size), scales.gather(0, best)[0]


def decode(codes: Tensor, scale: Tensor, code: Code) -> Tensor:
    """What :func:`encode` rounded ``(B, H, n, D)``, in the dtype of the code."""
    return decode_coefficients(codes, scale, code) @ code.backward


def decode_coefficients(codes: Tensor, scale: Tensor, code: Code) -> Tensor:
    """:func:`decode` before ``code.backward`` turns the coefficients into vectors."""
    levels, _ = _level_tables(code.spread)
    bits = code.bits.long()
    index = _unpack(codes, bits) + (bits * 2**MOST).unsqueeze(-2)
    return levels.flatten()[index] * code.spread.unsqueeze(-2) * scale.to(code.spread.dtype)


def _pack(codes: Tensor, bits: Tensor, size: int) -> Tensor:
    """Codes ``(B, H, n, D)`` of so many bits side by side, the lowest bit of the first coefficient first.

    A code of up to 8 bits that begins at bit o lies in the bytes o // 8 and o // 8 + 1.
    """
    byte, shift = _find_bytes(bits)
    spread_out = codes << shift.unsqueeze(-2)
    packed = codes.new_zeros(*codes.shape[:-1], size + 1)  # one more, which the last code's upper half falls into
    for part, at in ((spread_out & 255, byte), (spread_out >> 8, byte + 1)):
        packed.scatter_add_(-1, at.unsqueeze(-2).clamp_max(size).expand_as(codes), part)
    return packed[..., :size].to(torch.uint8)


def _unpack(packed: Tensor, bits: Tensor) -> Tensor:
    """What :func:`_pack` packed ``(B, H, n, D)`` int64."""
    byte, shift = _find_bytes(bits)
    last = packed.shape[-1] - 1
    wide = packed.long()
    shape = (*packed.shape[:-1], bits.shape[-1])
    low, high = (wide.gather(-1, at.clamp_max(last).unsqueeze(-2).expand(shape)) for at in (byte, byte + 1))
    return ((low | (high << 8)) >> shift.unsqueeze(-2)) & ((1 << bits) - 1).unsqueeze(-2)


def _find_bytes(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each coefficient's code ``(H, D)``: the byte that it begins in, and at which bit of that byte."""
    begin = bits.cumsum(-1) - bits
    return begin // 8, begin % 8

"""How many pairs an outer-product memory holds, beside the Tensor Cache paper's Table 3.

Pairs of random keys and values of length 1 are written one after the other with the memory's own rule; after each, the
first key is read. What comes back is the first value, decayed, and noise from the others. The capacity is the number of
pairs up to which the value is at least as long as the noise.
"""

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed import cases
from patches.errors import RetrofitError
from patches.tensor_cache import write_and_read

# of arXiv 2605.22884, Table 3: means of 5 seeds
PAPER = {
    "random": {16: 19.8, 32: 30.8, 64: 79.0, 128: 143.8},
    "decayed": {16: 15.4, 32: 32.2, 64: 51.8, 128: 84.2},
    "orthogonal first": {16: 31.8, 32: 63.8, 64: 128.4, 128: 240.8},
}
PAPER_SEEDS = 5
BATCH = 16  # seeds at a time

COLUMNS = {
    "name": ("keys", ""),
    "dim": ("D", "d"),
    "pairs": ("pairs", ".1f"),
    "deviation": ("std of a seed", ".1f"),
    "paper": ("paper", ".1f"),
    "z": ("paper's z", ".2f"),
}


Case = cases.Capacity


def run(case: Case, repeats: int = 60) -> list[dict[str, Any]]:
    """Mean capacity over ``repeats`` seeds.

    Returns:
        A row for each kind of keys and each D: ``pairs``, the ``deviation`` of single seeds, the ``paper``'s mean of 5
        seeds, and ``z``: by how many standard errors of the difference that lies from ours.

    Raises:
        RetrofitError: fewer than two seeds, which have no deviation.
    """
    if repeats < 2:
        raise RetrofitError(f"seeds={repeats}: use 2 or more, or there is no deviation")
    rows = []
    for name, paper in PAPER.items():
        decay = case.decay if name == "decayed" else 1.0
        for dim, theirs in paper.items():
            found = capacities(dim, decay, repeats, orthogonal=dim if name == "orthogonal first" else 0)
            mean, deviation = found.mean().item(), found.std().item()
            row = {"name": name, "dim": dim, "pairs": mean, "deviation": deviation}
            if name != "decayed" or decay == cases.PAPER_DECAY:
                error = deviation * math.sqrt(1 / PAPER_SEEDS + 1 / repeats)
                row |= {"paper": theirs, "z": (theirs - mean) / error if error else None}
            rows.append(row)
    return rows


def capacities(dim: int, decay: float, seeds: int, orthogonal: int = 0) -> Tensor:
    """Pairs that each of ``seeds`` random memories holds, ``(seeds,)``, float64.

    Args:
        dim: D.
        decay: lambda of every write.
        orthogonal: how many of the first keys are orthogonal to each other.
    """
    generator = torch.Generator().manual_seed(0)
    found: list[float] = []
    most = 8 * dim + 128  # pairs tried; no seed has come near
    while len(found) < seeds:
        k, v = (_unit(torch.randn(BATCH, 1, most, dim, generator=generator)) for _ in range(2))
        if orthogonal:
            k[:, 0, :orthogonal] = torch.linalg.qr(k[:, 0, :orthogonal].transpose(-1, -2))[0].transpose(-1, -2)
        first = k[:, :, :1].expand_as(k)
        fades = torch.full(k.shape[:3], math.log(decay))
        read, _ = write_and_read("outer", first, k, v, torch.ones(k.shape[:3]), fades, None)
        signal = decay ** torch.arange(most)
        noise = (read - signal[:, None] * v[:, :, :1]).norm(dim=-1)[:, 0]
        # the first True; the pair that drowns the value is not counted
        found += (noise > signal).double().argmax(1).tolist()
    return torch.tensor(found[:seeds], dtype=torch.float64)


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)

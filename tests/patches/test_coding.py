"""Coded vectors: their errors against what theory expects, packing bit by bit, and vectors that say nothing."""

import math

import pytest
import torch
from torch import Tensor

from patches.coding import Code, coded_bytes, decode, divide_bits, encode, fit_code, normal_levels

HEADS = 3


def vectors(dim: int, count: int = 4000, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Normal vectors ``(2, 3, count, dim)`` of some covariance, and a metric, both ``(3, dim, dim)``."""
    generator = torch.Generator().manual_seed(dim)
    root, other = (torch.randn(HEADS, dim, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    x = torch.randn(2, HEADS, count, dim, generator=generator, dtype=torch.float64) @ root.mT
    return x.to(dtype), root @ root.mT, other @ other.mT


def cost(error: Tensor, metric: Tensor) -> Tensor:
    """What errors ``(B, H, n, D)`` cost on average, of each head."""
    return torch.einsum("bhnd,hde,bhne->bhn", error.double(), metric, error.double()).mean((0, 2))


@pytest.mark.parametrize("dim", [16, 48, 64])
@pytest.mark.parametrize("bits", [1, 2.5, 3.5, 5, 8])
def test_errors_cost_no_more_than_theory_expects(bits: float, dim: int) -> None:
    x, covariance, metric = vectors(dim)
    size = coded_bytes(dim, bits)
    code, errors = fit_code(covariance, metric, 8 * size)
    codes, scale = encode(x, code, size)
    assert codes.shape == (2, HEADS, 4000, size)
    found, expected = cost(decode(codes, scale, code) - x, metric), (errors * metric).sum((-1, -2))
    assert (found < 1.02 * expected).all()  # a scale for each vector can only help
    assert (found > 0.3 * expected).all()


def test_the_metric_says_which_errors_are_small() -> None:
    x, covariance, metric = vectors(16)
    plain = torch.eye(16, dtype=torch.float64).expand_as(metric)
    errors = []
    for fitted in (metric, plain):
        code, _ = fit_code(covariance, fitted, 48)
        errors.append(decode(*encode(x, code, 6), code) - x)
    assert (cost(errors[0], metric) < 0.9 * cost(errors[1], metric)).all()
    assert (cost(errors[1], plain) < 0.9 * cost(errors[0], plain)).all()


def test_levels_are_those_of_max() -> None:
    levels, error = normal_levels(2)  # Max 1960, table I
    assert [round(level, 4) for level in levels] == [-1.5104, -0.4528, 0.4528, 1.5104]
    assert math.isclose(error, 0.1175, abs_tol=1e-4)
    for bits in range(1, 9):
        levels, error = normal_levels(bits)
        assert list(levels) == sorted(levels)
        assert len(levels) == 2**bits
        assert math.isclose(levels[0], -levels[-1], rel_tol=1e-9)


def test_codes_lie_side_by_side() -> None:
    """Bits 3, 1, 0, 8, 4 fill two bytes: read back by hand, the lowest bit first."""
    bits = torch.tensor([[3, 1, 0, 8, 4]], dtype=torch.uint8)
    eye = torch.eye(5)[None]
    code = Code(eye, eye, torch.ones(1, 5), bits)
    x = torch.tensor([[[[1.7, -0.5, 9.0, 0.2, -2.0]]]])
    codes, scale = encode(x, code, 2)
    number, found, at = int(codes[0, 0, 0, 0]) + 256 * int(codes[0, 0, 0, 1]), [], 0
    for count in bits[0].tolist():
        level = (number >> at) % 2**count
        found.append(normal_levels(count)[0][level] * scale.item() if count else 0.0)
        at += count
    torch.testing.assert_close(decode(codes, scale, code)[0, 0, 0], torch.tensor(found))
    assert abs(found[0] - 1.7) < 0.7
    assert found[2] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dead", [[1], range(15), range(16), []])
def test_what_did_not_vary_costs_the_rest_little(dead: list[int], size: float, dtype: torch.dtype) -> None:
    """A direction without variance in calibration that has some later may be lost, and nothing else is."""
    x, covariance, _ = vectors(16, 50, dtype)
    x, covariance = size * x, size**2 * covariance
    plain = torch.eye(16, dtype=torch.float64).expand_as(covariance).clone()
    covariance[:, dead], covariance[:, :, dead] = 0, 0
    code, _ = fit_code(covariance, plain, 64)
    code = Code(*(part.to(dtype) for part in code[:3]), code.bits)
    back = decode(*encode(x, code, 8), code)
    assert back.isfinite().all()
    alive = [i for i in range(16) if i not in set(dead)]
    largest = x.abs().amax(-1, keepdim=True)
    if alive:
        assert ((back - x)[..., alive].abs() <= 1.5 * largest).all()


def test_zero_stays_near_zero_and_bits_stay_within_eight() -> None:
    code, _ = fit_code(torch.zeros(1, 4, 4), torch.zeros(1, 4, 4), 32)
    code = Code(*(part.float() for part in code[:3]), code.bits)
    assert decode(*encode(torch.zeros(1, 1, 2, 4), code, 4), code).abs().max() < 1e-3
    assert divide_bits(torch.tensor([[1e9, 1e-9]]), 16).tolist() == [[8, 8]]

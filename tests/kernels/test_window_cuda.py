"""Attention as CUDA runs it, on a CPU: FlexAttention uncompiled, its refusal of gradients on a CPU taken away; the
flash kernel replaced by its definition, and the shapes that the real one is given checked on fake CUDA tensors.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patches import kernels, window_cuda
from tests.helpers import close
from tests.kernels import fake_cuda

SCALE = 0.4


def reference_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """What the flash kernel computes, tokens before heads."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale
    if causal:
        n, m = logits.shape[-2:]
        later = torch.arange(m) > torch.arange(m - n, m)[:, None]
        logits = logits.masked_fill(later, float("-inf"))
    return torch.einsum("bhnm,bmhd->bhnd", logits.softmax(-1), v), logits.logsumexp(-1)


@pytest.fixture
def form(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """The window's function as it stands in the table, FlexAttention not compiled."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flex, "_validate_device", lambda *rows: None)
    compiled = torch.compile  # which FlexAttention uses on its own account, with options
    monkeypatch.setattr(torch, "compile", lambda function, **how: compiled(function, **how) if how else function)
    window_cuda.attend.cache_clear()
    yield window_cuda.flex_window
    window_cuda.attend.cache_clear()


def rows(
    new: int, start: int, window: int, sinks: int, dtype: torch.dtype = torch.float64, dim: int = 16
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(new + start)
    shapes = [(2, 4, new, dim), *[(2, 2, window + new, dim)] * 2, *[(2, 2, sinks, dim)] * 2]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


CASES = {
    "several blocks of keys": (300, 140, 160, 4),
    "sinks that arrive meanwhile": (12, 4, 8, 6),
    "more sinks than window": (40, 3, 4, 7),
}
HOW = {"window": 8, "start": 0, "scale": SCALE, "dropout": 0.0}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("used", ["output", "both"])
def test_the_numbers_and_gradients_of_the_torch_form(form: Callable[..., Any], case: str, used: str) -> None:
    new, start, window, sinks = CASES[case]
    found = []
    for run in (form, kernels.blocked_window):
        inputs = rows(new, start, window, sinks)
        kept = run(*inputs, lse=used != "output", **{**HOW, "window": window, "start": start})
        assert (kept[1] is None) == (used == "output")
        kept = [x for x in kept if x is not None]
        total = sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in kept)
        found.append([*kept, *torch.autograd.grad(total, inputs, allow_unused=True)])
    for ours, theirs in zip(*found, strict=True):
        none = torch.zeros(()) if theirs is None else torch.zeros_like(theirs)
        close(none if ours is None else ours, none if theirs is None else theirs, 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes(form: Callable[..., Any], dtype: torch.dtype) -> None:
    with torch.no_grad():
        out, lse = form(*rows(30, 0, 8, 3, dtype), lse=True, **HOW)
        exact = kernels.blocked_window(*rows(30, 0, 8, 3), lse=True, **HOW)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    for mine, expected in zip((out, lse), exact, strict=True):
        close(mine.double(), expected, 1e-5 if dtype == torch.float32 else 0.06)


def test_what_the_flash_kernel_is_given(guard: Path) -> None:
    assert fake_cuda.run(guard, "decode") == ["bfloat16 (2, 4, 1, 64) cuda", "float32 (2, 4, 1) cuda"]


def test_decoding_with_the_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_cuda, "flash_forward", reference_flash)
    q, k, v, *_ = (x.detach() for x in rows(20, 0, 8, 2))
    for new, causal in ((1, False), (5, False), (5, True)):
        last = q[:, :, -new:], k, v
        ours = window_cuda.flash_decode(*last, scale=SCALE, dropout=0.0, lse=True, causal=causal)
        theirs = kernels.blocked_decode(*last, scale=SCALE, lse=True, causal=causal)
        for mine, expected in zip(ours, theirs, strict=True):
            assert mine.shape[:3] == (2, 4, new)
            close(mine, expected, 1e-9)
    # and causal is what it says
    alone = kernels.blocked_decode(q[:, :, -3:-2], k[:, :, :-2], v[:, :, :-2], scale=SCALE)[0]
    together = kernels.blocked_decode(q[:, :, -5:], k, v, scale=SCALE, causal=True)[0]
    close(together[:, :, 2:3], alone, 1e-9)


def test_the_table_on_a_gpu() -> None:
    """Nothing is imported by the table that fails without the package; only what differentiates serves training."""
    assert kernels.find("window_attention", "cuda", torch.bfloat16, True)[0].backend == "flex"
    assert kernels.find("window_attention", "cuda", torch.float32, True)[0].backend == "flex"
    assert kernels.find("window_attention", "cuda", torch.float64, True)[0].backend == "torch"
    assert kernels.find("decode_attention", "cuda", torch.bfloat16, False)[0].backend == "flash"
    assert kernels.find("decode_attention", "cuda", torch.bfloat16, True)[0].backend == "torch"


@pytest.mark.parametrize("dim", [60, 264])
def test_heads_the_flash_kernel_does_not_take(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_cuda, "flash_forward", None)
    q, k, v, *_ = rows(20, 0, 8, 2, torch.float32, dim)
    ours = window_cuda.flash_decode(q, k, v, scale=SCALE, dropout=0.0, lse=True, causal=False)
    theirs = kernels.blocked_decode(q, k, v, scale=SCALE, lse=True)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("dim", "dropout"), [(8, 0.0), (16, 0.5)])
def test_what_flex_attention_does_not_take(dim: int, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_cuda, "attend", None)
    found = []
    for run in (window_cuda.flex_window, kernels.blocked_window):
        torch.manual_seed(0)
        found.append(run(*rows(20, 0, 8, 2, torch.float32, dim), lse=True, **{**HOW, "dropout": dropout}))
    assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True))

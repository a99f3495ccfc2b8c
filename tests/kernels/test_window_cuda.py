"""Window attention as CUDA runs it, on a CPU: what surrounds the kernels, with a stand-in of each where it needs a GPU.

The flash kernel is replaced by its definition, a backward that drops the gradient of the log-sum-exp included;
FlexAttention runs uncompiled, its refusal of gradients on a CPU taken away. The shapes that the real flash kernel is
given are checked on fake CUDA tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patches import kernels, window_flash, window_flex
from tests.helpers import close
from tests.kernels import fake_cuda

SCALE = 0.4


def reference_forward(rows: Sequence[Tensor], window: int | None, scale: float) -> list[Tensor]:
    """What aten's flash kernel computes, tokens before heads."""
    q, k, v = rows
    out, lse = _softmax(q, k, v, _seen(q.shape[1], k.shape[1], window), scale)
    return [out, lse, q.new_zeros(2), q.new_zeros(1)]


def reference_backward(
    rows: Sequence[Tensor], lse: Tensor, window: int, scale: float, random: Sequence[Tensor]
) -> list[Tensor]:
    """What its backward computes, from the output and the log-sum-exp that it is given."""
    grad_out, q, k, v, out = rows
    groups = q.shape[2] // k.shape[2]
    k_each, v_each = (x.repeat_interleave(groups, 2) for x in (k, v))
    logits = torch.einsum("bnhd,bmhd->bhnm", q, k_each) * scale
    seen = (logits - lse.unsqueeze(-1)).exp() * _seen(q.shape[1], k.shape[1], window)
    mean = (grad_out * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    found = seen * (torch.einsum("bnhd,bmhd->bhnm", grad_out, v_each) - mean) * scale
    shared = (
        torch.einsum("bhnm,bnhd->bmhd", a, b).unflatten(2, (-1, groups)).sum(3)
        for a, b in ((found, q), (seen, grad_out))
    )
    return [torch.einsum("bhnm,bmhd->bnhd", found, k_each), *shared]


def _seen(n: int, m: int, window: int | None) -> Tensor:
    distance = torch.arange(m - n, m)[:, None] - torch.arange(m)
    return (distance >= 0) & (distance < window) if window is not None else torch.ones(n, m, dtype=torch.bool)


def _softmax(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = (torch.einsum("bnhd,bmhd->bhnm", q, k) * scale).masked_fill(~seen, float("-inf"))
    return torch.einsum("bhnm,bmhd->bnhd", logits.softmax(-1), v), logits.logsumexp(-1)


@pytest.fixture(params=["flash", "flex"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Each way in turn, as it stands in the table, its kernel replaced."""
    if request.param == "flash":
        monkeypatch.setattr(window_flash, "flash_forward", reference_forward)
        monkeypatch.setattr(window_flash, "flash_backward", reference_backward)
        yield kernels._flash_window
        return
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flex, "_validate_device", lambda *rows: None)
    compiled = torch.compile  # which FlexAttention uses on its own account, with options
    monkeypatch.setattr(torch, "compile", lambda function, **how: compiled(function, **how) if how else function)
    window_flex.attend.cache_clear()
    yield kernels._flex_window
    window_flex.attend.cache_clear()


def rows(
    new: int, start: int, window: int, sinks: int, dtype: torch.dtype = torch.float64, dim: int = 8
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(new + start)
    shapes = [(2, 4, new, dim), *[(2, 2, window + new, dim)] * 2, *[(2, 2, sinks, dim)] * 2]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


CASES = {
    "from the first token": (40, 0, 8, 3),
    "into a full window": (9, 70, 8, 3),
    "one token": (1, 70, 8, 3),
    "sinks that arrive meanwhile": (12, 4, 8, 6),
    "no sinks": (40, 0, 8, 0),
    "more sinks than window": (40, 3, 4, 7),
    "several blocks of keys": (300, 140, 160, 4),
}
BLOCKS = ("several blocks of keys", "sinks that arrive meanwhile", "more sinks than window")
HOW = {"window": 8, "start": 0, "scale": SCALE, "dropout": 0.0}


@pytest.mark.parametrize(
    ("form", "case"), [*(("flash", case) for case in CASES), *(("flex", case) for case in BLOCKS)], indirect=["form"]
)
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


def test_a_dropped_gradient_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the column the kernel's backward knows nothing of the log-sum-exp: the test above must fail then."""
    monkeypatch.setattr(window_flash, "flash_forward", reference_forward)
    monkeypatch.setattr(window_flash, "flash_backward", reference_backward)
    real = window_flash._window_grads
    monkeypatch.setattr(
        window_flash, "_window_grads", lambda window, scale, out, lse, *rest: real(window, scale, out, None, *rest)
    )
    inputs = rows(40, 0, 8, 3)
    mine, exact = (
        torch.autograd.grad(run(*inputs, lse=True, **HOW)[1].sum(), inputs)
        for run in (kernels._flash_window, kernels.blocked_window)
    )
    assert (mine[0] - exact[0]).abs().max() > 0.01


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
    """Forward and backward on fake CUDA tensors: aten's own checks of shapes, dtypes and devices."""
    found = fake_cuda.run(guard, "flash")
    out, sums = "bfloat16 (2, 64, 4, 64) cuda", "float32 (2, 4, 64) cuda"
    grads = [out, *(f"bfloat16 (2, {tokens}, 2, 64) cuda" for tokens in (64, 64, 4, 4)), None, None, None]
    assert found["lse=False"] == found["lse=True"] == [out, sums, *grads]
    assert found["decode"] == ["bfloat16 (2, 4, 1, 64) cuda", "float32 (2, 4, 1) cuda"]


def test_decoding_with_the_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_flash, "flash_forward", reference_forward)
    q, k, v, *_ = (x.detach() for x in rows(20, 0, 8, 2))
    for new, causal in ((1, False), (5, False), (5, True)):
        last = q[:, :, -new:], k, v
        ours = kernels._flash_decode(*last, scale=SCALE, dropout=0.0, lse=True, causal=causal)
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
    assert kernels.find("window_attention", "cuda", torch.bfloat16, True)[0].backend == "flash"
    assert kernels.find("window_attention", "cuda", torch.float32, True)[0].backend == "flex"
    assert kernels.find("window_attention", "cuda", torch.float64, True)[0].backend == "torch"
    assert kernels.find("decode_attention", "cuda", torch.bfloat16, False)[0].backend == "flash"
    assert kernels.find("decode_attention", "cuda", torch.bfloat16, True)[0].backend == "torch"


@pytest.mark.parametrize(
    ("dim", "lse", "fits"), [(64, True, True), (60, False, False), (256, False, True), (256, True, False)]
)
def test_heads_the_kernel_does_not_take(dim: int, lse: bool, fits: bool) -> None:
    assert window_flash.fits(dim, lse) == fits
    if not fits:  # the torch form serves, on any device
        inputs = rows(20, 0, 8, 2, torch.float32, dim)
        for mine, other in zip(
            kernels._flash_window(*inputs, lse=lse, **HOW), kernels.blocked_window(*inputs, lse=lse, **HOW), strict=True
        ):
            assert mine is other is None or torch.equal(mine, other)

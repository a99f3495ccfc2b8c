"""Window attention against one dense mask: forward and gradients, any length, window, sinks and grouping."""

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad as fill

from patches import window as module
from patches.window import decode_attention, window_attention
from tests.helpers import close

DIM = 4


def case(
    new: int, start: int, window: int, sinks: int, rows: int = 1, kv_heads: int = 1, groups: int = 2
) -> dict[str, Any]:
    """Random float64 arguments: queries of the last ``new`` tokens, keys and values of all ``start + new``."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(rows, kv_heads * groups, new, DIM, generator=g, dtype=torch.float64)
    k, v = (torch.randn(rows, kv_heads, start + new, DIM, generator=g, dtype=torch.float64) for _ in range(2))
    return {"q": q, "k": k, "v": v, "start": start, "window": window, "sinks": sinks}


def blocked(q: Tensor, k: Tensor, v: Tensor, *, start: int, window: int, sinks: int) -> Tensor:
    """The function under test, from keys of all tokens."""
    # what lies before the text may be any number, and so may sinks that are still to come
    near = (fill(x[:, :, max(start - window, 0) :], (0, 0, max(window - start, 0), 0), value=1e3) for x in (k, v))
    far = (fill(x[:, :, :sinks], (0, 0, 0, max(sinks - x.shape[2], 0)), value=1e3) for x in (k, v))
    return window_attention(q, *near, *far, window=window, start=start, scale=0.7)[0]


def dense(q: Tensor, k: Tensor, v: Tensor, *, start: int, window: int, sinks: int) -> Tensor:
    """The definition: one softmax per query over what it sees."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    t, j = torch.arange(start, k.shape[2])[:, None], torch.arange(k.shape[2])
    seen = (j <= t) & ((t - j < window) | (j < sinks))
    return (0.7 * q @ k.mT).masked_fill(~seen, float("-inf")).softmax(-1) @ v


def assert_same(arguments: dict[str, Any]) -> None:
    tensors = {name: arguments[name].clone().requires_grad_() for name in ("q", "k", "v")}
    settings = {name: x for name, x in arguments.items() if name not in tensors}
    results = []
    for form in (blocked, dense):
        out = form(**tensors, **settings)
        assert out.isfinite().all()
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results.append((out, *torch.autograd.grad((out * weights).sum(), list(tensors.values()))))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)


@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    window, sinks = data.draw(st.integers(1, 40), "window"), data.draw(st.integers(0, 50), "sinks")
    new, start = data.draw(st.integers(1, 120), "new"), data.draw(st.integers(0, 100), "start")
    shape = {"rows": data.draw(st.integers(1, 3), "rows"), "kv_heads": data.draw(st.integers(1, 2), "kv heads")}
    assert_same(case(new, start, window, sinks, **shape, groups=data.draw(st.integers(1, 3), "groups")))


@pytest.mark.parametrize(
    ("new", "start", "window", "sinks"),
    [
        (700, 0, 100, 4),  # many whole blocks and a rest
        (500, 60, 100, 4),  # pieces with a mask of their own, then whole blocks
        (300, 0, 300, 0),
        (301, 0, 300, 3),
        (260, 0, 1, 1),
        (1, 500, 100, 8),
    ],
)
@pytest.mark.parametrize("gathered", [1, 2**22])
def test_every_path_through_the_blocks(
    new: int, start: int, window: int, sinks: int, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GATHERED", gathered)  # 1: a block at a time
    assert_same(case(new, start, window, sinks, rows=2))


def test_a_full_cache_needs_no_mask() -> None:
    arguments = case(1, 60, 20, 4, rows=2, kv_heads=2, groups=3)
    kept = [*range(4), *range(41, 61)]
    rows = arguments["q"], arguments["k"][:, :, kept], arguments["v"][:, :, kept]
    ours, _ = decode_attention(*rows, scale=0.7)
    close(ours, dense(**arguments))


def test_half_precision_stays_half() -> None:
    arguments = case(200, 0, 40, 4)
    exact = dense(**arguments)
    for dtype in (torch.bfloat16, torch.float16):
        half = {name: x.to(dtype) if name in ("q", "k", "v") else x for name, x in arguments.items()}
        out = blocked(**half)
        assert out.dtype == dtype
        close(out.double(), exact, 16 * torch.finfo(dtype).eps)


def test_dropout_is_the_base_s() -> None:
    """Seen attention weights go missing at the given rate, the others grow by as much."""
    new, window = 4000, 8
    q = torch.zeros(1, 1, new, 1)
    k = torch.zeros(1, 1, window + new, 1)
    v = torch.ones(1, 1, window + new, 1)
    torch.manual_seed(0)
    sinks = k[:, :, :0]
    out, _ = window_attention(q, k, v, sinks, sinks, window=window, start=0, scale=1.0, dropout=0.25)
    out = out[0, 0, window:, 0]
    assert out.mean() == pytest.approx(1.0, abs=0.02)
    levels = (out * 0.75 * window).round()  # how many of W weights are left
    close(out, levels / (0.75 * window), 1e-5)
    assert levels.mean() == pytest.approx(0.75 * window, rel=0.02)

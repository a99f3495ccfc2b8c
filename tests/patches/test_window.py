"""Window attention against one dense mask: forward and gradients, any length, window, sinks, padding and grouping."""

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from patches import window as module
from patches.window import decode_attention, window_attention
from tests.helpers import close

DIM = 4


def case(
    new: int, start: int, window: int, sinks: int, pads: list[int], kv_heads: int, groups: int, seed: int = 0
) -> dict[str, Any]:
    """Random float64 arguments over all ``start + new`` slots of rows whose first ``pads`` slots are padding."""
    g = torch.Generator().manual_seed(seed)
    total, rows = start + new, len(pads)
    q = torch.randn(rows, kv_heads * groups, new, DIM, generator=g, dtype=torch.float64)
    k, v = (torch.randn(rows, kv_heads, total, DIM, generator=g, dtype=torch.float64) for _ in range(2))
    return {"q": q, "k": k, "v": v, "start": start, "window": window, "sinks": sinks, "pads": torch.tensor(pads)}


def blocked(q: Tensor, k: Tensor, v: Tensor, *, start: int, window: int, sinks: int, pads: Tensor) -> Tensor:
    """The function under test, from keys of all slots."""
    slots = (pads[:, None] + torch.arange(sinks)).clamp(max=k.shape[2] - 1)[:, None, :, None]
    index = slots.expand(-1, k.shape[1], -1, DIM)
    lead = max(window - start, 0)
    nothing = k.new_full((*k.shape[:2], lead, DIM), 1e3)  # what lies before the text may be any number
    near_k, near_v = (torch.cat([nothing, x[:, :, max(start - window, 0) :]], 2) for x in (k, v))
    return window_attention(
        q,
        near_k,
        near_v,
        k.gather(2, index),
        v.gather(2, index),
        window=window,
        start=start,
        scale=0.7,
        pad=pads if pads.any() else None,
        max_pad=int(pads.max()),
    )


def dense(q: Tensor, k: Tensor, v: Tensor, *, start: int, window: int, sinks: int, pads: Tensor) -> Tensor:
    """The definition: one softmax per query over what it sees."""
    new, total = q.shape[2], k.shape[2]
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    t, j = torch.arange(start, total)[:, None], torch.arange(total)
    real = j >= pads[:, None]  # (B, total)
    sink = real & (j < pads[:, None] + sinks)
    seen = (j <= t) & ((t - j < window)[None] | sink[:, None]) & real[:, None] | (j == t)
    logits = 0.7 * q @ k.transpose(-1, -2)
    out = logits.masked_fill(~seen[:, None], float("-inf")).softmax(-1) @ v
    return out.transpose(1, 2).reshape(len(pads), new, -1, DIM)


def assert_same(arguments: dict[str, Any]) -> None:
    tensors = {name: arguments[name].clone().requires_grad_() for name in ("q", "k", "v")}
    settings = {name: x for name, x in arguments.items() if name not in tensors}
    real = torch.arange(arguments["start"], arguments["k"].shape[2]) >= arguments["pads"][:, None]
    results = []
    for form in (blocked, dense):
        out = form(**tensors, **settings)
        assert out.isfinite().all()
        out = out[real]  # what padding reads is nobody's business
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results.append((out, *torch.autograd.grad((out * weights).sum(), list(tensors.values()))))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)


@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    window, sinks = data.draw(st.integers(1, 40), "window"), data.draw(st.integers(0, 50), "sinks")
    new, start = data.draw(st.integers(1, 120), "new"), data.draw(st.integers(0, 100), "start")
    pads = data.draw(st.lists(st.integers(0, start + new), min_size=1, max_size=3), "pads")
    kv_heads, groups = data.draw(st.integers(1, 2), "kv heads"), data.draw(st.integers(1, 3), "groups")
    assert_same(case(new, start, window, sinks, pads, kv_heads, groups))


@pytest.mark.parametrize(
    ("new", "start", "window", "sinks", "pads"),
    [
        (700, 0, 100, 4, [0]),  # many whole blocks and a rest
        (500, 60, 100, 4, [0, 90]),  # pieces with a mask of their own, then whole blocks
        (300, 0, 300, 0, [0]),
        (301, 0, 300, 3, [0]),
        (260, 0, 1, 1, [0]),
        (1, 500, 100, 8, [0, 450]),
    ],
)
@pytest.mark.parametrize("gathered", [1, 2**22])
def test_every_path_through_the_blocks(
    new: int, start: int, window: int, sinks: int, pads: list[int], gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GATHERED", gathered)  # 1: a block at a time
    assert_same(case(new, start, window, sinks, pads, kv_heads=1, groups=2))


def test_a_full_cache_needs_no_mask() -> None:
    arguments = case(1, 60, 20, 4, [0, 0], kv_heads=2, groups=3)
    kept = [*range(4), *range(41, 61)]
    rows = arguments["q"], arguments["k"][:, :, kept], arguments["v"][:, :, kept]
    ours, _ = decode_attention(*rows, scale=0.7)
    close(ours, dense(**arguments))


def test_half_precision_stays_half() -> None:
    arguments = case(200, 0, 40, 4, [0], kv_heads=1, groups=2)
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
    out = window_attention(q, k, v, sinks, sinks, window=window, start=0, scale=1.0, dropout=0.25)[0, window:, 0, 0]
    assert out.mean() == pytest.approx(1.0, abs=0.02)
    levels = (out * 0.75 * window).round()  # how many of W weights are left
    close(out, levels / (0.75 * window), 1e-5)
    assert levels.mean() == pytest.approx(0.75 * window, rel=0.02)

"""Window attention with its log-sum-exp: every form against the dense softmax, values and gradients of both outputs."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from patches import window as lse_file
from patches import window as window_file
from patches.window import (
    attention_lse,
    decode_attention,
    naive_attention_lse,
    recomputed_attention_lse,
    window_attention,
)

B, H, KV, T, D, SCALE = 2, 4, 2, 90, 8, 0.3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(params=["kernel", "recomputed"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The CPU's kernel, and the form for other devices, run here with a few queries at a time."""
    if request.param == "recomputed":
        monkeypatch.setattr(window_file, "attention_lse", recomputed_attention_lse)
        monkeypatch.setattr(lse_file, "SCORES", 2**11)
    return request.param


def heads(dtype: torch.dtype = torch.float64, length: int = T) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, count, length, D) for count in (H, KV, KV)]
    return [(2 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes]


def blocked(q, k, v, window, sinks, lse=True):  # type: ignore[no-untyped-def]
    """The window's attention over a whole sequence at once."""
    near = (pad(x, (0, 0, window, 0)) for x in (k, v))
    how = {"window": window, "start": 0, "scale": SCALE, "lse": lse}
    return window_attention(q, *near, k[:, :, :sinks], v[:, :, :sinks], **how)


def dense(q, k, v, window, sinks):  # type: ignore[no-untyped-def]
    """The same by one T x T softmax in float64."""
    k, v = (x.double().repeat_interleave(H // KV, 1) for x in (k, v))
    t, j = torch.arange(T)[:, None], torch.arange(T)
    seen = (j <= t) & ((t - j < window) | (j < sinks))
    logits = (q.double() @ k.mT * SCALE).masked_fill(~seen, float("-inf"))
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 3), (7, 2), (32, 4), (88, 1)])
def test_it_is_the_dense_softmax(form: str, window: int, sinks: int) -> None:
    rows = heads()
    ours, theirs = blocked(*rows, window, sinks), dense(*rows, window, sinks)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-12, rtol=0)
    weights = [torch.randn(x.shape, dtype=x.dtype) for x in theirs]
    for mine, reference in zip(
        torch.autograd.grad(ours, rows, weights), torch.autograd.grad(theirs, rows, weights), strict=True
    ):
        torch.testing.assert_close(mine, reference, atol=1e-11, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(form: str, dtype: torch.dtype) -> None:
    q, k, v = heads(dtype)
    out, lse = blocked(q, k, v, 16, 2)
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    for mine, reference in zip((out, lse), dense(q, k, v, 16, 2), strict=True):
        torch.testing.assert_close(mine.double(), reference, atol=TOLERANCE[dtype], rtol=0)
    grads = torch.autograd.grad(lse.sum(), (q, k))
    for mine, reference in zip(grads, torch.autograd.grad(dense(q, k, v, 16, 2)[1].sum(), (q, k)), strict=True):
        torch.testing.assert_close(mine.double(), reference.double(), atol=TOLERANCE[dtype], rtol=0.02)


@pytest.mark.parametrize("form", [attention_lse, recomputed_attention_lse, naive_attention_lse])
@pytest.mark.parametrize("masked", [True, False])
def test_gradients_of_every_form(form, masked: bool) -> None:  # type: ignore[no-untyped-def]
    q, k, v = (torch.randn(2, *shape, 3, dtype=torch.float64, requires_grad=True) for shape in ((2, 4), (6,), (6,)))
    mask = (torch.arange(6) <= torch.arange(4)[:, None] + 1)[None, None] if masked else None
    assert torch.autograd.gradcheck(lambda *rows: form(*rows, mask, 0.7), (q, k, v))
    # one of the two may not be used: the other's gradient is then None or zero
    assert torch.autograd.gradcheck(lambda *rows: form(*rows, mask, 0.7)[1], (q, k, v))
    assert torch.autograd.gradcheck(lambda *rows: form(*rows, mask, 0.7)[0], (q, k, v))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_on_a_cpu_the_output_is_bit_for_bit_that_without(dtype: torch.dtype) -> None:
    q, k, v = heads(dtype)
    plain, none = blocked(q, k, v, 16, 3, lse=False)
    assert none is None
    assert torch.equal(blocked(q, k, v, 16, 3)[0], plain)
    rows = q[:, :, -1:], k, v
    out, lse = decode_attention(*rows, scale=SCALE, lse=True)
    assert torch.equal(out, decode_attention(*rows, scale=SCALE)[0])
    assert lse.shape == (B, H, 1)


def test_a_mask_for_all_queries_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lse_file, "SCORES", 1)  # a query at a time
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 8)
    mask = torch.arange(7) < torch.tensor([4, 7])[:, None, None, None]
    for found, expected in zip(
        recomputed_attention_lse(q, k, v, mask, 0.3), naive_attention_lse(q, k, v, mask, 0.3), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_dropout_leaves_the_normaliser_alone() -> None:
    q, k, v = heads()
    rows = q[:, :, -1:], k, v.new_ones(v.shape)
    kept, dropped = (decode_attention(*rows, scale=SCALE, dropout=p, lse=True) for p in (0.0, 0.5))
    torch.testing.assert_close(kept[1], dropped[1], atol=1e-12, rtol=0)
    assert not torch.allclose(kept[0], dropped[0])


def test_keys_that_do_not_lie_in_one_piece() -> None:
    q, k, v = (torch.randn(3, *shape, dtype=torch.float64) for shape in ((2, 5, 8), (7, 8), (7, 8)))
    expected = attention_lse(q, k, v, None, 0.3)
    apart = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v))
    for ours, theirs in zip(attention_lse(*apart, None, 0.3), expected, strict=True):
        torch.testing.assert_close(ours, theirs)

"""Joint rows: the equations of its two halves put together, what it is without one of them, its bytes and options."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import retrofit
from patches.errors import RetrofitError
from patches.rotary import rotate
from tests.helpers import S, W, awake, awaken, logits, state_bytes, tokens
from tests.patches.steps import make_step
from tests.patches.test_joint import SCALE, B, T, written_out

MakeBase = Callable[..., PreTrainedModel]
R = 5


def test_it_is_the_equations(make_base: MakeBase) -> None:
    model = awake(make_base("Qwen2").double(), "joint-rows", rows=R, latest=0)
    memory = model.model.layers[0].self_attn.memory
    generator = torch.Generator().manual_seed(1)
    shapes = [(B, T, 64), *((B, heads, T, 16) for heads in (4, 2, 2))]
    x, q, k, v = (torch.randn(shape, generator=generator).double() for shape in shapes)

    def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
        return model.model.rotary_emb(x.new_empty(0), positions.expand(1, -1))

    cos, sin = rotary(torch.arange(T)[None])
    step = make_step(memory, rotate(q, cos, sin), rotate(k, cos, sin), v, turns=rotary, x=x, scale=SCALE)
    ranks = memory.rank(memory.score(k, v, step), torch.arange(T), torch.tensor(R))

    def rows(b: int, kv: int, t: int) -> list[int]:
        return sorted(range(S, t - W + 1), key=lambda j: int(ranks[b, kv, j]))[-R:]

    assert any(rows(0, 0, t) != list(range(t - W - R + 1, t - W + 1)) for t in range(20, T))
    ours, _ = memory(step)
    torch.testing.assert_close(ours, written_out(memory, x, q, k, v, rotary, rows), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_closed_it_is_expected(make_base: MakeBase, bits: int) -> None:
    base, ids = make_base("Qwen3"), tokens(2, 60)
    model = awaken(retrofit.patch(base, "joint-rows", W, S, rows=R, bits=bits))
    opened = logits(model, ids)
    alone = retrofit.patch(base, "expected", W, S, rows=R, bits=bits)
    for memory, other in zip(model.model.memories().values(), alone.model.memories().values(), strict=True):
        torch.nn.init.zeros_(memory.opening)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                parameter.copy_(memory.get_parameter(name))
    assert torch.equal(logits(model, ids), logits(alone, ids))
    assert not torch.allclose(opened, logits(model, ids), atol=1e-3)


def test_calibration_is_that_of_expected(make_base: MakeBase) -> None:
    base, texts = make_base("Qwen2"), [tokens(1, 60, seed) for seed in range(3)]
    model, alone = (retrofit.patch(base, kind, W, S, rows=R, bits=8) for kind in ("joint-rows", "expected"))
    for one in (model, alone):
        retrofit.calibrate(one, texts)
    for memory, other in zip(model.model.memories().values(), alone.model.memories().values(), strict=True):
        for name, parameter in other.named_parameters():
            assert torch.equal(parameter, memory.get_parameter(name)), name
            assert not memory.get_parameter(name).requires_grad


@pytest.mark.parametrize(("options", "bytes_"), [({}, 2 * (408 + 4 * 134)), ({"rows": 3, "features": 2}, 2 * 674)])
def test_bytes(make_base: MakeBase, options: dict[str, Any], bytes_: int) -> None:
    """Of a key head: two branches of F x (D + 1) numbers, entries of 2 D numbers, an index, a score; within 4 D^2."""
    assert state_bytes(retrofit.patch(make_base("Qwen2"), "joint-rows", W, S, **options)) == bytes_


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bits": 9}, "bits=9"),
        ({"branches": "delta"}, "one of both, linear"),
        ({"row": 5}, "did you mean 'rows'"),
    ],
)
def test_options_out_of_range(make_base: MakeBase, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RetrofitError, match=says):
        retrofit.patch(make_base("Qwen2"), "joint-rows", W, S, **options)

"""Rows by need: what a head would lose is what it loses, the rows go where they are missed, and they are saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import retrofit
from patches.errors import RetrofitError
from retrofit.calibration import calibrate, measure, weigh_layers
from retrofit.needs import GRID, Needs, divide
from tests.conftest import tiny_base
from tests.helpers import logits, tokens

WINDOW, SINKS, LENGTH = 8, 2, 66  # 56 tokens leave the window: every share of GRID is another number of rows


def by_need(base: Any, rows: int = 9, **options: Any) -> Any:
    model = retrofit.patch(base, "expected", WINDOW, SINKS, rows=rows, shares="need", **options).eval()
    calibrate(model, [tokens(1, LENGTH, seed=3)])
    return model


def losses_of(model: Any, texts: list[Tensor]) -> Tensor:
    """What the heads of the first layer lose."""
    needs = Needs(model, weigh_layers(model), texts)
    measure([needs], texts)
    return needs.losses[0]


def of_each(model: Any) -> list[tuple[int, ...]]:
    return [memory.rows for memory in model.model.memories().values()]


def test_the_rows_are_divided_and_none_is_lost(family: str) -> None:
    base = tiny_base(family)
    model = by_need(base)
    rows = of_each(model)
    assert sum(map(sum, rows)) == 9 * sum(map(len, rows))
    assert len(set(rows)) > 1
    assert retrofit.kept_bytes(model) == retrofit.kept_bytes(
        retrofit.patch(tiny_base(family), "expected", 8, 2, rows=9)
    )


def blind(base: Any, key_head: int) -> Any:
    """A base whose first layer ignores one key/value head."""
    with torch.no_grad():
        group = base.config.num_attention_heads // base.config.num_key_value_heads
        size = base.model.layers[0].self_attn.head_dim
        base.model.layers[0].self_attn.o_proj.weight[:, key_head * group * size : (key_head + 1) * group * size] = 0
    return base


def test_a_head_that_nobody_reads_gets_no_rows() -> None:
    assert of_each(by_need(blind(tiny_base("Llama"), 1)))[0][1] == 0


def test_what_is_measured_is_what_a_layer_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    base, ids = tiny_base("Qwen2"), tokens(1, LENGTH, seed=3)
    found: dict[int, Tensor] = {}
    monkeypatch.setattr("retrofit.needs.QUERIES", LENGTH)
    monkeypatch.setattr("retrofit.needs.Needs.give", lambda needs: found.update(needs.losses))
    model = retrofit.patch(base, "expected", WINDOW, SINKS, rows=9, shares="need", layers=[0]).eval()
    calibrate(model, [ids], repeat=False)
    number = round(GRID[4] * (LENGTH - WINDOW - SINKS))
    whole = outputs(base, model, ids, off=True)
    for head in range(2):  # the other head loses nothing
        rows = [LENGTH, LENGTH]
        rows[head] = number
        model.model.memories()[0].options = type(model.model.memories()[0].options)(rows=rows)
        lost = (outputs(base, model, ids, off=False) - whole)[WINDOW + SINKS :].norm(dim=-1)
        lengths = base.model.embed_tokens(ids)[0, WINDOW + SINKS :].norm(dim=-1)
        torch.testing.assert_close(found[0][head, 4], (lost / lengths).square().mean(), rtol=1e-4, atol=1e-9)


def outputs(base: Any, model: Any, ids: Tensor, *, off: bool) -> Tensor:
    """What the first layer's attention adds to the residual stream ``(T, E)``."""
    seen = []
    hook = model.model.layers[0].self_attn.register_forward_hook(lambda *given: seen.append(given[-1][0][0]))
    with torch.no_grad():
        if off:
            with model.memory_off():
                model(ids)
        else:
            model(ids)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("bits", [16, 5])
def test_shares_are_saved_with_the_adapter_and_calls_may_be_cut(bits: int, tmp_path: Any) -> None:
    base, ids = tiny_base("Qwen3"), tokens(2, 60)
    model = by_need(base, bits=bits, latest=0.8)  # heads with room for the latest tokens, and heads without
    whole = logits(model, ids)
    retrofit.save_adapter(model, tmp_path / "adapter")
    again = retrofit.load_adapter(base, tmp_path / "adapter")
    assert of_each(again) == of_each(model)
    assert torch.equal(logits(again, ids), whole)
    for cuts in ([30, 30], [13, 1, 1, 45], [1] * 60):
        cache, pieces = None, []
        for piece in ids.split(cuts, 1):
            with torch.no_grad():
                out = again(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits)
        torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=2e-5, rtol=0)
        held = sum(x.numel() * x.element_size() for layer in cache.layers for x in layer.state.values())
        assert held == 2 * sum(memory.state_bytes(torch.float32) for memory in again.model.memories().values())


def test_calibrating_again_changes_nothing() -> None:
    model = by_need(tiny_base("Llama"))
    rows = of_each(model)
    calibrate(model, [tokens(1, LENGTH, seed=3)])
    assert of_each(model) == rows


def test_a_curve_that_is_steep_later_is_reached_for_its_end() -> None:
    flat_then_steep = ([0, 4, 8], [8.0, 7.9, 0.0])
    assert divide([flat_then_steep, ([0, 8], [7.0, 0.0])], 8) == [8, 0]
    assert divide([flat_then_steep, ([0, 8], [7.0, 0.0])], 20) == [10, 10]  # two more than either lacks
    assert divide([([0, 8], [1.0, 2.0]), ([0, 8], [1.0, 1.0])], 3) == [2, 1]  # nobody gains


def test_refusals() -> None:
    base = tiny_base("Llama")
    with pytest.raises(RetrofitError, match="too short"):
        calibrate(retrofit.patch(base, "expected", WINDOW, SINKS, shares="need"), [tokens(1, 9)])
    with pytest.raises(RetrofitError, match="2 key/value heads"):
        retrofit.patch(base, "expected", WINDOW, SINKS, rows=[1, 2, 3])
    with pytest.raises(RetrofitError, match="shares"):
        retrofit.patch(base, "expected", WINDOW, SINKS, shares="most")
    with pytest.raises(RetrofitError, match="resumed"):
        retrofit.patch(base, "joint-rows", WINDOW, SINKS, shares="need")


def test_shares_of_one_layer_are_refused() -> None:
    model = retrofit.patch(tiny_base("Qwen2"), "expected", WINDOW, SINKS, rows=9, by_layer={"0": {"shares": "need"}})
    with pytest.raises(RetrofitError, match="not in by_layer"):
        calibrate(model, [tokens(1, LENGTH, seed=3)])


def test_beside_a_lora_needs_are_those_of_the_merged_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, ids = tiny_base("Llama"), [tokens(1, LENGTH, seed=3)]
    before = losses_of(by_need(base, bits=4), ids)
    model = retrofit.patch(base, "expected", WINDOW, SINKS, rows=9, bits=4, shares="need").eval()
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora)
    calibrate(adapted, ids)
    rows, whole, lost = of_each(model), logits(adapted, ids[0]), losses_of(adapted, ids)
    assert not torch.allclose(lost, before, rtol=0.1)
    retrofit.save_adapter(model, tmp_path / "adapter")
    adapted.save_pretrained(tmp_path / "lora")
    merged = adapted.merge_and_unload()
    calibrate(merged, ids)
    assert of_each(merged) == rows
    torch.testing.assert_close(losses_of(merged, ids), lost, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(logits(merged, ids[0]), whole, atol=2e-4, rtol=0)
    again = peft.PeftModel.from_pretrained(
        retrofit.load_adapter(tiny_base("Llama"), tmp_path / "adapter"), tmp_path / "lora"
    )
    assert torch.equal(logits(again.eval(), ids[0]), whole)


@pytest.mark.parametrize("length", [12, 20])
def test_texts_of_few_tokens(length: int) -> None:
    """Shares of what leaves the window are then the same number of rows, some of them none."""
    model = retrofit.patch(tiny_base("Llama"), "expected", 2, 1, rows=5, shares="need").eval()
    calibrate(model, [tokens(1, length, seed=3)])
    assert sum(map(sum, of_each(model))) == 20

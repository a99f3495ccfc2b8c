"""Invariant 2: with the memory off a retrofitted model is its base at any length, bit for bit. That is the teacher."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from patches.errors import RetrofitError
from tests.helpers import VARIANTS, awake, feed, left_mask, logits, tokens

MakeBase = Callable[..., PreTrainedModel]


def test_off_it_is_the_base(base: PreTrainedModel, model: Any) -> None:
    ids, mask = tokens(2, 40), left_mask([40, 23], 40)
    with model.memory_off():
        assert torch.equal(logits(model, ids), logits(base, ids))
        ours, _ = feed(model, ids, [20, 1, 1, 18], mask, DynamicCache())
    assert torch.equal(ours, feed(base, ids, [20, 1, 1, 18], mask, DynamicCache())[0])
    assert not torch.equal(logits(model, ids), logits(base, ids))


@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_the_attention_is_like(variant: str, kind: str, make_base: MakeBase) -> None:
    family, settings = VARIANTS[variant]
    base = make_base(family, attn_implementation="eager", **settings)
    model = awake(base, kind)
    with model.memory_off():
        assert torch.equal(logits(model, tokens(2, 30)), logits(base, tokens(2, 30)))


@pytest.mark.parametrize("others", ["full", "window"])
def test_in_half_precision_and_on_some_layers(
    kind: str, half: tuple[PreTrainedModel, torch.dtype, bool], others: str
) -> None:
    base, dtype, mixed = half
    base = base if mixed else base.to(dtype)
    model = awake(base, kind, layers=[1], others=others)
    ids, mask = tokens(2, 30), left_mask([30, 13], 30)
    with model.memory_off(), torch.autocast("cpu", dtype, enabled=mixed):
        assert torch.equal(logits(model, ids), logits(base, ids))
        ours, _ = feed(model, ids, [20, 1, 9], mask, DynamicCache())
        assert torch.equal(ours, feed(base, ids, [20, 1, 9], mask, DynamicCache())[0])


def test_in_float64(partner: PreTrainedModel, kind: str) -> None:
    base = partner.double()
    model = awake(base, kind)
    with model.memory_off():
        assert torch.equal(logits(model, tokens(2, 30)), logits(base, tokens(2, 30)))


def test_off_it_generates_as_the_base(partner: PreTrainedModel, one_model: Any) -> None:
    wanted = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with one_model.memory_off():
        assert torch.equal(one_model.generate(tokens(2, 15), **wanted), partner.generate(tokens(2, 15), **wanted))


def test_on_again_after_an_error(one_model: Any) -> None:
    ids = tokens(1, 30)
    before = logits(one_model, ids)
    with pytest.raises(ZeroDivisionError), one_model.memory_off():
        _ = 1 / 0
    with one_model.memory_off(), one_model.memory_off():
        pass
    assert torch.equal(logits(one_model, ids), before)


def test_a_cache_belongs_to_one_side(one_model: Any) -> None:
    ids = tokens(1, 6)
    for length in (6, 30):
        _, cache = feed(one_model, tokens(1, length), [length])
        with pytest.raises(RetrofitError, match="new cache"), one_model.memory_off():
            one_model(ids, past_key_values=cache)
    with one_model.memory_off():
        _, cache = feed(one_model, ids, [6], cache=DynamicCache())
    with pytest.raises(RetrofitError, match="new cache"):
        one_model(ids, past_key_values=cache)

"""Invariant 1: up to S + W tokens a retrofitted model is its base, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tests.helpers import VARIANTS, W, awake, capacity, close, feed, left_mask, logits, tokens

MakeBase = Callable[..., PreTrainedModel]


def assert_is_the_base(model: Any, base: PreTrainedModel) -> None:
    """Same bits at the capacity and below, with and without a cache."""
    for length in (1, W, capacity(model)):
        ids = tokens(2, length)
        assert torch.equal(logits(model, ids), logits(base, ids))
    for sizes in ([length], [1] * length, [3, 1, length - 4]):
        assert torch.equal(feed(model, ids, sizes)[0], feed(base, ids, sizes)[0])


def test_up_to_the_capacity_it_is_the_base(base: PreTrainedModel, model: Any) -> None:
    assert_is_the_base(model, base)


@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_the_attention_is_like(variant: str, kind: str, make_base: MakeBase) -> None:
    family, settings = VARIANTS[variant]
    base = make_base(family, attn_implementation="eager", **settings)
    assert_is_the_base(awake(base, kind), base)


def test_left_padding_does_not_count(partner: PreTrainedModel, one_model: Any) -> None:
    longest = capacity(one_model)
    mask = left_mask([longest, 4, 1], longest + 5)  # longer than the capacity, but every row fits
    ids = tokens(3, longest + 5)
    assert torch.equal(logits(one_model, ids, mask), logits(partner, ids, mask))
    sizes = [6, 1, 3, longest - 5]
    assert torch.equal(feed(one_model, ids, sizes, mask)[0], feed(partner, ids, sizes, mask, DynamicCache())[0])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hidden_states_and_attentions_are_the_base_s(kind: str, attention: str, make_base: MakeBase) -> None:
    base = make_base("Qwen2", attn_implementation=attention)
    model = awake(base, kind)
    wanted = {"output_hidden_states": True, "output_attentions": attention == "eager", "use_cache": False}
    with torch.no_grad():
        ours, theirs = model(tokens(2, 9), **wanted), base(tokens(2, 9), **wanted)
    assert len(ours.hidden_states) == 3
    assert all(map(torch.equal, ours.hidden_states, theirs.hidden_states))
    if attention == "eager":
        assert len(ours.attentions) == 2
        assert all(map(torch.equal, ours.attentions, theirs.attentions))


def test_in_half_precision(kind: str, half: tuple[PreTrainedModel, torch.dtype, bool]) -> None:
    base, dtype, mixed = half
    base = base if mixed else base.to(dtype)
    model = awake(base, kind)
    longest = capacity(model)
    ids, mask = tokens(2, longest + 3), left_mask([longest, 4], longest + 3)
    with torch.autocast("cpu", dtype, enabled=mixed):
        assert logits(model, ids[:, :longest]).dtype == dtype
        assert torch.equal(logits(model, ids[:, :longest]), logits(base, ids[:, :longest]))
        assert torch.equal(logits(model, ids, mask), logits(base, ids, mask))
        sizes = [4, 1, longest - 2]
        assert torch.equal(feed(model, ids, sizes, mask)[0], feed(base, ids, sizes, mask, DynamicCache())[0])


def test_in_float64(partner: PreTrainedModel, kind: str) -> None:
    base = partner.double()
    assert_is_the_base(awake(base, kind), base)


def test_sinks_and_window_together_decide(partner: PreTrainedModel, kind: str) -> None:
    ids = tokens(1, 14)
    for window, sinks in ((12, 2), (2, 12), (14, 0)):
        assert torch.equal(logits(awake(partner, kind, window, sinks), ids), logits(partner, ids))


def test_some_tokens_more_and_it_forgets(base: PreTrainedModel, model: Any) -> None:
    full = capacity(model)
    ids = tokens(2, full + 20)  # more than the rows that some kinds fill before they lose anything
    ours, theirs = logits(model, ids), logits(base, ids)
    close(ours[:, :full], theirs[:, :full])
    assert (ours[:, -1] - theirs[:, -1]).abs().max() > 1e-3

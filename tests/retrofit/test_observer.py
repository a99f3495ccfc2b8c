"""Layers at work: what is seen of a call, that it can be repeated with the memory on, and that nothing stays behind."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from retrofit.observer import LayerCall, watch_layers
from tests.helpers import S, W, awake, close, left_mask, tokens

IDS = tokens(2, 3 * W)


def watched(model: Any, layers: list[int], **how: Any) -> list[LayerCall]:
    """The calls of these layers while the model reads ``IDS``."""
    calls: list[LayerCall] = []
    with torch.no_grad(), watch_layers(model.model, layers, calls.append):
        model(IDS, use_cache=False, **how)
    return calls


@torch.no_grad()
def test_a_call_is_seen_with_all_that_went_in_and_came_out(base: PreTrainedModel) -> None:
    model = awake(base.double(), "ahn-gdn")
    layers = list(model.model.memories())
    with model.memory_off():
        assert [call.index for call in watched(model, [1])] == [1]
        calls = watched(model, layers)
        hidden = model(IDS, output_hidden_states=True, use_cache=False).hidden_states
    assert [call.index for call in calls] == layers
    for call in calls:
        layer = model.model.layers[call.index]
        assert call.attention is layer.self_attn
        assert torch.equal(call.residual, hidden[call.index])
        assert torch.equal(call.x, layer.input_layernorm(call.residual))
        assert torch.equal(call.output, layer.self_attn.o_proj(call.heads))
        step = call.step(model.model)
        q, k, v = layer.self_attn.plain_heads(call.x)
        assert all(torch.equal(a, b) for a, b in ((step.q, q), (step.k, k), (step.v, v), (step.x, call.x)))
        assert (step.now.seen, step.now.new, step.layer.window, step.layer.sinks) == (0, 3 * W, W, S)


@pytest.mark.parametrize("lengths", [(3 * W, 3 * W), (3 * W, W)])
@pytest.mark.parametrize("kind", ["ahn-gdn", "kvm", "h2o"])
@torch.no_grad()
def test_a_call_of_the_teacher_is_repeated_with_the_memory_on(
    kind: str, lengths: tuple[int, ...], base: PreTrainedModel
) -> None:
    """The first memory gives what it does in the model itself, where it has the same input."""
    model, mask = awake(base.double(), kind), left_mask(lengths, 3 * W)
    first, *_ = model.model.memories()
    repeated: list[Any] = []

    def look(call: LayerCall) -> None:
        repeated.append(call.repeat(call.attention, model.model.plan(IDS, mask)))

    with model.memory_off(), watch_layers(model.model, [first], look):
        model(IDS, attention_mask=mask, use_cache=False)
    (own,) = watched(model, [first], attention_mask=mask)
    assert len(repeated) == 1, "a repeated call is not seen again"
    close(repeated[0][mask.bool()], own.output[mask.bool()])


def test_no_hook_stays_behind(make_base: Any) -> None:
    model = awake(make_base("Qwen2"), "none")

    def fails(call: LayerCall) -> None:
        raise ValueError

    with pytest.raises(ValueError), watch_layers(model.model, [0, 1], fails):  # noqa: PT011
        model(IDS)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

"""Invariant 6, what does not work: refused in one sentence, before anything wrong is computed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import retrofit
from patches.errors import RetrofitError
from tests.helpers import S, W, awake, close, feed, left_mask, logits, tokens

MakeBase = Callable[..., PreTrainedModel]


@pytest.fixture
def model(make_base: MakeBase) -> Any:
    """One kind and family: what is refused here is refused in code that all of them share."""
    return awake(make_base("Qwen2"), "ahn-gdn")


def test_assisted_decoding(model: Any, make_base: MakeBase) -> None:
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(tokens(1, 5), assistant_model=make_base("Qwen2"), max_new_tokens=4)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(tokens(1, 5), prompt_lookup_num_tokens=2, max_new_tokens=4)


def test_being_the_assistant(model: Any, make_base: MakeBase) -> None:
    """Before the first token, however short the text."""
    main, given = make_base("Qwen2", seed=1), []
    main.register_forward_hook(lambda *_: given.append(1))
    with pytest.raises(RetrofitError, match="give the base as assistant_model"):
        main.generate(tokens(1, 5), assistant_model=model, max_new_tokens=4, do_sample=False)
    assert not given
    how = {"max_new_tokens": 8, "do_sample": False}
    with model.memory_off():
        assisted = main.generate(tokens(1, 20), assistant_model=model, **how)
    assert torch.equal(assisted, main.generate(tokens(1, 20), **how))


@pytest.mark.parametrize("name", ["generate_batch", "init_continuous_batching", "continuous_batching_context_manager"])
def test_continuous_batching(model: Any, name: str) -> None:
    assert not hasattr(model, name)  # transformers serve asks so, and then generates one by one
    with pytest.raises(RetrofitError, match=r"use generate\(\)"):
        getattr(model, name)([[3, 4, 5]])
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = model.nonsense


@pytest.mark.parametrize("implementation", ["static", "offloaded_static", "quantized"])
def test_other_caches_by_name(model: Any, implementation: str) -> None:
    with pytest.raises(RetrofitError, match="leave it unset"):
        model.generate(tokens(1, 5), cache_implementation=implementation, max_new_tokens=2)
    model.generation_config.cache_implementation = implementation
    with pytest.raises(RetrofitError, match="leave it unset"):
        model.generate(tokens(1, 5), max_new_tokens=2)


def test_a_static_cache(model: Any) -> None:
    for length in (5, 30):
        with pytest.raises(RetrofitError, match="DynamicCache"):
            model(tokens(1, length), past_key_values=StaticCache(config=model.config, max_cache_len=64))


@pytest.mark.parametrize(
    "positions",
    [
        [*range(15), *range(15)],
        [0, 0, *range(1, 29)],  # a sequence of one token in front
        [*range(10), *range(40, 60)],
    ],
)
def test_packed_sequences(model: Any, positions: list[int]) -> None:
    where = torch.tensor([positions])
    for mask in (None, torch.ones(1, 30)):
        with pytest.raises(RetrofitError, match="packed"):
            model(tokens(1, 30), position_ids=where, attention_mask=mask)


def test_positions_that_jump_from_call_to_call(model: Any) -> None:
    for length in (5, 20):
        _, cache = feed(model, tokens(1, length), [length])
        for where in (None, torch.full((1, 1), length)):
            model(tokens(1, 1), position_ids=where, past_key_values=copy.deepcopy(cache))
        with pytest.raises(RetrofitError, match="go up by one"):
            model(tokens(1, 1), position_ids=torch.full((1, 1), length + 1), past_key_values=cache)
        _, cache = feed(model, tokens(1, length), [length], where=torch.arange(7, 7 + length)[None])
        with pytest.raises(RetrofitError, match="position_ids of its own"):
            model(tokens(1, 1), past_key_values=cache)


def test_packed_sequences_for_flash_attention(model: Any) -> None:
    with pytest.raises(RetrofitError, match="packed"):
        model(tokens(1, 30), cu_seq_lens_q=torch.tensor([0, 15, 30], dtype=torch.int32))


def test_ordinary_positions_are_not_packed(model: Any) -> None:
    ids = tokens(2, 30)
    moved = torch.arange(7, 37).expand(2, -1)
    close(logits(model, ids, where=moved), logits(model, ids), 1e-4)


def test_continuing_a_right_padded_cache(model: Any) -> None:
    for length in (6, 20):  # nothing evicted yet, and something evicted
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, -3:] = 0
        _, cache = feed(model, tokens(2, length), [length], mask)
        longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        with pytest.raises(RetrofitError, match=r"hole.*pad on the left"):
            model(tokens(2, 1), attention_mask=longer, past_key_values=cache)
    with pytest.raises(RetrofitError, match=r"hole.*pad on the left"):
        model.generate(tokens(2, 20), attention_mask=mask, max_new_tokens=3)


def test_a_hole_in_the_mask(model: Any) -> None:
    mask = torch.ones(1, 30, dtype=torch.long)
    mask[0, 12] = 0
    with pytest.raises(RetrofitError, match="hole"):
        model(tokens(1, 30), attention_mask=mask)


def test_a_mask_of_another_length(model: Any) -> None:
    _, cache = feed(model, tokens(1, 20), [20])
    with pytest.raises(RetrofitError, match="cover all tokens seen so far"):
        model(tokens(1, 2), attention_mask=torch.ones(1, 2), past_key_values=cache)


def test_a_mask_that_says_who_sees_whom(model: Any) -> None:
    with pytest.raises(RetrofitError, match="2D attention mask"):
        model(tokens(1, 30), attention_mask=torch.ones(1, 1, 30, 30, dtype=torch.bool).tril())


def test_attention_weights_beyond_the_capacity(make_base: MakeBase) -> None:
    model = awake(make_base("Llama", attn_implementation="eager"), "ahn-gdn")
    with pytest.raises(RetrofitError, match="output_attentions"):
        model(tokens(1, 30), output_attentions=True)
    model.config.output_attentions = True
    with pytest.raises(RetrofitError, match="output_attentions"):
        model(tokens(1, 30))
    with model.memory_off():
        assert [each.shape for each in model(tokens(1, 30)).attentions] == [(1, 4, 30, 30)] * 2
    assert len(model(tokens(1, W + S)).attentions) == 2


def test_leaving_the_mask_of_a_padded_cache_out(model: Any) -> None:
    mask = left_mask([20, 9], 20)
    _, cache = feed(model, tokens(2, 20), [20], mask)
    with pytest.raises(RetrofitError, match="pass their attention_mask"):
        model(tokens(2, 1), past_key_values=cache)


def test_another_window_or_kind_under_a_cache(model: Any, make_base: MakeBase) -> None:
    other = awake(make_base("Qwen2"), "ahn-dn")
    for length in (5, 30):
        model.set_window(W, S)
        _, cache = feed(model, tokens(1, length), [length])
        with pytest.raises(RetrofitError, match="new cache"):
            other(tokens(1, 1), past_key_values=cache)
        model.set_window(window=6, sinks=1)
        with pytest.raises(RetrofitError, match="set the window back"):
            model(tokens(1, 1), past_key_values=cache)
    model.set_window(W, S)
    feed(model, tokens(1, 1), [1], cache=cache)


def test_an_empty_cache_takes_the_new_window(model: Any) -> None:
    _, cache = feed(model, tokens(1, 30), [30])
    cache.reset()
    model.set_window(window=6, sinks=1)
    ids = tokens(1, 25)
    close(feed(model, ids, [12, 13], cache=cache)[0], logits(model, ids))


def test_one_window_for_layers_with_windows_of_their_own(model: Any) -> None:
    by_layer = {"1": {"window": 5}}
    own = retrofit.patch(model, model.config.memory["kind"], W, S, by_layer=by_layer)
    own.set_window(W, S + 1)
    assert [(memory.window, memory.sinks) for memory in own.model.memories().values()] == [(W, S + 1), (5, S + 1)]
    assert own.config.memory["by_layer"] == by_layer
    with pytest.raises(RetrofitError, match="windows of their own"):
        own.set_window(W + 1)


def test_the_base_adding_to_our_cache(model: Any, make_base: MakeBase) -> None:
    base = make_base("Qwen2")
    for length in (4, 30):
        _, cache = feed(model, tokens(1, length), [length])
        with pytest.raises(RetrofitError, match=r"belongs to a retrofitted model.*can continue it: start a new one"):
            base(tokens(1, 1), past_key_values=cache)


def test_a_cache_of_other_options(make_base: MakeBase) -> None:
    """Rows that other heads hold are as many in all, and nothing but the options tells them apart."""
    base, ids = make_base("Llama"), tokens(1, 31)
    first, second = (retrofit.patch(base, "expected", W, S, rows=rows) for rows in ([1, 5], 3))
    _, cache = feed(first, ids[:, :30], [30])
    with pytest.raises(RetrofitError, match=r"rows=\[1, 5\].*rows=3.*start a new cache"):
        second(ids[:, 30:], past_key_values=cache)
    cache.reset()
    close(feed(second, ids, [30, 1], cache=cache)[0], logits(second, ids))


def test_cropping_what_was_evicted(model: Any) -> None:
    _, cache = feed(model, tokens(1, 30), [30])
    assert not cache.layers[0].is_croppable
    with pytest.raises(RetrofitError, match="start a new cache"):
        cache.crop(-1)
    cache.crop(0)
    ids = tokens(1, 25)
    _, cache = feed(model, ids[:, :9], [9])
    assert cache.layers[0].is_croppable
    cache.crop(-3)
    assert cache.get_seq_length() == 6
    close(feed(model, ids[:, 6:], [1, 18], cache=cache)[0], logits(model, ids)[:, 6:])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    ],
)
def test_rotary_scaling_that_follows_the_length(rope: dict[str, Any], make_base: MakeBase) -> None:
    base = make_base("Llama", rope_parameters={**rope, "rope_theta": 1e4, "original_max_position_embeddings": 64})
    with pytest.raises(RetrofitError, match=rope["rope_type"]):
        retrofit.patch(base, "none", W, S)


def test_tensor_parallelism(model: Any, tmp_path: Any) -> None:
    model.save_pretrained(tmp_path)
    for load in (type(model).from_pretrained, type(model.model).from_pretrained):
        with pytest.raises(RetrofitError, match="without tp_plan"):
            load(tmp_path, tp_plan="auto")
    with pytest.raises(RetrofitError, match="without tp_plan"):
        retrofit.patch(str(tmp_path), "none", W, S, model_kwargs={"tp_plan": "auto"})


def test_a_cache_of_the_base_s_own(model: Any, make_base: MakeBase) -> None:
    _, cache = feed(make_base("Qwen2"), tokens(1, 6), [6], cache=DynamicCache())
    with pytest.raises(RetrofitError, match="memory off"):
        model(tokens(1, 1), past_key_values=cache)


@pytest.mark.parametrize("length", [4, 30])
def test_a_cache_whose_call_ended_in_the_middle(one_model: Any, length: int) -> None:
    """Some layers hold its tokens and others do not: nothing tells them apart later."""
    ids = tokens(1, length + 1)
    _, cache = feed(one_model, ids[:, :-1], [length])
    handle = one_model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one_model(ids[:, -1:], past_key_values=cache)
    handle.remove()
    with pytest.raises(RetrofitError, match=r"ended in the middle.*start a new cache"):
        one_model(ids[:, -1:], past_key_values=cache)
    cache.reset()
    close(feed(one_model, ids, [length, 1], cache=cache)[0], logits(one_model, ids), 1e-4)


def test_a_cache_of_fewer_memories_and_cropping_only_some(make_base: MakeBase) -> None:
    base, ids = make_base("Llama"), tokens(1, 40)
    some, all_layers = retrofit.patch(base, "none", W, S, layers=[1]), retrofit.patch(base, "none", W, S)
    _, cache = feed(some, ids[:, :4], [4])
    with pytest.raises(RetrofitError, match="filled with the memory off"):
        all_layers(ids[:, 4:5], past_key_values=cache)
    _, cache = feed(some, ids[:, :38], [38])
    with pytest.raises(RetrofitError, match="cannot be cropped"):
        cache.crop(-2)
    close(feed(some, ids[:, 38:], [1, 1], cache=cache)[0], logits(some, ids)[:, 38:])
    cache.reset()
    with some.memory_off():
        close(feed(some, ids, [40], cache=cache)[0], logits(base, ids))

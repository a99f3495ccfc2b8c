"""Patching: the base's storage is shared, the base itself untouched, and what cannot be patched is named."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen3ForSequenceClassification

import retrofit
from patches.errors import RetrofitError
from patches.kinds import KINDS
from tests.helpers import S, W, awake, awaken, checksum, logits, tokens

MakeBase = Callable[..., PreTrainedModel]
IDS = tokens(2, 30)


@pytest.mark.parametrize("tied", [False, True])
def test_storage_is_shared(family: str, tied: bool, make_base: MakeBase) -> None:
    base = make_base(family, tie_word_embeddings=tied)
    model = retrofit.patch(base, "ahn-gdn", W, S)
    assert type(model).__name__ == f"Retrofit{family}ForCausalLM"
    theirs = dict(base.named_parameters())
    ours = {name: p for name, p in model.named_parameters() if ".memory." not in name}
    assert ours.keys() == theirs.keys()
    assert all(ours[name].data_ptr() == theirs[name].data_ptr() for name in ours)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])


def test_the_base_stays_as_it_was(base: PreTrainedModel) -> None:
    for name, parameter in base.named_parameters():
        parameter.requires_grad_("norm" in name)
    flags = {name: p.requires_grad for name, p in base.named_parameters()}
    classes = [type(module) for module in base.modules()]
    settings, generation = base.config.to_dict(), base.generation_config.to_dict()
    before, bits = logits(base, IDS), checksum(base)

    model = awaken(retrofit.patch(base, "ahn-gdn", W, S)).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0, weight_decay=0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.set_window(3, 1)
    model.generation_config.max_new_tokens = 3
    model.config.use_cache = False

    assert torch.equal(logits(base, IDS), before)
    assert checksum(base) == bits
    assert flags == {name: p.requires_grad for name, p in base.named_parameters()}
    assert all(p.grad is None for p in base.parameters())
    assert classes == [type(module) for module in base.modules()]
    assert (base.config.to_dict(), base.generation_config.to_dict()) == (settings, generation)
    assert not base.training


def test_two_patches_of_one_base_are_two_models(make_base: MakeBase) -> None:
    base = make_base("Qwen2")
    one, two = awake(base, "ahn-gdn"), retrofit.patch(base, "ahn-gdn", 5, 1)
    assert (one.config.memory["window"], two.config.memory["window"]) == (W, 5)
    assert {p.data_ptr() for _, p in one.memory_parameters()}.isdisjoint(
        p.data_ptr() for _, p in two.memory_parameters()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_patching_a_patched_model_patches_its_base(kind: str, make_base: MakeBase) -> None:
    base = make_base("Llama")
    once = awake(base, "ahn-gdn", layers=[0])
    before = logits(once, IDS)
    twice = retrofit.patch(once, kind, 6, 1)
    assert twice.model.embed_tokens.weight.data_ptr() == base.model.embed_tokens.weight.data_ptr()
    assert twice.config.memory["layers"] is None
    straight = retrofit.patch(base, kind, 6, 1)
    straight.load_state_dict(twice.state_dict())
    assert torch.equal(logits(twice, IDS), logits(straight, IDS))
    assert torch.equal(logits(once, IDS), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_a_path(family: str, dtype: torch.dtype, make_base: MakeBase, tmp_path: Path) -> None:
    make_base(family).save_pretrained(tmp_path)
    for path in (tmp_path, str(tmp_path)):
        model = retrofit.patch(path, "ahn-gdn", W, S, model_kwargs={"dtype": dtype})
        assert model.dtype == dtype
        assert model.config.memory["base"] == str(tmp_path)
        assert {p.dtype for _, p in model.memory_parameters()} == {torch.float32}
        assert not model.training
    assert retrofit.patch(tmp_path, "none", W).dtype == torch.float32, "the checkpoint's own dtype is the default"


def test_settings_come_along(make_base: MakeBase) -> None:
    base = make_base("Qwen2", attn_implementation="eager").train()
    base.generation_config.temperature = 0.3
    base.config.my_own_field = "kept"
    model = retrofit.patch(base, "ahn-gdn", W, S)
    assert model.training
    assert model.config._attn_implementation == "eager"
    assert model.generation_config.temperature == 0.3
    assert model.config.my_own_field == "kept"
    assert model.config.memory["kind"] == "ahn-gdn"


def test_the_random_start_is_the_seed_s(make_base: MakeBase) -> None:
    base, found = make_base("Qwen2"), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model = retrofit.patch(base, "ahn-gdn", W, S)
        found.append(torch.cat([p.detach().flatten() for _, p in model.memory_parameters()]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_model_can_be_copied(make_base: MakeBase) -> None:
    model = awake(make_base("Qwen2"), "ahn-gdn")
    twin = copy.deepcopy(model)
    twin.set_window(3, 0)
    with torch.no_grad():
        for _, parameter in twin.memory_parameters():
            parameter.zero_()
    assert model.config.memory["window"] == W
    assert not torch.equal(logits(model, IDS), logits(twin, IDS))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"memory": "ahn-gnd"}, r"did you mean 'ahn-gdn'\?"),
        ({"memory": 5}, "one of none"),
        ({"windw": 3}, "no option 'windw'"),
        ({"window": 0}, "1 or more"),
        ({"window": 8.0}, "whole number"),
        ({"sinks": -1}, "0 or more"),
        ({"layers": [7]}, r"not a layer of this base \(0 to 1\)"),
        ({"layers": []}, "leave it out"),
        ({"layers": 1}, "list of layer indices"),
        ({"others": "none"}, "one of full, window"),
        ({"model_kwargs": {"dtype": "auto"}}, "with a path or id"),
    ],
)
def test_what_is_refused(how: dict[str, Any], says: str, make_base: MakeBase) -> None:
    given = {"memory": "ahn-gdn", "window": W, "sinks": S, **how}
    with pytest.raises(RetrofitError, match=says):
        retrofit.patch(make_base("Qwen2"), **given)


@pytest.mark.parametrize("memory", [None, ["ahn-gdn"], {}])
def test_a_memory_that_is_no_name(memory: Any, make_base: MakeBase) -> None:
    with pytest.raises(RetrofitError, match=r"memory: .* is not one of"):
        retrofit.patch(make_base("Qwen2"), memory, W)


def test_other_families_are_told_ours() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=11))
    with pytest.raises(RetrofitError, match=r"'gpt2'.*qwen2, qwen3, llama, mistral"):
        retrofit.patch(gpt2, "none", W)


def test_other_heads_and_no_models(make_base: MakeBase) -> None:
    base = make_base("Qwen3")
    with pytest.raises(RetrofitError, match="not a plain causal LM: load the base with AutoModelForCausalLM"):
        retrofit.patch(Qwen3ForSequenceClassification(base.config), "none", W)
    with pytest.raises(RetrofitError, match="not a plain causal LM"):
        retrofit.patch(base.model, "none", W)
    for nothing in (None, 3, {"a": 1}):
        with pytest.raises(RetrofitError, match="a transformers model, a path or a Hub id"):
            retrofit.patch(nothing, "none", W)


def test_a_base_with_something_attached(make_base: MakeBase) -> None:
    peft = pytest.importorskip("peft")
    base = make_base("Qwen2")
    base.add_adapter(peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(RetrofitError, match=r"q_proj .*first merge or remove .*LoRA adapter"):
        retrofit.patch(base, "none", W)


def test_lora_on_a_patched_model(make_base: MakeBase) -> None:
    """Base parameter names stay, so LoRA finds its targets; with the memory trained beside it."""
    peft = pytest.importorskip("peft")
    model = awake(make_base("Qwen2"), "ahn-gdn")
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], modules_to_save=["memory"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    adapted(IDS, labels=IDS).loss.backward()
    learning = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert any("lora_B" in name for name in learning)
    assert any(".memory." in name for name in learning)


def test_a_base_that_is_not_there(make_base: MakeBase) -> None:
    with pytest.raises(RetrofitError, match="not loaded"):
        retrofit.patch(make_base("Qwen2").to("meta"), "none", W)


def test_a_native_window(make_base: MakeBase) -> None:
    retrofit.patch(make_base("Mistral", sliding_window=10), "none", 8, 2)
    with pytest.raises(RetrofitError, match=r"attends to 9 tokens only: choose window \+ sinks <= 9"):
        retrofit.patch(make_base("Mistral", sliding_window=9), "none", 8, 2)

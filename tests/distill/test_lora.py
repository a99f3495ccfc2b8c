"""LoRA beside the memory: the teacher stays the base, both adapters come back, the export has both merged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import retrofit
from distill import distill
from distill.config import DistillConfig
from distill.lora import add_lora, lora_layers, lora_off, merge_lora
from distill.objective import teaching
from patches.errors import RetrofitError
from retrofit.evaluation.baselines import window_only
from retrofit.fingerprint import fingerprint
from tests.helpers import awake, awaken, checksum, close, logits, tokens

peft = pytest.importorskip("peft", reason="peft is not installed")


@pytest.fixture
def model(base: PreTrainedModel) -> object:
    """Memory and LoRA, both with weights that show."""
    model = awake(base, "ahn-gdn")
    add_lora(model, {"r": 2})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    return model


def test_memory_and_lora_train_and_nothing_else(model: PreTrainedModel) -> None:
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".memory." in name or ".lora_" in name}
    assert len(lora_layers(model)) == 8
    assert not any(".memory." in name and "lora_" in name for name in trained)


def test_the_teacher_and_the_baseline_have_none(model: PreTrainedModel, base: PreTrainedModel) -> None:
    ids = tokens(2, 30)
    with torch.no_grad():
        expected = base.model(ids).last_hidden_state
    with teaching(model):
        assert torch.equal(model.model(ids).last_hidden_state, expected)
    plain = retrofit.patch(base, "none", 8, 2)
    assert torch.equal(logits(window_only(model), ids), logits(plain, ids))
    with lora_off(model):
        off = logits(model, ids)
    assert not torch.equal(off, logits(model, ids))
    assert all(p.requires_grad for name, p in model.named_parameters() if ".lora_" in name)


def test_the_fingerprint_is_the_base_s(model: PreTrainedModel, base: PreTrainedModel) -> None:
    assert fingerprint(model) == fingerprint(base)


def test_merged_it_computes_the_same(model: PreTrainedModel) -> None:
    ids = tokens(2, 30)
    expected = logits(model, ids)
    merge_lora(model)
    close(logits(model, ids), expected)
    assert not lora_layers(model)


def test_a_run_writes_both_adapters(
    checkpoint: Path, text_file: Path, tmp_path: Path, make_base: Callable[..., PreTrainedModel]
) -> None:
    settings = {
        "window": 6,
        "sinks": 2,
        "max_length": 40,
        "eval_rows": 4,
        "lora": {"r": 2, "target_modules": ["q_proj"]},
    }
    places = {"base": str(checkpoint), "data": str(text_file), "save_steps": 2}
    whole = DistillConfig(**places, **settings, output_dir=str(tmp_path / "whole"), max_steps=4)
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    before = checksum(base)
    distill(whole)
    assert checksum(base) == before
    run, ids = tmp_path / "whole", tokens(2, 30)
    both = peft.PeftModel.from_pretrained(retrofit.load_adapter(str(checkpoint), run / "adapter"), run / "lora")
    exported = AutoModelForCausalLM.from_pretrained(run / "model")
    close(logits(both.eval(), ids), logits(exported, ids))
    config = json.loads((run / "lora" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["target_modules"]) == ("LORA", 2, ["q_proj"])

    metrics = json.loads((run / "metrics.json").read_text())
    again = shutil.copytree(run, tmp_path / "again")  # as if it had stopped after four steps
    for name in ("adapter", "lora", "model"):
        shutil.rmtree(again / name)
    last = again / "checkpoint-4" / "lora" / "adapter_model.safetensors"
    last.write_bytes(last.read_bytes()[:50])  # and its third and fourth were written badly
    resumed = distill(DistillConfig(**places, **settings, output_dir=str(again), max_steps=4), resume=True)
    assert [row["kl"] for row in resumed["rows"]] == [row["kl"] for row in metrics["rows"]]
    for folder in ("adapter", "lora"):
        name = "adapter_model.safetensors"
        assert (again / folder / name).read_bytes() == (run / folder / name).read_bytes()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 2}, "'rank' is not a field of peft.LoraConfig"),
        ({"rank_pattern": 3}, "peft cannot use these fields"),
        ({"r": 0}, "lora: peft cannot use these fields .*positive.*: correct them"),
        ({"target_modules": "(["}, "peft cannot use these fields"),
        ({"target_modules": ["no_proj"]}, "peft cannot use these fields .*name linear layers of the base"),
        ({"target_modules": ["q_proj", "input_layernorm"]}, "name linear layers"),
        ({"target_modules": ["memory"]}, "name linear layers"),
        ({"layers_to_transform": [99]}, "peft cannot use these fields"),
        ({"layers_to_transform": 0, "target_modules": ".*q_proj"}, "peft cannot use these fields"),
        ({"eva_config": {}}, "'eva_config' is not a field of peft.LoraConfig that a run can set"),
        ({"bias": "all"}, "bias 'all' would change the teacher too: set it to 'none'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' would change the teacher too"),
        ({"modules_to_save": ["norm"]}, "modules_to_save .* would change the teacher too"),
        ({"target_modules": ["lm_head"]}, "the teacher shares the embedding and the head"),
        ({"target_modules": ["embed_tokens"]}, "the teacher shares the embedding and the head"),
    ],
)
def test_settings_that_do_not_go(
    make_base: Callable[..., PreTrainedModel], settings: dict[str, object], said: str
) -> None:
    with pytest.raises(RetrofitError, match=said) as error:
        add_lora(awaken(retrofit.patch(make_base("Qwen2"), "ahn-gdn", 8, 2)), settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [{}, {"exclude_modules": ["q_proj"]}, {"exclude_modules": ".*q_proj"}], ids=str)
def test_a_memory_is_never_wrapped(make_base: Callable[..., PreTrainedModel], given: dict[str, object]) -> None:
    """Its weights would get other names, which no adapter has."""
    model = awaken(retrofit.patch(make_base("Qwen2"), "ahn-gdn", 8, 2))
    names = [name for name, _ in model.memory_parameters()]
    add_lora(model, {"target_modules": "all-linear", **given})
    assert len(lora_layers(model)) == 2 * (6 if given else 7)
    assert [name for name, _ in model.memory_parameters()] == names


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 1, "lora_alpha": 1e6, "lora_dropout": 0.999, "use_rslora": True},
        {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"q_proj": 0.5}, "use_dora": True},
        {
            "target_modules": ["q_proj"],
            "layers_to_transform": 0,
            "layers_pattern": "layers",
            "init_lora_weights": "gaussian",
        },
    ],
    ids=str,
)
def test_settings_that_go(make_base: Callable[..., PreTrainedModel], settings: dict[str, object]) -> None:
    model = awaken(retrofit.patch(make_base("Qwen2"), "ahn-gdn", 8, 2))
    add_lora(model, settings)
    assert model(torch.arange(3, 33)[None]).logits.isfinite().all()

"""Invariant 10: AHN-GDN gives the numbers of the method's reference implementation."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

import retrofit
from retrofit.convert import published_name
from tests.helpers import close, feed, logits

UNUSED = "ahn.fn.D"  # in the published checkpoints, read by nothing


@pytest.fixture(scope="module")
def oracle(shared: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder = shared / "oracles"
    return json.loads((folder / "ahn_gdn.json").read_text()), load_file(folder / "ahn_gdn.safetensors")


@pytest.fixture
def model(oracle: tuple[dict[str, Any], dict[str, Tensor]]) -> Any:
    facts, tensors = oracle
    weights = {name.removeprefix("weights."): tensor for name, tensor in tensors.items() if name.startswith("weights.")}
    base = Qwen2ForCausalLM(Qwen2Config(**facts["base"])).eval()
    model = retrofit.patch(base, memory="ahn-gdn", window=facts["window"], sinks=facts["sinks"])
    ours = {name: weights.pop(published_name("ahn-gdn", name)) for name in model.state_dict()}
    model.load_state_dict(ours)
    assert all(name.endswith(UNUSED) for name in weights)
    return model


LOGITS, STATES, KL, GRADIENTS = 1e-5, 4e-6, 3e-7, 1e-5  # twice what rounding to float32 makes, or more


def test_prefill_with_and_without_sinks(oracle: tuple[dict[str, Any], dict[str, Tensor]], model: Any) -> None:
    facts, tensors = oracle
    close(logits(model, tensors["input_ids"]), tensors["prefill.logits"], LOGITS)
    model.set_window(window=facts["window"], sinks=0)
    close(logits(model, tensors["input_ids"]), tensors["prefill_nosink.logits"], LOGITS)


def test_inactive_it_is_plain_qwen2(oracle: tuple[dict[str, Any], dict[str, Tensor]], model: Any) -> None:
    _, tensors = oracle
    with model.memory_off():
        close(logits(model, tensors["input_ids"]), tensors["plain_qwen2.logits"], LOGITS)
    model.set_window(window=64)
    close(logits(model, tensors["input_ids"]), tensors["inactive.logits"], LOGITS)


def test_prefill_then_decode(oracle: tuple[dict[str, Any], dict[str, Tensor]], model: Any) -> None:
    _, tensors = oracle
    out, _ = feed(model, tensors["input_ids"], [32, *[1] * 8])
    close(out, tensors["decode_p32.logits"], LOGITS)


def test_what_the_layers_keep_after_prefill(oracle: tuple[dict[str, Any], dict[str, Tensor]], model: Any) -> None:
    facts, tensors = oracle
    _, cache = feed(model, tensors["input_ids"], [40])
    sinks, window = facts["sinks"], facts["window"]
    in_order = [
        *range(sinks),
        *(sinks + (t - sinks) % window for t in range(40 - window, 40)),
    ]  # oldest first
    for index, layer in enumerate(cache.layers):
        close(layer.state["matrix"], tensors[f"prefill.layer{index}.state"], STATES)
        close(layer.keys[:, :, in_order], tensors[f"prefill.layer{index}.key_cache"], STATES)
        close(layer.values[:, :, in_order], tensors[f"prefill.layer{index}.value_cache"], STATES)
        # the reference keeps the sinks' gates too, which nothing reads
        beta, log_decay = layer.gates.mT[:, [row - sinks for row in in_order[sinks:]]].chunk(2, -1)
        close(beta, tensors[f"prefill.layer{index}.gate_cache_beta"][:, sinks:], STATES)
        close(log_decay, tensors[f"prefill.layer{index}.gate_cache_alpha"][:, sinks:], STATES)


def test_the_loss_and_every_gradient(oracle: tuple[dict[str, Any], dict[str, Tensor]], model: Any) -> None:
    facts, tensors = oracle
    ids, labels = tensors["input_ids"], tensors["train.labels"]
    with model.memory_off():
        teacher = logits(model, ids)
    student = model(ids, use_cache=False).logits
    close(teacher, tensors["train.logits_ref"], LOGITS)
    close(student, tensors["train.logits_mem"], LOGITS)
    valid = [t for t in range(facts["window"] + facts["sinks"], 40) if labels[0, t] != -100]
    assert valid == facts["settings"]["valid_positions"]
    p, q = (x[0, valid].log_softmax(-1) for x in (teacher, student))
    loss = F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean()
    close(loss, tensors["train.kl_loss"][0], KL)
    loss.backward()
    for name, parameter in model.memory_parameters():
        expected = tensors["train.grad." + published_name("ahn-gdn", name)]
        assert (parameter.grad - expected).norm() <= GRADIENTS * expected.norm(), name

"""A memory and all its parts are modules that are called: who stands between a module and its weights acts on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from patches.kinds import KINDS
from tests.helpers import awake, close, feed, logits, tokens

OF_THE_BASE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "norm")
OPTIONS: dict[str, dict[str, Any]] = {"tensor-cache": {"slots": 2, "two_timescale": True}}


@pytest.fixture
def whole(partner: PreTrainedModel, kind: str) -> Any:
    """Each kind with all the parts it can have, awake."""
    return awake(partner.double(), kind, **OPTIONS.get(kind, {}))


def offloaded(model: Any, how: str, folder: Path) -> Any:
    accelerate = pytest.importorskip("accelerate")
    if how == "cpu":
        return accelerate.cpu_offload(model, "cpu")
    if how == "disk":
        return accelerate.disk_offload(model, folder, "cpu")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "disk"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


@pytest.mark.parametrize("how", ["cpu", "disk", "dispatch"])
def test_offloaded(whole: Any, how: str, tmp_path: Path) -> None:
    ids = tokens(2, 30)
    expected = logits(whole, ids)
    model = offloaded(whole, how, tmp_path)
    away = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    assert away
    close(feed(model, ids, [6, 18, *[1] * 6])[0], expected)


def test_lora_on_all_linears(whole: Any, kind: str) -> None:
    peft = pytest.importorskip("peft")
    linears = [name for name, module in whole.named_modules() if ".memory." in name and isinstance(module, nn.Linear)]
    ids = tokens(2, 30)
    before = logits(whole, ids)
    adapted = peft.get_peft_model(whole, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", r=2))
    wrapped = {name: module for name, module in adapted.named_modules() if name.endswith("lora_B.default")}
    for linear in linears:
        inside = [module for name, module in wrapped.items() if linear in name]
        assert len(inside) == 1, linear
        nn.init.normal_(inside[0].weight)
        assert not torch.equal(logits(adapted, ids), before), f"the LoRA of {linear} does nothing"
        nn.init.zeros_(inside[0].weight)
    adapted(ids, labels=ids).loss.backward()
    assert all(module.weight.grad is not None for name, module in wrapped.items() if ".memory." in name)


def test_no_name_ends_like_one_of_the_base(whole: Any) -> None:
    for name, module in whole.named_modules():
        if ".memory." in name:
            assert name.rpartition(".")[2] not in OF_THE_BASE
            assert not (isinstance(module, nn.Linear) and name.endswith(OF_THE_BASE)), name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith(("ahn", "joint"))])
def test_lora_on_the_base_leaves_the_memory_alone(kind: str, make_base: Callable[..., PreTrainedModel]) -> None:
    peft = pytest.importorskip("peft")
    for targets in (list(OF_THE_BASE[:7]), r".*[qkvo]_proj"):
        model = awake(make_base("Llama"), kind)
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
        assert not [name for name, _ in adapted.named_modules() if ".memory." in name and "lora" in name]

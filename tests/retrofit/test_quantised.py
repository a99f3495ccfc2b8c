"""A base quantised by torchao takes a memory in float32, is its own teacher, and comes back with adapter or export."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

import retrofit
from tests.conftest import tiny_base
from tests.helpers import awaken, close, logits, tokens

quantisation: Any = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

WAYS = {
    "int8": lambda: quantisation.Int8WeightOnlyConfig(),
    "int4": lambda: quantisation.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantisation.PerGroup(32)),
}
IDS = tokens(2, 30)


@pytest.fixture(params=WAYS)
def quantised(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A tiny base in 8 or 4 bits."""
    tiny_base("Qwen2").save_pretrained(tmp_path / "base")
    how = TorchAoConfig(WAYS[request.param]())
    return AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=how, dtype=torch.float32).eval()


def test_the_teacher_is_the_quantised_base(quantised: Any) -> None:
    model = awaken(retrofit.patch(quantised, "ahn-gdn", 8, 2))
    with model.memory_off():
        assert torch.equal(logits(model, IDS), logits(quantised, IDS))
    assert torch.equal(logits(model, IDS[:, :10]), logits(quantised, IDS[:, :10]))
    assert not torch.equal(logits(model, IDS), logits(quantised, IDS))
    assert {parameter.dtype for _, parameter in model.memory_parameters()} == {torch.float32}


def test_gradients_reach_the_memory_alone(quantised: Any) -> None:
    model = awaken(retrofit.patch(quantised, "joint", 8, 2)).train()
    model(IDS, use_cache=False).logits.square().mean().backward()
    graded = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert graded == {name for name, _ in model.memory_parameters()}


def test_an_adapter_returns_to_the_same_base(quantised: Any, tmp_path: Path) -> None:
    model = awaken(retrofit.patch(quantised, "ahn-gdn", 8, 2))
    retrofit.save_adapter(model, tmp_path / "adapter")
    assert torch.equal(logits(retrofit.load_adapter(quantised, tmp_path / "adapter"), IDS), logits(model, IDS))


def test_an_adapter_moves_to_the_full_base_with_a_note(
    quantised: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    retrofit.save_adapter(awaken(retrofit.patch(quantised, "ahn-gdn", 8, 2)), tmp_path / "adapter")
    full = tiny_base("Qwen2")
    model = retrofit.load_adapter(full, tmp_path / "adapter")
    assert "was torchao and this one is not quantised" in caplog.text
    assert torch.equal(logits(model, IDS[:, :10]), logits(full, IDS[:, :10]))
    with pytest.raises(retrofit.RetrofitError, match="intermediate_size"):
        retrofit.load_adapter(tiny_base("Qwen2", intermediate_size=128), tmp_path / "adapter")


def test_a_quantised_checkpoint_is_a_base(quantised: Any, tmp_path: Path) -> None:
    quantised.save_pretrained(tmp_path / "quantised")
    model = awaken(retrofit.patch(tmp_path / "quantised", "none", 8, 2))
    close(logits(model, IDS), logits(retrofit.patch(quantised, "none", 8, 2), IDS))


def test_an_export_comes_back(quantised: Any, tmp_path: Path) -> None:
    model = awaken(retrofit.patch(quantised, "ahn-gdn", 8, 2))
    model.save_pretrained(tmp_path / "export")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    close(logits(back, IDS), logits(model, IDS))
    assert {parameter.dtype for _, parameter in back.memory_parameters()} == {torch.float32}

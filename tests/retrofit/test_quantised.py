"""A quantised base takes a memory in float32, is its own teacher, and comes back with adapter or export."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast, TorchAoConfig
from typer.testing import CliRunner

import retrofit
from cli import app
from retrofit.quantised_bases import IN_PLACE
from tests.conftest import tiny_base
from tests.helpers import awaken, close, logits, tokens

quantisation: Any = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

WAYS: dict[str, Callable[[], Any]] = {
    "torchao int8": lambda: TorchAoConfig(quantisation.Int8WeightOnlyConfig()),
    "torchao int4": lambda: TorchAoConfig(
        quantisation.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantisation.PerGroup(32))
    ),
    "bitsandbytes 8 bits": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes 4 bits": lambda: BitsAndBytesConfig(load_in_4bit=True),
    "bitsandbytes nf4 twice": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
}
IDS = tokens(2, 30)


def base() -> Any:
    return tiny_base("Qwen2", intermediate_size=128)  # bitsandbytes' blocks have 64 numbers


@pytest.fixture(params=WAYS)
def quantised(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A tiny base in 8 or 4 bits."""
    base().save_pretrained(tmp_path / "base")
    how = WAYS[request.param]()
    return AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=how, dtype=torch.float32).eval()


def test_the_teacher_is_the_quantised_base(quantised: Any) -> None:
    model = awaken(retrofit.patch(quantised, "ahn-gdn", 8, 2))
    with model.memory_off():
        assert torch.equal(logits(model, IDS), logits(quantised, IDS))
    assert torch.equal(logits(model, IDS[:, :10]), logits(quantised, IDS[:, :10]))
    assert not torch.equal(logits(model, IDS), logits(quantised, IDS))
    assert {parameter.dtype for _, parameter in model.memory_parameters()} == {torch.float32}


def test_the_base_stays_as_it_was(quantised: Any) -> None:
    model = awaken(retrofit.patch(quantised, "kvm", 8, 2))  # reads the bias of the keys by a call
    before = logits(quantised, IDS)
    assert logits(model, IDS).isfinite().all()
    anew = retrofit.patch(model, "none", 8, 2)
    close(logits(anew, IDS), logits(retrofit.patch(quantised, "none", 8, 2), IDS))
    assert torch.equal(logits(quantised, IDS), before)


def test_gradients_reach_the_memory_alone(quantised: Any) -> None:
    model = awaken(retrofit.patch(quantised, "joint", 8, 2)).train()
    model(IDS, use_cache=False).logits.square().mean().backward()
    graded = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert graded == {name for name, _ in model.memory_parameters()}


def test_an_adapter_returns_to_the_same_base(quantised: Any, tmp_path: Path) -> None:
    model = awaken(retrofit.patch(quantised, "ahn-gdn", 8, 2))
    retrofit.save_adapter(model, tmp_path / "adapter")
    assert torch.equal(logits(retrofit.load_adapter(quantised, tmp_path / "adapter"), IDS), logits(model, IDS))


def test_rows_by_need_of_a_quantised_base_are_saved(quantised: Any, tmp_path: Path) -> None:
    model = retrofit.patch(quantised, "expected", 8, 2, rows=9, bits=4, shares="need").eval()
    retrofit.calibrate(model, [tokens(1, 80)])
    rows = [memory.rows for memory in model.model.memories().values()]
    assert sum(map(sum, rows)) == 36
    retrofit.save_adapter(model, tmp_path / "adapter")
    again = retrofit.load_adapter(quantised, tmp_path / "adapter").eval()
    assert [memory.rows for memory in again.model.memories().values()] == rows
    assert torch.equal(logits(again, IDS), logits(model, IDS))


def test_an_adapter_moves_to_the_full_base_with_a_note(
    quantised: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    retrofit.save_adapter(awaken(retrofit.patch(quantised, "ahn-gdn", 8, 2)), tmp_path / "adapter")
    full = base()
    model = retrofit.load_adapter(full, tmp_path / "adapter")
    assert re.search(r"was quantised \((torchao|bitsandbytes), \w.*\) and this one is not quantised", caplog.text)
    assert torch.equal(logits(model, IDS[:, :10]), logits(full, IDS[:, :10]))
    with pytest.raises(retrofit.RetrofitError, match="intermediate_size"):
        retrofit.load_adapter(tiny_base("Qwen2"), tmp_path / "adapter")


def test_a_quantised_checkpoint_is_a_base(quantised: Any, tmp_path: Path) -> None:
    quantised.save_pretrained(tmp_path / "quantised")
    model = awaken(retrofit.patch(tmp_path / "quantised", "none", 8, 2))
    close(logits(model, IDS), logits(retrofit.patch(quantised, "none", 8, 2), IDS))


def test_an_export_comes_back(quantised: Any, tmp_path: Path) -> None:
    model = awaken(retrofit.patch(quantised, "ahn-gdn", 8, 2))
    model.save_pretrained(tmp_path / "export")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    for module in back.modules():  # on CPUs with bfloat16, bitsandbytes would infer in that
        if hasattr(module, IN_PLACE):
            setattr(module, IN_PLACE, False)
    close(logits(back, IDS), logits(model, IDS))
    assert {parameter.dtype for _, parameter in back.memory_parameters()} == {torch.float32}


def test_every_verb_takes_one(quantised: Any, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Distilled from the quantised checkpoint itself; the adapter then goes onto it again, and the export generates."""
    quantised.resize_token_embeddings(len(byte_tokenizer))
    for saver in (quantised, byte_tokenizer):
        saver.save_pretrained(tmp_path / "quantised")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 80)
    base, text, run = (str(tmp_path / name) for name in ("quantised", "text.txt", "run"))
    window = ["--window", "8", "--sinks", "2"]
    steps = ["--max-length", "48", "--max-steps", "2", "--eval-rows", "2"]
    for verb in (
        ["distill", base, "--data", text, "--memory", "ahn-gdn", *window, *steps, "--output", run],
        ["generate", f"{run}/model", "--prompt", "the quick brown fox jumps", "--max-new-tokens", "2"],
        ["merge", base, f"{run}/adapter", "-o", str(tmp_path / "merged")],
        ["generate", str(tmp_path / "merged"), "--prompt", "the quick brown fox jumps", "--max-new-tokens", "2"],
        ["patch", base, "--memory", "kvm", *window, "-o", str(tmp_path / "patched")],
    ):
        done = CliRunner().invoke(app, verb)
        assert done.exit_code == 0, (verb, done.output, done.exception)


def test_weights_that_inference_has_rewritten_are_refused(tmp_path: Path) -> None:
    """On CPUs with bfloat16, bitsandbytes' first call without a gradient does; on others nothing is to be refused."""
    base().save_pretrained(tmp_path / "base")
    how = WAYS["bitsandbytes 4 bits"]()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=how, dtype=torch.float32).eval()
    logits(model, IDS)
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight.quant_state.packing_format_for_cpu = True  # as it is on such a CPU
    with pytest.raises(retrofit.RetrofitError, match="patch it before you call it"):
        retrofit.patch(model, "none", 8, 2)

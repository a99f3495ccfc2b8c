"""GGUF checkpoints are bases like any other: their weights are what the file holds, their exports ordinary folders."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

import retrofit
from cli import app
from patches.errors import RetrofitError
from retrofit.gguf import locate
from retrofit.loading import load_base, load_config, load_tokenizer
from tests.conftest import tiny_base
from tests.helpers import fresh_process, logits, tokens

gguf = pytest.importorskip("gguf")

# llama.cpp's names of a layer's tensors, and which of our families its converter rotates in pairs of neighbours
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PAIRED = ("llama",)


def write_gguf(model: PreTrainedModel, path: Path, kind: Any = None, arch: str | None = None) -> None:
    """``model`` as llama.cpp's converter writes it, with a vocabulary of single characters; matrices as ``kind``."""
    config = model.config
    arch = arch or {"mistral": "llama"}.get(config.model_type, config.model_type)  # told apart by the model's name
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else 16)
    writer.add_value_length(config.head_dim if hasattr(config, "head_dim") else 16)
    writer.add_rope_dimension_count(config.head_dim if hasattr(config, "head_dim") else 16)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    letters = [chr(0x100 + i) for i in range(config.vocab_size - 1)]  # transformers adds one
    letters[2] = letters[0] + letters[1]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(letters)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(letters))
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        data = tensor.float().numpy()
        stem, _, leaf = name.rpartition(".")
        if stem in OUTSIDE:
            target = f"{OUTSIDE[stem]}.{leaf}"
        else:
            _, _, layer, rest = stem.split(".", 3)
            target = f"blk.{layer}.{NAMES[rest]}.{leaf}"
            if arch in PAIRED and rest in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads if rest.endswith("q_proj") else config.num_key_value_heads
                halves = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
                data = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))
        if kind is not None and data.ndim == 2:
            writer.add_tensor(target, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
def test_the_model_is_the_one_in_the_file(family: str, tmp_path: Path) -> None:
    wide = {"head_dim": 128} if family == "Qwen3" else {}  # transformers takes it for granted
    base, ids = tiny_base(family, **wide), tokens(2, 40)
    write_gguf(base, tmp_path / "model.gguf")
    for path in (tmp_path / "model.gguf", tmp_path):  # the file, or the folder that holds it
        read = load_base(str(path))
        assert type(read) is type(base)
        assert torch.equal(logits(read, ids), logits(base, ids))


def test_quantised_tensors_become_ordinary_ones_and_the_export_an_ordinary_folder(tmp_path: Path) -> None:
    base, ids = tiny_base("Qwen2"), tokens(2, 40)
    write_gguf(base, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    read = load_base(str(tmp_path / "model.gguf"), dtype=torch.bfloat16)
    assert read.dtype == torch.bfloat16
    read = load_base(str(tmp_path / "model.gguf"))
    assert 0 < (logits(read, ids) - logits(base, ids)).abs().max() < 0.1
    model = retrofit.patch(str(tmp_path / "model.gguf"), memory="none", window=8, sinks=2)
    with model.memory_off():
        assert torch.equal(logits(model, ids), logits(read, ids))
    model.save_pretrained(tmp_path / "export")
    assert "gguf" not in (tmp_path / "export" / "config.json").read_text(encoding="utf-8").replace("model.gguf", "")
    code = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("export", trust_remote_code=True)
print(model(torch.tensor({ids.tolist()})).logits.double().sum().item())
"""
    assert float(fresh_process(code, tmp_path).split()[-1]) == logits(model, ids).double().sum().item()


def test_an_adapter_goes_back_onto_the_file_it_was_made_for(tmp_path: Path) -> None:
    write_gguf(tiny_base("Llama"), tmp_path / "model.gguf")
    model = retrofit.patch(str(tmp_path / "model.gguf"), memory="ahn-gdn", window=8, sinks=2)
    retrofit.save_adapter(model, tmp_path / "adapter")
    again = retrofit.load_adapter(str(tmp_path / "model.gguf"), str(tmp_path / "adapter"))
    ids = tokens(1, 40)
    assert torch.equal(logits(again, ids), logits(model, ids))
    write_gguf(tiny_base("Llama", seed=1), tmp_path / "other.gguf")
    with pytest.raises(RetrofitError, match="base"):
        retrofit.load_adapter(str(tmp_path / "other.gguf"), str(tmp_path / "adapter"))


def test_every_verb_takes_a_file(tmp_path: Path) -> None:
    """From the text to an answer by the command line alone; an adapter beside the file is not taken for its weights."""
    file, text, adapter = tmp_path / "model.gguf", tmp_path / "text.txt", tmp_path / "run" / "adapter"
    write_gguf(tiny_base("Llama"), file)
    text.write_text("".join(chr(3 + at * at % 28) for at in range(4000)))  # bytes that the vocabulary has
    sizes = ["--memory", "joint", "--window", "6", "--sinks", "2"]
    small = [*sizes, "--max-length", "32", "--max-steps", "2", "--per-device-train-batch-size", "1", "--eval-rows", "1"]
    data = ["--data", str(text)]
    for verb, *given in (
        ["distill", str(file), *data, *small, "--output", str(adapter.parent)],
        ["merge", str(file), str(adapter), "--output", str(tmp_path / "merged")],
        ["patch", str(file), *sizes, *data, "--output", str(tmp_path / "patched")],
        ["estimate", str(file), "--memory", "joint", "--length", "100"],
        ["eval", str(file), "--adapter", str(adapter), *data, "--rows", "1", "--output", str(tmp_path / "eval")],
        ["generate", str(file), "--adapter", str(adapter), "--prompt", "\x05\x06\x07", "--max-new-tokens", "2"],
    ):
        result = CliRunner().invoke(app, [verb, *given])
        assert result.exit_code == 0, (verb, result.output)
    shutil.copy(adapter / "adapter_model.safetensors", tmp_path)
    load_base(str(file))


def test_the_tokenizer_comes_from_the_file(tmp_path: Path) -> None:
    write_gguf(tiny_base("Qwen2"), tmp_path / "model.gguf")
    assert load_tokenizer(str(tmp_path / "model.gguf")).eos_token_id == 2


def test_names_of_files() -> None:
    assert locate("user/name/q4/file.gguf") == ("user/name", {"gguf_file": "q4/file.gguf"})
    assert locate("user/name") == ("user/name", {})


@pytest.mark.parametrize("path", ["no.gguf", "/no/such/file.gguf", "./file.gguf", "user/file.gguf"])
def test_no_such_file(path: str) -> None:
    with pytest.raises(RetrofitError, match=r"named as user/name/file\.gguf"):
        load_config(path)


def test_what_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base("Qwen2")
    write_gguf(base, tmp_path / "model.gguf")
    whole = (tmp_path / "model.gguf").read_bytes()
    for number, text in enumerate([b"", b"GGUF", whole[:200], whole[: len(whole) // 2], b"\0" * 4 + whole[4:]]):
        cut = tmp_path / f"cut{number}.gguf"
        cut.write_bytes(text)
        with pytest.raises(RetrofitError, match=f"cut{number}.gguf"):
            load_base(str(cut))
    with pytest.raises(RetrofitError, match="holds several GGUF files"):
        load_config(str(tmp_path))
    write_gguf(base, tmp_path / "bert.gguf", arch="bert")
    with pytest.raises(RetrofitError, match="families supported are"):
        load_base(str(tmp_path / "bert.gguf"))
    write_gguf(tiny_base("Mistral"), tmp_path / "mistral.gguf")  # its converter says llama, transformers says mistral
    with pytest.raises(RetrofitError, match="cannot read a GGUF of this family"):
        load_base(str(tmp_path / "mistral.gguf"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RetrofitError, match=r"pip install 'retrofit-lm\[gguf\]'"):
        load_config(str(tmp_path / "model.gguf"))


def test_a_tensor_type_that_cannot_be_dequantised_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tiny_base("Qwen2"), tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.delitem(gguf.quants._type_traits, gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(RetrofitError, match="Q8_0"):
        load_base(str(tmp_path / "model.gguf"))

"""Published AHN weights: folders written in their layout load and give the published logits; any other is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config
from typer.testing import CliRunner

import retrofit
from cli import app
from patches.errors import RetrofitError
from retrofit.convert import published_name
from tests.helpers import close

VARIANTS = {"ahn-gdn": "GatedDeltaNet", "ahn-dn": "DeltaNet", "ahn-mamba2": "Mamba2"}
WEIGHTS = "model.safetensors"


def write_published(folder: Path, kind: str, tensors: dict[str, Tensor], config: Any, **changes: Any) -> Path:
    """A folder as the authors publish them, with what training left in its configuration."""
    folder.mkdir(parents=True)
    left = {
        "_ahn_implementation": VARIANTS[kind],
        "_layer_implementation": "Qwen2MemDecoderLayer",
        "sliding_window": 256,
        "sliding_window_type": "random",
        "ahn_position": "random",
        "num_attn_sinks": 0,
        "fa_layer_ids": "",
        "use_ahn_router": False,
        "use_q_proj": False,
    }
    old = {name: getattr(config, name) for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")}
    old |= {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    values = {**old, "rope_theta": config.rope_parameters["rope_theta"], **left, **changes}
    (folder / "config.json").write_text(json.dumps(values))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    return folder


# the names in one layer of the published checkpoints
DELTA = {"b_proj.weight", "g_proj.weight", "o_norm.weight", "o_proj.weight"}
STEP = {"dt_proj.weight", "dt_proj.bias", "dt_bias", "A_log"}
PUBLISHED = {
    "ahn-dn": DELTA,
    "ahn-gdn": DELTA | {"a_proj.weight", "A_log", "dt_bias", "D"},
    "ahn-mamba2": STEP | {"g_proj.weight", "g_proj.bias", "norm.weight", "o_proj.weight"},
}


def published(base: PreTrainedModel, kind: str) -> dict[str, Tensor]:
    """Random tensors with the published names and shapes for ``base``."""
    torch.manual_seed(3)
    model = retrofit.patch(base, kind, window=8)
    names = {published_name(kind, name): p.shape for name, p in model.memory_parameters()}
    if kind == "ahn-gdn":
        names |= {f"model.layers.{i}.ahn.fn.D": torch.Size([4]) for i in range(2)}
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in names.items()}


@pytest.fixture
def base(make_base: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return make_base("Qwen2")


@pytest.mark.parametrize("name", ["ahn_gdn", "ahn_mamba2"])
def test_the_oracle_in_the_published_layout(name: str, shared: Path, tmp_path: Path) -> None:
    tensors = load_file(shared / "oracles" / f"{name}.safetensors")
    settings = json.loads((shared / "oracles" / f"{name}.json").read_text())
    weights = {key.removeprefix("weights."): tensor for key, tensor in tensors.items() if key.startswith("weights.")}
    base = transformers.Qwen2ForCausalLM(Qwen2Config(**settings["base"])).eval()
    base.load_state_dict({key: tensor for key, tensor in weights.items() if ".ahn." not in key})
    base.save_pretrained(tmp_path / "base")
    memory = {key: tensor for key, tensor in weights.items() if ".ahn." in key}
    folder = write_published(tmp_path / "ahn", name.replace("_", "-"), memory, base.config)

    model = retrofit.convert_ahn(base, folder, window=8, sinks=2)
    with torch.no_grad():
        close(model(tensors["input_ids"]).logits, tensors["prefill.logits"], 1e-5)
    assert not any(key.endswith(".D") for key, _ in model.memory_parameters())

    arguments = ["convert", str(tmp_path / "base"), str(folder), "-o", str(tmp_path / "adapter")]
    done = CliRunner().invoke(app, [*arguments, "--window", "8", "--sinks", "2"])
    assert done.exit_code == 0, done.output
    loaded = retrofit.load_adapter(base, tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(loaded(tensors["input_ids"]).logits, model(tensors["input_ids"]).logits)


@pytest.mark.parametrize("kind", VARIANTS)
def test_every_variant_is_a_rename(kind: str, base: PreTrainedModel, tmp_path: Path) -> None:
    tensors = published(base, kind)
    assert {name.partition(".ahn.fn.")[2] for name in tensors} == PUBLISHED[kind]
    model = retrofit.convert_ahn(base, write_published(tmp_path / "ahn", kind, tensors, base.config))
    memory = model.config.memory
    assert (memory["kind"], memory["window"], memory["sinks"]) == (kind, 32640, 128)
    for name, parameter in model.memory_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, tensors[published_name(kind, name)].float())


D = "model.layers.1.ahn.fn.D"
Edit = Callable[[dict[str, Tensor]], Any]
EDITS: dict[str, tuple[Edit, str]] = {
    "missing": (lambda t: t.pop("model.layers.1.ahn.fn.A_log"), r"lacks model.layers.1.ahn.fn.A_log:"),
    "without D": (lambda t: [t.pop(D), t.pop(D.replace("1", "0"))], r"lacks model.layers.0.ahn.fn.D and 1 more"),
    "extra": (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"also has model.norm.weight"),
    "a layer too many": (lambda t: t.update({D.replace("1", "2"): torch.ones(4)}), r"also has model.layers.2.ahn.fn.D"),
    "misshapen": (lambda t: t.update({D: torch.ones(5)}), r"shape model.layers.1.ahn.fn.D \(\(5,\), not \(4,\)\)"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_wrong_tensors_are_named(edit: str, base: PreTrainedModel, tmp_path: Path) -> None:
    change, message = EDITS[edit]
    tensors = published(base, "ahn-gdn")
    change(tensors)
    with pytest.raises(RetrofitError, match=message):
        retrofit.convert_ahn(base, write_published(tmp_path / "ahn", "ahn-gdn", tensors, base.config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_ahn_implementation": "Mamba"}, "'Mamba' is not one of .*did you mean 'Mamba2'"),
        ({"_ahn_implementation": None}, "give the folder of published AHN weights"),
        ({"use_q_proj": True}, "use_q_proj=True, which Retrofit cannot convert"),
        ({"fa_layer_ids": "0,1"}, "fa_layer_ids='0,1'"),
        ({"num_hidden_layers": 36}, "num_hidden_layers=36, this base has 2"),
        ({"rope_theta": 1e6}, "rope_theta=1000000.0, this base has 10000.0"),
        ({"model_type": "qwen3"}, "model_type=qwen3, this base has qwen2"),
    ],
    ids=str,
)
def test_wrong_configurations(changes: dict[str, Any], message: str, base: PreTrainedModel, tmp_path: Path) -> None:
    folder = write_published(tmp_path / "ahn", "ahn-gdn", {}, base.config, **changes)
    with pytest.raises(RetrofitError, match=message):
        retrofit.convert_ahn(base, folder)


def test_a_configuration_of_transformers_5(base: PreTrainedModel, tmp_path: Path) -> None:
    tensors = published(base, "ahn-dn")
    folder = write_published(tmp_path / "ahn", "ahn-dn", tensors, base.config)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    (folder / "config.json").write_text(json.dumps(config))
    retrofit.convert_ahn(base, folder)
    config["rope_parameters"]["rope_theta"] = 5.0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RetrofitError, match=r"rope_theta=5\.0, this base has 10000\.0"):
        retrofit.convert_ahn(base, folder)


def test_folders_that_are_none(base: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match=r"has no config\.json"):
        retrofit.convert_ahn(base, tmp_path)
    with pytest.raises(RetrofitError, match="not a Hub id"):
        retrofit.convert_ahn(base, tmp_path / "no" / "such" / "folder")
    folder = write_published(tmp_path / "ahn", "ahn-dn", published(base, "ahn-dn"), base.config)
    (folder / "config.json").write_text("[1")
    with pytest.raises(RetrofitError, match="cannot be read"):
        retrofit.convert_ahn(base, folder)


@pytest.mark.parametrize("size", [None, 0, 100])
def test_damaged_weights(size: int | None, base: PreTrainedModel, tmp_path: Path) -> None:
    folder = write_published(tmp_path / "ahn", "ahn-dn", published(base, "ahn-dn"), base.config)
    if size is None:
        (folder / WEIGHTS).unlink()
    else:
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])
    with pytest.raises(RetrofitError, match="missing, damaged or cut short"):
        retrofit.convert_ahn(base, folder)

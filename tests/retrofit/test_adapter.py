"""Adapters: what is written comes back, damaged or foreign ones are refused, nothing is left half-written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import retrofit
from patches.errors import RetrofitError
from patches.kinds import KINDS
from retrofit.adapter import CONFIG, PEFT_TYPE, WEIGHTS
from retrofit.export import export_model
from tests.helpers import SIZE, S, W, awake, capacity, logits, tokens

MakeBase = Callable[..., PreTrainedModel]
IDS = tokens(2, 30)


@pytest.fixture
def saved(make_base: MakeBase, tmp_path: Path) -> Path:
    """An adapter folder for ``make_base("Qwen2")``."""
    retrofit.save_adapter(awake(make_base("Qwen2"), "ahn-gdn"), tmp_path / "adapter")
    return tmp_path / "adapter"


def edit(folder: Path, **changes: Any) -> None:
    """Change ``adapter_config.json``; ``a__b`` is key b of the mapping a."""
    config = json.loads((folder / CONFIG).read_text())
    for path, value in changes.items():
        *parents, key = path.split("__")
        place = config
        for parent in parents:
            place = place[parent]
        place[key] = value
    (folder / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back(family: str, kind: str, make_base: MakeBase, tmp_path: Path) -> None:
    model = awake(make_base(family), kind, layers=[1], others="window")
    retrofit.save_adapter(model, tmp_path / "adapter")
    again = retrofit.load_adapter(make_base(family), tmp_path / "adapter")
    assert again.config.memory == model.config.memory
    assert torch.equal(logits(again, IDS), logits(model, IDS))
    trained = [name for name, p in model.memory_parameters() if p.requires_grad]  # what is calibrated is not
    assert [name for name, p in again.memory_parameters() if p.requires_grad] == trained
    assert bool(trained) == KINDS[kind].trainable


@pytest.mark.parametrize("kind", ["none", *SIZE])
def test_windows_and_options_by_layer_come_back(kind: str, make_base: MakeBase, tmp_path: Path) -> None:
    model = awake(make_base("Qwen2"), kind, by_layer={"0-1": {"window": 5, **SIZE.get(kind, {})}})
    retrofit.save_adapter(model, tmp_path / "adapter")
    again = retrofit.load_adapter(make_base("Qwen2"), tmp_path / "adapter")
    assert again.config.memory == model.config.memory
    assert [memory.window for memory in again.model.memories().values()] == [5, 5]
    assert torch.equal(logits(again, IDS), logits(model, IDS))


def test_on_a_base_by_path_and_on_a_patched_model(saved: Path, make_base: MakeBase, tmp_path: Path) -> None:
    base = make_base("Qwen2")
    base.save_pretrained(tmp_path / "base")
    expected = logits(awake(base, "ahn-gdn"), IDS)
    assert torch.equal(logits(retrofit.load_adapter(str(tmp_path / "base"), str(saved)), IDS), expected)
    assert torch.equal(logits(retrofit.load_adapter(retrofit.patch(base, "none", 3), saved), IDS), expected)
    model = retrofit.load_adapter(tmp_path / "base", saved, model_kwargs={"dtype": torch.bfloat16})
    assert model.dtype == torch.bfloat16


def test_the_last_window_is_saved(make_base: MakeBase, tmp_path: Path) -> None:
    model = awake(make_base("Qwen2"), "ahn-gdn")
    model.set_window(5, 3)
    retrofit.save_adapter(model, tmp_path / "adapter")
    assert capacity(retrofit.load_adapter(make_base("Qwen2"), tmp_path / "adapter")) == 8


def test_what_is_in_the_folder(saved: Path, make_base: MakeBase) -> None:
    assert {file.name for file in saved.iterdir()} == {CONFIG, WEIGHTS, "README.md", ".retrofit"}
    config = json.loads((saved / CONFIG).read_text())
    assert (config["peft_type"], config["task_type"]) == (PEFT_TYPE, "CAUSAL_LM")
    assert (config["memory"]["window"], config["memory"]["sinks"]) == (W, S)
    assert not {"base", "base_revision", "rotary_dtype"} & config["memory"].keys(), "the base's, not the adapter's"
    weights = load_file(saved / WEIGHTS)
    names = {f"base_model.model.{name}" for name, _ in awake(make_base("Qwen2"), "ahn-gdn").memory_parameters()}
    assert weights.keys() == names
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert (saved / WEIGHTS).stat().st_size < 30_000, "more than the memory is in it"


def test_a_model_cast_as_a_whole_is_saved_in_float32(make_base: MakeBase, tmp_path: Path) -> None:
    model = awake(make_base("Qwen2"), "ahn-gdn").to(torch.bfloat16)
    retrofit.save_adapter(model, tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    again = retrofit.load_adapter(make_base("Qwen2").to(torch.bfloat16), tmp_path / "adapter")
    assert torch.equal(logits(again, tokens(1, 30)), logits(model, tokens(1, 30)))


def test_only_a_retrofit_has_an_adapter(make_base: MakeBase, tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match=r"patch it first with retrofit\.patch"):
        retrofit.save_adapter(make_base("Qwen2"), tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_kept(saved: Path, make_base: MakeBase) -> None:
    model = awake(make_base("Qwen2"), "ahn-dn")
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    with pytest.raises(RetrofitError, match="--overwrite"):
        retrofit.save_adapter(model, saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    retrofit.save_adapter(model, saved, overwrite=True)
    assert retrofit.load_adapter(make_base("Qwen2"), saved).config.memory["kind"] == "ahn-dn"


def test_nothing_is_half_written(make_base: MakeBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("retrofit.adapter.save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        retrofit.save_adapter(awake(make_base("Qwen2"), "ahn-gdn"), tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [0, 4, 100, -1, -1000])
def test_weights_cut_short(saved: Path, make_base: MakeBase, cut: int) -> None:
    data = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(data[:cut])
    with pytest.raises(RetrofitError, match="damaged or cut short"):
        retrofit.load_adapter(make_base("Qwen2"), saved)


def test_weights_that_are_none(saved: Path, make_base: MakeBase) -> None:
    (saved / WEIGHTS).write_bytes(bytes(range(256)) * 20)
    with pytest.raises(RetrofitError, match="damaged or cut short"):
        retrofit.load_adapter(make_base("Qwen2"), saved)
    (saved / WEIGHTS).unlink()
    with pytest.raises(RetrofitError, match="missing"):
        retrofit.load_adapter(make_base("Qwen2"), saved)
    torch.save({}, saved / "adapter_model.bin")
    with pytest.raises(RetrofitError, match="missing"):
        retrofit.load_adapter(make_base("Qwen2"), saved)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda weights: weights.pop(sorted(weights)[0]), "lacks model.layers.0.self_attn.memory.A_log"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "also has extra: these weights are not for this memory"),
        (
            lambda weights: weights.update({sorted(weights)[0]: torch.zeros(5)}),
            r"has in another shape .*A_log \(\(5,\), not \(4,\)\)",
        ),
    ],
)
def test_tensors_that_do_not_fit(saved: Path, make_base: MakeBase, change: Callable[[dict], Any], says: str) -> None:
    weights = load_file(saved / WEIGHTS)
    change(weights)
    save_file(weights, saved / WEIGHTS)
    with pytest.raises(RetrofitError, match=says):
        retrofit.load_adapter(make_base("Qwen2"), saved)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', '{"peft_type": "LORA"}', "[" * 100_000])
def test_a_configuration_that_is_garbage(saved: Path, make_base: MakeBase, text: str) -> None:
    (saved / CONFIG).write_text(text)
    with pytest.raises(RetrofitError, match=r"cannot be read|is an adapter of type"):
        retrofit.load_adapter(make_base("Qwen2"), saved)
    (saved / CONFIG).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RetrofitError, match="cannot be read"):
        retrofit.load_adapter(make_base("Qwen2"), saved)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"memory": None}, "has no 'memory': the adapter is damaged"),
        ({"memory": {}}, "has no 'kind'"),
        ({"memory__kind": "ahn-gnd"}, "did you mean"),
        ({"memory__kind": ["ahn-gdn"]}, "a name as its kind"),
        ({"memory__kind": "ahn-dn"}, "also has .*: these weights are not for this memory"),
        ({"memory__window": "8"}, "whole number"),
        ({"memory__sinks": -1}, "0 or more"),
        ({"memory__layers": 5}, "list of layer indices"),
        ({"memory__layers": [5]}, "not a layer of this base"),
        ({"memory__others": {}}, "one of full, window"),
        ({"memory__options": 3}, "a mapping as its options"),
        ({"memory__options": {"window": 3}}, "no option 'window'"),
        ({"memory__options": {"base": 3}}, "no option 'base'"),
        ({"memory__surprise": 1}, "unknown key 'surprise'"),
        ({"fingerprint": None}, "has no 'fingerprint'"),
        ({"fingerprint": {}}, "fingerprint .* is damaged"),
        ({"fingerprint__config": 3}, "fingerprint .* is damaged"),
        ({"fingerprint__samples": "!"}, "fingerprint .* is damaged"),
        ({"fingerprint__samples": "QUJD"}, "fingerprint .* is damaged"),
        ({"fingerprint__samples": 3}, "fingerprint .* is damaged"),
    ],
)
def test_a_configuration_with_a_wrong_value(saved: Path, make_base: MakeBase, change: dict, says: str) -> None:
    edit(saved, **change)
    with pytest.raises(RetrofitError, match=says):
        retrofit.load_adapter(make_base("Qwen2"), saved)


def test_no_adapter_there(make_base: MakeBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_base("Qwen2")
    with pytest.raises(RetrofitError, match=f"no {CONFIG}: give the folder of an adapter"):
        retrofit.load_adapter(base, tmp_path)
    with pytest.raises(RetrofitError, match="there is no folder"):
        retrofit.load_adapter(base, tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(RetrofitError, match="there is no folder"):
        retrofit.load_adapter(base, tmp_path / "file")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RetrofitError, match="no adapter of that name could be fetched from the Hub"):
        retrofit.load_adapter(base, "user/nothing-here")


def test_from_the_hub(saved: Path, make_base: MakeBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the Hub: this revision, the three files and nothing else."""
    asked: dict[str, Any] = {}

    def download(repo_id: str, **how: Any) -> str:
        asked.update(how, repo_id=repo_id)
        return str(saved)

    monkeypatch.setattr("retrofit.hub_folder.snapshot_download", download)
    retrofit.load_adapter(make_base("Qwen2"), "user/adapter", revision="v2", token="t")
    assert (asked["repo_id"], asked["revision"], asked["token"]) == ("user/adapter", "v2", "t")
    assert sorted(asked["allow_patterns"]) == sorted([CONFIG, WEIGHTS, "README.md"])


# ---- whose adapter it is ----


@pytest.mark.parametrize("saved_in", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loaded_in", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_base_in_another_dtype(
    saved_in: torch.dtype, loaded_in: torch.dtype, make_base: MakeBase, tmp_path: Path
) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}  # dozens of weights to get wrong
    retrofit.save_adapter(awake(make_base("Qwen2", **wide).to(saved_in), "ahn-gdn"), tmp_path / "adapter")
    model = retrofit.load_adapter(make_base("Qwen2", **wide).to(loaded_in), tmp_path / "adapter")
    assert model.dtype == loaded_in


@pytest.mark.parametrize("by", [0.02, 0.05])
@pytest.mark.parametrize("which", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_a_fine_tune_of_one_weight_is_another_base(saved: Path, make_base: MakeBase, which: str, by: float) -> None:
    tuned = make_base("Qwen2")
    weight = dict(tuned.named_parameters())[which]
    with torch.no_grad():
        weight.mul_(1 + by * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(RetrofitError, match=r"1 of its \d+ weights .*check_base=False"):
        retrofit.load_adapter(tuned, saved)
    model = retrofit.load_adapter(tuned, saved, check_base=False)
    assert torch.equal(next(model.memory_parameters())[1], next(awake(tuned, "ahn-gdn").memory_parameters())[1])


def test_a_slight_fine_tune_of_everything_is_another_base(saved: Path, make_base: MakeBase) -> None:
    tuned = make_base("Qwen2")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight.mul_(1 + 0.0017 * torch.randn(weight.shape, generator=generator))
    with pytest.raises(RetrofitError, match="a fine-tune, or another model"):
        retrofit.load_adapter(tuned, saved)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"seed": 1}, "weights have other values"),
        ({"vocab_size": 103}, "vocab_size is 103, not 101"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, not 2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters"),
    ],
)
def test_another_model_is_another_base(saved: Path, make_base: MakeBase, other: dict[str, Any], says: str) -> None:
    with pytest.raises(RetrofitError, match=says):
        retrofit.load_adapter(make_base("Qwen2", **other), saved)


def test_another_family_is_another_base(saved: Path, make_base: MakeBase) -> None:
    with pytest.raises(RetrofitError, match="model_type is llama, not qwen2"):
        retrofit.load_adapter(make_base("Llama"), saved)


def test_a_trained_memory_is_not_part_of_the_fingerprint(saved: Path, make_base: MakeBase, tmp_path: Path) -> None:
    model = retrofit.load_adapter(make_base("Qwen2"), saved)
    with torch.no_grad():
        for _, parameter in model.memory_parameters():
            parameter.add_(1)
    retrofit.save_adapter(model, tmp_path / "trained")
    both = [json.loads((folder / CONFIG).read_text())["fingerprint"] for folder in (saved, tmp_path / "trained")]
    assert both[0] == both[1]


def test_a_folder_that_moved(saved: Path, make_base: MakeBase, tmp_path: Path) -> None:
    shutil.move(saved, tmp_path / "else where")
    retrofit.load_adapter(make_base("Qwen2"), tmp_path / "else where")


def test_a_spoilt_memory_is_not_exported(make_base: MakeBase, tmp_path: Path) -> None:
    model = awake(make_base("Qwen2"), "ahn-gdn")
    with torch.no_grad():
        next(model.memory_parameters())[1].view(-1)[0] = torch.nan
    with pytest.raises(RetrofitError, match="values that are not finite: nothing was saved"):
        export_model(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()

"""Loading checkpoints: everything that can be wrong with a folder is said in one sentence with what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

import retrofit
from patches.errors import RetrofitError
from retrofit import loading
from retrofit.export import export_model
from retrofit.loading import bfloat16_is_slow, check_tokenizer, load_base, load_config, load_tokenizer
from tests.conftest import tiny_base
from tests.helpers import awake, logits, tokens


@pytest.fixture(scope="module")
def pristine(byte_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whole checkpoints to damage copies of: a base, the same in shards, an export."""
    folder = tmp_path_factory.mktemp("pristine")
    base = load_base(str(byte_checkpoint))
    base.save_pretrained(folder / "sharded", max_shard_size="60KB")
    awake(base, "ahn-gdn").save_pretrained(folder / "export")
    return {"base": byte_checkpoint, "sharded": folder / "sharded", "export": folder / "export"}


def damaged(source: Path, target: Path, file: str, change: Callable[[bytes], bytes | None]) -> str:
    """A copy of ``source`` with one file changed, or without it."""
    shutil.copytree(source, target)
    new = change((target / file).read_bytes())
    (target / file).unlink()
    if new is not None:
        (target / file).write_bytes(new)
    return str(target)


def settings(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda old: json.dumps({**json.loads(old), **changes}).encode()


def test_whole_ones_load(pristine: dict[str, Path]) -> None:
    ids = tokens(1, 20)
    expected = logits(load_base(str(pristine["base"])), ids)
    assert torch.equal(logits(load_base(str(pristine["sharded"])), ids), expected)
    export = load_base(str(pristine["export"]))
    with export.memory_off():
        assert torch.equal(logits(export, ids), expected)
    assert load_base(str(pristine["base"]), dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("path", ["/no/such/checkpoint", "no such checkpoint!", "a/b/c"])
def test_no_such_path(path: str) -> None:
    for load in (load_config, load_base):
        with pytest.raises(RetrofitError, match=f"there is no folder '{path}'"):
            load(path)


def test_no_such_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RetrofitError, match="there is no folder 'user/model', and the Hub cannot be reached"):
        load_base("user/model")


def test_no_checkpoint_folder(pristine: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match="is a file: give the checkpoint's folder"):
        load_base(str(pristine["base"] / "config.json"))
    with pytest.raises(RetrofitError, match=r"has no config\.json and no GGUF file: give a checkpoint folder"):
        load_base(str(tmp_path))
    with pytest.raises(RetrofitError, match=r"'' has no config\.json"):
        load_base("")


@pytest.mark.parametrize("text", [b"", b'{"model_type": "qw', b"\xff\xfe\x00", b"[1]", b"{}", b"null"])
def test_a_configuration_that_is_garbage(pristine: dict[str, Path], tmp_path: Path, text: bytes) -> None:
    path = damaged(pristine["base"], tmp_path / "x", "config.json", lambda _: text)
    with pytest.raises(RetrofitError, match=r"not a valid JSON file|families supported|cannot be loaded"):
        load_base(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "'gpt2' model cannot be retrofitted: the families supported are qwen2, qwen3"),
        ({"model_type": "qwen4"}, "families supported are qwen2, qwen3, llama, mistral"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Z"}}, "families supported"),
        ({"hidden_size": "wide"}, "cannot be loaded"),
        ({"num_attention_heads": 0}, "cannot be loaded"),
        ({"hidden_act": "nothing"}, "cannot be loaded: KeyError: 'nothing'"),
        ({"rope_parameters": {"rope_type": "none", "rope_theta": 1.0}}, "cannot be loaded"),
        ({"hidden_size": 32}, "config.json and weights differ in their shapes"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "lacks 12 of the model's weights"),
    ],
)
def test_a_configuration_with_a_wrong_value(
    pristine: dict[str, Path], tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(RetrofitError, match=says):
        load_base(damaged(pristine["base"], tmp_path / "x", "config.json", settings(**change)))


@pytest.mark.parametrize("cut", [0, 4, 100, -1, -5000])
def test_weights_cut_short(pristine: dict[str, Path], tmp_path: Path, cut: int) -> None:
    with pytest.raises(RetrofitError, match=r"damaged or cut short.*fetch the checkpoint again"):
        load_base(damaged(pristine["base"], tmp_path / "x", "model.safetensors", lambda old: old[:cut]))


def test_weights_that_are_none(pristine: dict[str, Path], tmp_path: Path) -> None:
    garbage = damaged(pristine["base"], tmp_path / "x", "model.safetensors", lambda _: bytes(range(256)) * 9)
    with pytest.raises(RetrofitError, match="damaged or cut short"):
        load_base(garbage)


def test_pickled_weights_are_not_read(pristine: dict[str, Path], tmp_path: Path) -> None:
    path = damaged(pristine["base"], tmp_path / "x", "model.safetensors", lambda _: None)
    with pytest.raises(RetrofitError, match="no weights in safetensors format: convert them"):
        load_base(path)
    torch.save(load_base(str(pristine["base"])).state_dict(), Path(path) / "pytorch_model.bin")
    with pytest.raises(RetrofitError, match="no weights in safetensors format: convert them"):
        load_base(path)


def test_shards(pristine: dict[str, Path], tmp_path: Path) -> None:
    shard = sorted(file.name for file in pristine["sharded"].glob("model-*.safetensors"))[1]
    index = "model.safetensors.index.json"
    for i, (file, change, says) in enumerate(
        (
            (shard, lambda _: None, f"cannot be loaded.*{shard}"),
            (shard, lambda old: old[:300], "damaged or cut short"),
            (index, lambda _: b"{", "cannot be loaded"),
            (index, lambda _: b"{}", "cannot be loaded"),
        )
    ):
        with pytest.raises(RetrofitError, match=says):
            load_base(damaged(pristine["sharded"], tmp_path / str(i), file, change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"window": 0}, "1 or more"),
        ({"kind": "ahn-gnd"}, "did you mean"),
        ({"layers": [9]}, "not a layer"),
        ({"options": {"z": 1}}, "no option 'z'"),
        ({"options": 5}, "a mapping as its options"),
        ({"rotary_dtype": "x"}, "rotary_dtype"),
        ({"surprise": 1}, "unknown key 'surprise'"),
    ],
)
def test_an_export_with_a_wrong_memory(
    pristine: dict[str, Path], tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    memory = json.loads((pristine["export"] / "config.json").read_text())["memory"]
    new = settings(memory={**memory, **change})
    with pytest.raises(RetrofitError, match=says):
        load_base(damaged(pristine["export"], tmp_path / "x", "config.json", new))


def test_an_export_without_its_memory(pristine: dict[str, Path], tmp_path: Path) -> None:
    for i, memory in enumerate((None, [1])):
        with pytest.raises(RetrofitError, match=r"has no memory|must be a mapping"):
            load_base(damaged(pristine["export"], tmp_path / str(i), "config.json", settings(memory=memory)))


def test_whoever_chooses_bfloat16_is_told_where_it_is_slow(
    pristine: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_base(str(pristine["base"]), dtype="bfloat16").save_pretrained(tmp_path)

    def told(path: Path = pristine["base"], **how: Any) -> str:
        capsys.readouterr()
        load_base(str(path), **how)
        return capsys.readouterr().err

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(loading, "bfloat16_is_slow", lambda: True)
    assert "choose dtype float32" in told(dtype="bfloat16")
    assert "choose dtype float32" in told(dtype=torch.bfloat16)
    assert not told(dtype="float32")
    assert "choose dtype float32" in told(tmp_path, dtype="auto"), "the checkpoint's own is bfloat16"
    assert not told(tmp_path), "nothing was chosen"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not told(dtype="bfloat16"), "one process of several says it"
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setattr(loading, "bfloat16_is_slow", lambda: False)
    assert not told(dtype="bfloat16")
    monkeypatch.setattr(loading, "bfloat16_is_slow", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not told(dtype="bfloat16"), "a GPU computes in it"


def test_bfloat16_is_slow_where_it_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, slow in (
        ({torch.bfloat16: 2.0, torch.float32: 1.0}, True),
        ({torch.bfloat16: 0.5, torch.float32: 1.0}, False),
    ):
        bfloat16_is_slow.cache_clear()
        monkeypatch.setattr(loading, "_seconds", seconds.__getitem__)
        assert bfloat16_is_slow() is slow
    bfloat16_is_slow.cache_clear()
    monkeypatch.undo()
    assert 0 < loading._seconds(torch.float32) < 1


def test_wrong_keywords_are_named(pristine: dict[str, Path]) -> None:
    with pytest.raises(RetrofitError, match="dtyp"):
        retrofit.patch(str(pristine["base"]), "none", 8, model_kwargs={"dtyp": "auto"})


def test_code_beside_a_checkpoint_is_not_run(pristine: dict[str, Path], tmp_path: Path) -> None:
    """Neither asked for nor trusted: a folder of a known family is loaded with the family's own code."""
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", None]}
    path = damaged(pristine["base"], tmp_path / "x", "config.json", settings(auto_map=auto_map))
    (Path(path) / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit")
    assert type(load_base(path)).__name__ == "Qwen2ForCausalLM"
    load_tokenizer(path)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer(pristine: dict[str, Path], byte_tokenizer: PreTrainedTokenizerFast) -> None:
    found = load_tokenizer(str(pristine["base"]))
    assert found("hello")["input_ids"] == byte_tokenizer("hello")["input_ids"]


@pytest.fixture
def words() -> PreTrainedTokenizerFast:
    """A token for each word: a class of model that Qwen2's tokenizer has not."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_tokenizer_beside_an_export_loads_as_it_was(
    family: str, words: PreTrainedTokenizerFast, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    export = retrofit.patch(tiny_base(family, vocab_size=len(byte_tokenizer)), "none", window=8)
    for tokenizer in (words, byte_tokenizer):
        export_model(export, tmp_path, tokenizer, overwrite=True)
        again = AutoTokenizer.from_pretrained(tmp_path)
        assert type(again) is type(tokenizer)
        assert again("one two 3 .")["input_ids"] == tokenizer("one two 3 .")["input_ids"]


def test_a_tokenizer_that_would_load_as_another_is_refused(words: PreTrainedTokenizerFast) -> None:
    check_tokenizer(words, tiny_base("Llama").config)
    with pytest.raises(RetrofitError, match=r"beside a 'qwen2' model, loads as a Qwen2Tokenizer with other ids"):
        check_tokenizer(words, tiny_base("Qwen2").config)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_tokenizer_of_one_s_own_beside_a_base_loads_as_it_was(
    family: str, words: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """AutoTokenizer takes Qwen2's class for it, with which every text is empty."""
    tiny_base(family).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    found = load_tokenizer(str(tmp_path))
    assert type(found) is type(words)
    assert found("one two 3")["input_ids"] == words("one two 3")["input_ids"] != []


def test_a_tokenizer_with_ids_beyond_the_model_is_refused(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(RetrofitError, match=r"ids up to 258, the base has embeddings for 101"):
        export_model(retrofit.patch(tiny_base("Qwen2"), "none", window=8), tmp_path / "out", byte_tokenizer)
    assert not (tmp_path / "out").exists()


def test_no_tokenizer(pristine: dict[str, Path], tmp_path: Path, make_base: Callable[..., PreTrainedModel]) -> None:
    """transformers makes one up that knows a handful of special tokens; text would become nothing but those."""
    for family in ("Qwen2", "Qwen3", "Llama", "Mistral"):
        make_base(family).save_pretrained(tmp_path / family)
        with pytest.raises(RetrofitError, match=r"has no (usable )?tokenizer.*save one beside the checkpoint"):
            load_tokenizer(str(tmp_path / family))
    with pytest.raises(RetrofitError, match="tokenizer"):
        load_tokenizer("/no/such/folder")


@pytest.mark.parametrize("text", [b"garbage", b"", b"{}", b"\xff\xfe\x00", b'{"version": "1.0"}'])
def test_a_tokenizer_that_is_garbage(pristine: dict[str, Path], tmp_path: Path, text: bytes) -> None:
    with pytest.raises(RetrofitError, match=r"has no (usable )?tokenizer"):
        load_tokenizer(damaged(pristine["base"], tmp_path / "x", "tokenizer.json", lambda _: text))
    with pytest.raises(RetrofitError, match=r"has no (usable )?tokenizer"):
        load_tokenizer(damaged(pristine["base"], tmp_path / "y", "tokenizer.json", lambda _: None))

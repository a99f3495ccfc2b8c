"""Every kind of source gives the same tokens, in order; what cannot be read is named."""

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from distill.data import load_rows, tokenize
from distill.sources import documents
from patches.errors import RetrofitError
from retrofit.loading import load_tokenizer

DOCUMENTS = ["w5 w6 w7", "w8", "w9 w10"]
TOKENS = [5, 6, 7, 2, 8, 2, 9, 10, 2]  # 2 ends each

Writer = Callable[[Path, list[str]], Path]


def as_jsonl(folder: Path, texts: list[str]) -> Path:
    path = folder / "a.jsonl"
    path.write_text("\n\n".join(json.dumps({"text": text, "id": 1}) for text in texts))
    return path


def as_parquet(folder: Path, texts: list[str]) -> Path:
    path = folder / "a.parquet"
    datasets.Dataset.from_dict({"text": texts}).to_parquet(path)
    return path


def as_parquet_folder(folder: Path, texts: list[str]) -> Path:
    (folder / "hub").mkdir()
    datasets.Dataset.from_dict({"text": texts}).to_parquet(folder / "hub" / "train.parquet")
    return folder / "hub"


def as_saved(folder: Path, texts: list[str]) -> Path:
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "saved")
    return folder / "saved"


def as_saved_splits(folder: Path, texts: list[str]) -> Path:
    splits = {"test": ["w50"], "train": texts}
    datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": s}) for name, s in splits.items()}).save_to_disk(
        folder / "splits"
    )
    return folder / "splits"


@pytest.fixture(autouse=True)
def no_cache_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("write", [as_jsonl, as_parquet, as_parquet_folder, as_saved, as_saved_splits])
def test_every_source_gives_its_documents_in_order(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, write: Writer
) -> None:
    source = str(write(tmp_path, [*DOCUMENTS[:2], "  ", DOCUMENTS[2]]))
    assert list(documents(source)) == DOCUMENTS
    assert tokenize(source, tokenizer).tolist() == TOKENS


def test_a_text_file_is_one_document(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "a.txt"
    path.write_text("w5 w6\n\nw7\n")
    assert tokenize(str(path), tokenizer).tolist() == [5, 6, 7, 2]


def test_a_hub_id_goes_to_load_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str) -> datasets.DatasetDict:
        asked.append(name)
        return datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": DOCUMENTS})})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(documents("user/name")) == DOCUMENTS
    assert asked == ["user/name"]


def test_rows_are_consecutive_and_the_last_tokens_are_held_out(
    text_file: Path, text: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    split = load_rows(str(text_file), tokenizer, seq_len=50, holdout=0.2)
    stream = torch.tensor([int(word[1:]) for word in text.split()] + [2])
    assert split.tokens == len(stream) == 3001
    assert (len(split.train), len(split.held_out)) == (48, 12)
    assert torch.equal(split.train.rows.flatten(), stream[:2400].int())
    assert torch.equal(split.held_out.rows.flatten(), stream[2401:3001].int())
    assert torch.equal(split.held_out[1]["input_ids"], stream[2451:2501])


BAD_LINES = {
    "not JSON": (b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
    "no text": (b'{"text": "a"}\n\n{"txt": "b"}\n', "line 3 has no string 'text' (its keys are 'txt')"),
    "text is no string": (b'{"text": 3}\n', "line 1 has no string 'text'"),
    "no object": (b"[1]\n", "line 1 has no string 'text' (it is no object)"),
    "not UTF-8": (b'{"text": "a"}\n{"text": "\xff"}\n', "line 2 is not UTF-8"),
    "too deep": (b"[" * 100_000, "line 1 is not JSON"),
}


@pytest.mark.parametrize(("content", "said"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(RetrofitError) as error:
        list(documents(str(path)))
    assert f"{path}, {said}" in str(error.value)


def test_a_column_other_than_text_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"content": DOCUMENTS}).save_to_disk(tmp_path / "saved")
    with pytest.raises(RetrofitError, match="has no column 'text', only 'content'"):
        list(documents(str(tmp_path / "saved")))


def test_splits_without_train_are_named(tmp_path: Path) -> None:
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": DOCUMENTS})}).save_to_disk(tmp_path / "saved")
    with pytest.raises(RetrofitError, match="has no split 'train', only 'test'"):
        list(documents(str(tmp_path / "saved")))


@pytest.mark.parametrize("name", ["missing.txt", "some/folder/missing.jsonl", "./missing", "~/missing"])
def test_a_missing_path_is_said_without_asking_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", pytest.fail)
    with pytest.raises(RetrofitError, match="there is no file or folder"):
        list(documents(name))


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = as_parquet(tmp_path, DOCUMENTS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RetrofitError, match="cannot be read as Parquet"):
        list(documents(str(path)))


@pytest.mark.parametrize("content", ["", " \n\t\n"])
def test_an_empty_file_is_said_to_be_empty(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, content: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(content)
    with pytest.raises(RetrofitError, match="is empty"):
        load_rows(str(path), tokenizer, seq_len=4)


def test_too_short_says_how_many_tokens_there_are_and_are_needed(
    text_file: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(RetrofitError, match="holds 3001 tokens, and at least 4000 are needed") as error:
        load_rows(str(text_file), tokenizer, seq_len=400)
    assert "10% held out" in str(error.value)


def test_a_checkpoint_without_tokenizer_is_refused(checkpoint: Path) -> None:
    assert load_tokenizer(str(checkpoint)).eos_token_id == 2
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).unlink()
    with pytest.raises(RetrofitError, match="tokenizer"):
        load_tokenizer(str(checkpoint))


def test_json_lines_by_any_name_and_no_json(tmp_path: Path) -> None:
    line = '\ufeff{"text": "to be"}\n'  # with the mark that some editors put in front
    for name in ("a.ndjson", "b.JSONL"):
        (tmp_path / name).write_text(line, encoding="utf-8")
        assert list(documents(str(tmp_path / name))) == ["to be"]
    (tmp_path / "c.json").write_text("[]")
    with pytest.raises(RetrofitError, match="JSON Lines"):
        documents(str(tmp_path / "c.json"))

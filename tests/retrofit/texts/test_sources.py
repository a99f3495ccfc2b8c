"""Every kind of source gives the same records, in order; what cannot be read is named."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from patches.errors import RetrofitError
from retrofit.texts.sources import open_source
from retrofit.texts.tokens import find_column
from tests.helpers import load_rows

DOCUMENTS = ["w5 w6 w7", "w8", "w9 w10"]

Writer = Callable[[Path, dict[str, list[Any]]], Path]


@pytest.fixture(autouse=True)
def no_cache_outside(datasets_cache: Path) -> None:
    """Nothing is left in the user's own."""


def as_jsonl(folder: Path, columns: dict[str, list[Any]]) -> Path:
    path = folder / "a.jsonl"
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    path.write_text("\n\n".join(json.dumps({**row, "id": 1}) for row in rows))
    return path


def as_parquet(folder: Path, columns: dict[str, list[Any]]) -> Path:
    path = folder / "a.parquet"
    datasets.Dataset.from_dict(columns).to_parquet(path)
    return path


def as_parquet_folder(folder: Path, columns: dict[str, list[Any]]) -> Path:
    (folder / "hub").mkdir()
    datasets.Dataset.from_dict(columns).to_parquet(folder / "hub" / "train.parquet")
    return folder / "hub"


def as_saved(folder: Path, columns: dict[str, list[Any]]) -> Path:
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "saved")
    return folder / "saved"


def as_saved_splits(folder: Path, columns: dict[str, list[Any]]) -> Path:
    splits = {"test": {name: values[:1] for name, values in columns.items()}, "train": columns}
    data = datasets.DatasetDict({name: datasets.Dataset.from_dict(part) for name, part in splits.items()})
    data.save_to_disk(folder / "splits")
    return folder / "splits"


WRITERS = [as_jsonl, as_parquet, as_parquet_folder, as_saved, as_saved_splits]


def values(source: str | Path, column: str = "text", **options: Any) -> list[Any]:
    return [record[column] for record in open_source(str(source), **options).data]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("write", WRITERS)
def test_every_source_gives_its_records_in_order(tmp_path: Path, write: Writer, streaming: bool) -> None:
    path = write(tmp_path, {"text": DOCUMENTS})
    assert values(path, streaming=streaming) == DOCUMENTS


@pytest.mark.parametrize("write", WRITERS)
def test_conversations_come_as_lists_of_messages(tmp_path: Path, write: Writer) -> None:
    chats = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "user", "content": "c"}],
    ]
    assert values(write(tmp_path, {"messages": chats}), "messages") == chats


@pytest.mark.parametrize("name", ["user/name", "user/name-v1.5", "name", "user/a.b_c"])
def test_an_id_goes_to_load_dataset_with_its_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*args: Any, **options: Any) -> datasets.DatasetDict:
        asked.append((args, options))
        return datasets.DatasetDict({"small": datasets.Dataset.from_dict({"text": DOCUMENTS})})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert values(name, name="en", revision="abc", split="small") == DOCUMENTS
    assert asked == [((name, "en"), {"revision": "abc", "streaming": False})]


@pytest.mark.parametrize("write", [as_parquet_folder, as_saved_splits])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_split_there_is_none_of_names_those_there_are(tmp_path: Path, write: Writer, streaming: bool) -> None:
    path = str(write(tmp_path, {"text": DOCUMENTS}))
    with pytest.raises(RetrofitError) as error:
        open_source(path, split="trian", streaming=streaming)
    assert "has no split 'trian' (did you mean 'train'?), only " in str(error.value)
    assert "'train': choose one as data_split" in str(error.value)


def test_a_local_folder_has_splits(tmp_path: Path) -> None:
    assert values(as_saved_splits(tmp_path, {"text": DOCUMENTS}), split="test") == DOCUMENTS[:1]


def test_text_files_are_documents(tmp_path: Path) -> None:
    for name, text in (("b.txt", "w5 w6\r\n\r\nw7\r\n"), ("a [1].txt", "\ufeffw8")):
        (tmp_path / name).write_bytes(text.encode())
    assert values(tmp_path / "b.txt") == ["w5 w6\r\n\r\nw7\r\n"]
    assert values(tmp_path / "a [1].txt") == ["w8"]  # without the mark that some editors put in front
    (tmp_path / "README.md").write_text("no text")
    assert values(tmp_path) == ["w8", "w5 w6\r\n\r\nw7\r\n"]
    (tmp_path / "b.JSONL").write_text('\ufeff{"text": "to be"}\n', encoding="utf-8")
    assert values(tmp_path / "b.JSONL") == ["to be"]
    (tmp_path / "c.json").write_text("[]")
    with pytest.raises(RetrofitError, match="JSON Lines"):
        open_source(str(tmp_path / "c.json"))


@pytest.mark.parametrize(
    ("write", "options", "said"),
    [
        (as_jsonl, {"name": "en"}, "data_name: .* is no dataset of the Hub and has none"),
        (as_parquet, {"revision": "main"}, "data_revision: .* is no dataset of the Hub and has none"),
        (as_saved, {"name": "en"}, "data_name: .* is no dataset of the Hub and has none"),
        (as_parquet_folder, {"revision": "main"}, "data_revision: .* is no dataset of the Hub and has none"),
        (as_jsonl, {"split": "test"}, "has no split 'test', only 'train'"),
        (as_saved, {"split": "test"}, "has no split 'test', only 'train'"),
    ],
)
def test_options_that_a_source_has_not_are_refused(
    tmp_path: Path, write: Writer, options: dict[str, str], said: str
) -> None:
    with pytest.raises(RetrofitError, match=said):
        open_source(str(write(tmp_path, {"text": DOCUMENTS})), **options)


BAD_LINES = {
    "not JSON": (b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
    "no text": (b'{"text": "a"}\n\n{"txt": "b"}\n', "line 3: 'text' is null, not a string"),
    "no object": (b'{"text": "a"}\n[1]\n', "line 2 is a list: every line must be one object"),
    "not UTF-8": (b'{"text": "a"}\n{"text": "\xff"}\n', "line 2 is not UTF-8"),
    "a number": (b'{"text": "a"}\n{"text": 1}\n', "line 2: 'text' is a number, not a string"),
    "too deep": (b"[" * 100_000, "line 1 is not JSON"),
    "too long a number": (b'{"text": ' + b"1" * 5000 + b"}", "line 1 is not JSON"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("content", "said"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_one_sentence(
    tmp_path: Path, chat_tokenizer: Any, content: bytes, said: str, streaming: bool
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(RetrofitError) as error:
        load_rows(str(path), chat_tokenizer, max_length=2, streaming=streaming)
    assert str(error.value).startswith(f"{path}, {said}")


@pytest.mark.parametrize("name", ["missing.txt", "some/folder/missing.jsonl", "a/b.jsonl", "./missing", "~/missing"])
def test_a_missing_path_is_said_without_asking_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", pytest.fail)
    with pytest.raises(RetrofitError, match="there is no file or folder"):
        open_source(name)


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = as_parquet(tmp_path, {"text": DOCUMENTS})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RetrofitError, match=r"a.parquet cannot be read: ArrowInvalid"):
        values(path)


def test_what_stands_beside_a_conversation_is_said_not_to_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_column("a", ["system", "conversations"], "auto") == "conversations"
    assert "also has 'system', which is not read" in capsys.readouterr().err


def test_a_full_disk_is_not_blamed_on_the_source(
    tmp_path: Path, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    path = as_jsonl(tmp_path, {"text": DOCUMENTS})
    monkeypatch.setattr(datasets.arrow_writer.ArrowWriter, "write", full)
    with pytest.raises(RetrofitError, match=r"the cache of datasets has no room for .*: make room there"):
        load_rows(str(path), chat_tokenizer, max_length=2)


def test_what_is_neither_file_nor_folder_is_one_sentence(tmp_path: Path, chat_tokenizer: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling.jsonl").symlink_to("nothing")
    for place in (tmp_path / "pipe", tmp_path / "loop", tmp_path / "dangling.jsonl", "/dev/null"):
        with pytest.raises(RetrofitError, match="is a pipe, a device or a link that leads nowhere: write the text to"):
            open_source(str(place))
    if Path("/proc/self/mem").is_file():  # a file that fails at the first byte
        with pytest.raises(RetrofitError, match="/proc/self/mem cannot be read: Input/output error"):
            load_rows("/proc/self/mem", chat_tokenizer, max_length=2)


def test_a_parquet_file_without_rows_is_empty(tmp_path: Path, chat_tokenizer: Any, datasets_cache: Path) -> None:
    path = as_parquet(tmp_path, {"text": DOCUMENTS[:0]})
    for streaming in (False, True):
        with pytest.raises(RetrofitError, match=r"is empty|is too short"):
            load_rows(str(path), chat_tokenizer, max_length=2, streaming=streaming)

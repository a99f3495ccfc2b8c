"""Every verb that takes texts reads them alike: the same records, the same tokens, the same words for what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from patches.errors import RetrofitError
from retrofit.texts.tokens import read_sequences
from tests.helpers import load_rows
from tests.retrofit.texts.test_sources import BAD_LINES, WRITERS, Writer
from tests.test_cli import refused, run

TEXTS = ["the quick brown fox jumps over the lazy dog. " * 12, "to be", "or not to be, that is the question: " * 20]
CHAT = [{"role": "user", "content": "?" * 90}, {"role": "assistant", "content": "!" * 90}]


@pytest.fixture(autouse=True)
def no_cache_outside(datasets_cache: Path) -> None:
    """Nothing is left in the user's own."""


def as_texts(folder: Path, columns: dict[str, list[Any]]) -> Path:
    (folder / "texts").mkdir()
    for number, text in enumerate(columns["text"]):
        (folder / "texts" / f"{number}.txt").write_text(text)
    (folder / "texts" / "README.md").write_text("no text")
    return folder / "texts"


@pytest.mark.parametrize("write", [*WRITERS, as_texts])
def test_every_source_gives_the_rows_that_are_trained_on(
    write: Writer, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    source = str(write(tmp_path, {"text": TEXTS}))
    split = "test" if source.endswith("splits") else "train"
    (tmp_path / "held-out.txt").write_text(TEXTS[0])
    how = {"packing": False, "data_split": split, "eval_data": str(tmp_path / "held-out.txt")}
    trained = load_rows(source, byte_tokenizer, max_length=50, **how)
    whole = [row for row in (trained.train[at]["input_ids"] for at in range(len(trained.train))) if len(row) == 50]
    assert read_sequences(source, byte_tokenizer, length=50).tolist() == [row.tolist() for row in whole]
    assert len(whole) == (10 if split == "test" else 24)


def test_conversations_are_read_through_the_template(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"messages": CHAT}) for _ in range(5)))
    trained = load_rows(str(path), chat_tokenizer, max_length=400, holdout=0.2)
    rows = read_sequences(str(path), chat_tokenizer, length=200)
    assert rows.tolist() == [trained.train[0]["input_ids"][:200].tolist()] * 5


def verbs(base: object, source: object, out: Path) -> dict[str, list[object]]:
    return {
        "distill": ["distill", base, "--data", source, "--max-length", 32, "--window", 8, "-o", out],
        "patch": ["patch", base, "--memory", "expected", "--window", 8, "--data", source, "-o", out],
        "eval": ["eval", base, "--window", 8, "--data", source, "-o", out],
    }


@pytest.mark.parametrize("verb", verbs("", "", Path()))
@pytest.mark.parametrize("bad", ["not JSON", "no text", "not UTF-8"])
def test_a_bad_line_is_the_same_sentence_for_every_verb(
    verb: str, bad: str, tmp_path: Path, byte_checkpoint: Path
) -> None:
    content, said = BAD_LINES[bad]
    (tmp_path / "a.jsonl").write_bytes(content)
    refused(run(*verbs(byte_checkpoint, tmp_path / "a.jsonl", tmp_path / "out")[verb]), f"a.jsonl, {said}")
    assert not (tmp_path / "out").exists()


def test_of_texts_beside_conversations_the_texts_are_read(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    """These verbs have no key that says which."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT, "text": "x" * 9}))
    assert chat_tokenizer.decode(read_sequences(str(tmp_path / "a.jsonl"), chat_tokenizer, length=9)[0]) == "x" * 9
    with pytest.raises(RetrofitError, match="set data_format"):
        load_rows(str(tmp_path / "a.jsonl"), chat_tokenizer, max_length=9)

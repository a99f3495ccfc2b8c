"""Rows: packed text and conversations, what is held out, what is counted, tokenised once."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from distill.data.rows import PaddingCollator
from patches.errors import RetrofitError
from retrofit.loading import load_tokenizer
from retrofit.texts.chat import ChatTokenizer
from tests.helpers import load_rows

TURNS = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


@pytest.fixture(autouse=True)
def no_cache_outside(datasets_cache: Path) -> None:
    """Nothing is left in the user's own."""


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def write_chats(path: Path, count: int) -> str:
    """Conversations whose answers grow."""
    chats = [[TURNS[0], {"role": "assistant", "content": "x" * (number + 1)}] for number in range(count)]
    return write_lines(path, [{"messages": chat} for chat in chats])


# ---- packed text ----


def test_documents_are_packed_in_order_with_an_end_after_each(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = ["w5 w6 w7", "w8", "  ", "w9 w10", "w11 w12 w13"]
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    split = load_rows(source, tokenizer, max_length=4, holdout=0.34)
    assert split.train.batch()[0].tolist() == [[5, 6, 7, 2], [8, 2, 9, 10]]
    assert split.held_out.batch()[0].tolist() == [[2, 11, 12, 13]]
    assert split.tokens == {"all": 13, "train": 8, "held_out": 4}
    assert (split.counts.read, split.counts.empty, split.counts.tokens_left_over) == (5, 1, 1)
    assert split.sentence() == "5 documents read; 1 empty, left out; 1 tokens left over that fill no row"


def test_rows_are_consecutive_and_the_last_tokens_are_held_out(
    text_file: Path, text: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    split = load_rows(str(text_file), tokenizer, max_length=50, holdout=0.2)
    stream = torch.tensor([int(word[1:]) for word in text.split()] + [2])
    assert split.tokens["all"] == len(stream) == 3001
    assert (len(split.train), len(split.held_out)) == (48, 12)
    assert torch.equal(split.train.batch()[0].flatten(), stream[:2400])
    assert torch.equal(split.held_out.batch()[0].flatten(), stream[2400:3000])
    assert torch.equal(split.held_out[1]["input_ids"], stream[2450:2500])


def test_short_documents_are_left_out_and_only_the_first_are_read(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = ["w5 w6 w7", "w8", "w9 w10 w11", "w12 w13 w14"]
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    split = load_rows(source, tokenizer, max_length=4, holdout=0.5, min_length=2, max_samples=3)
    assert [part.batch()[0].tolist() for part in (split.train, split.held_out)] == [[[5, 6, 7, 2]], [[9, 10, 11, 2]]]
    assert split.sentence() == "3 documents read (max_samples: 3); 1 of at most 2 tokens, left out"


@pytest.mark.parametrize("content", ["", " \n\t\n"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_an_empty_file_is_said_to_be_empty(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, name: str, content: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(RetrofitError, match="is empty"):
        load_rows(str(path), tokenizer, max_length=4)


def test_too_short_says_how_many_rows_there_are(text_file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(RetrofitError, match="with 1% of 7 rows of 400 tokens held out, one part is empty"):
        load_rows(str(text_file), tokenizer, max_length=400, holdout=0.01)


# ---- conversations ----


def test_conversations_are_rows_with_their_answers_labelled(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    split = load_rows(write_chats(tmp_path / "a.jsonl", 10), chat_tokenizer, max_length=64, holdout=0.2)
    assert (len(split.train), len(split.held_out)) == (8, 2)
    row = split.held_out[1]
    answer = row["input_ids"][row["labels"] != -100]
    assert chat_tokenizer.decode(answer) == "x" * 10 + "<|end|>\n"
    assert torch.equal(answer, row["labels"][row["labels"] != -100])
    sizes = [len(split.train[index]["input_ids"]) for index in range(8)]
    assert sizes == sorted(sizes)  # in the order of the file
    assert split.tokens["train"] == sum(sizes)
    assert split.row_tokens == sum(sizes) / 8


def test_long_ones_are_cut_and_short_ones_left_out_and_both_counted(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    source = write_chats(tmp_path / "a.jsonl", 10)
    whole = load_rows(source, chat_tokenizer, max_length=64, holdout=0.2)
    lengths = [len(part[index]["input_ids"]) for part in (whole.train, whole.held_out) for index in range(len(part))]
    split = load_rows(source, chat_tokenizer, max_length=lengths[6], holdout=0.2, min_length=lengths[1], max_samples=9)
    kept = [len(part[index]["input_ids"]) for part in (split.train, split.held_out) for index in range(len(part))]
    assert kept == [*lengths[2:7], lengths[6], lengths[6]]
    counts = {"read": 9, "empty": 0, "short": 2, "truncated": 2, "tokens_cut": 3, "tokens_left_over": 0}
    assert asdict(split.counts) == counts
    assert f"2 cut to {lengths[6]} tokens, 3 tokens lost" in split.sentence()


def test_the_collator_pads_on_the_right_to_a_multiple_of_eight(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    split = load_rows(write_chats(tmp_path / "a.jsonl", 10), chat_tokenizer, max_length=64)
    rows = [split.train[0], split.train[5]]
    assert split.collator == PaddingCollator(chat_tokenizer.pad_token_id)
    batch = split.collator(rows)
    assert batch.pop("row").tolist() == [0, 5]
    assert {part.shape for part in batch.values()} == {(2, -(-len(rows[1]["input_ids"]) // 8) * 8)}
    for number, row in enumerate(rows):
        size = len(row["input_ids"])
        assert torch.equal(batch["input_ids"][number, :size], row["input_ids"])
        assert torch.equal(batch["labels"][number, :size], row["labels"])
        assert (batch["labels"][number, size:] == -100).all()
        assert batch["attention_mask"][number].tolist() == [1] * size + [0] * (batch["labels"].shape[1] - size)


def test_the_format_is_seen_by_the_columns_or_said(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    both = write_lines(tmp_path / "both.jsonl", [{"text": "w" * 20, "conversations": TURNS}] * 4)
    options: dict[str, Any] = {"max_length": 20, "holdout": 0.5}
    with pytest.raises(RetrofitError, match="has both 'text' and 'conversations': set data_format"):
        load_rows(both, chat_tokenizer, **options)
    assert load_rows(both, chat_tokenizer, data_format="text", **options).source.format == "text"
    assert load_rows(both, chat_tokenizer, data_format="chat", **options).source.format == "chat"
    other = write_lines(tmp_path / "other.jsonl", [{"content": "a"}])
    with pytest.raises(RetrofitError, match="no column 'text' or 'messages' or 'conversations', only 'content'"):
        load_rows(other, chat_tokenizer, **options)
    with pytest.raises(RetrofitError, match="no column 'messages' or 'conversations', only 'text'"):
        load_rows(write_lines(tmp_path / "text.jsonl", [{"text": "a"}]), chat_tokenizer, data_format="chat", **options)


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(RetrofitError, match="has no chat template"):
        load_rows(write_chats(tmp_path / "a.jsonl", 4), tokenizer, max_length=64)


def test_too_few_conversations_are_said(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    source = write_chats(tmp_path / "a.jsonl", 4)
    with pytest.raises(RetrofitError, match="with 10% of 4 conversations held out, one part is empty"):
        load_rows(source, chat_tokenizer, max_length=64)
    with pytest.raises(RetrofitError, match="4 of at most min_length 60 tokens were left out"):
        load_rows(source, chat_tokenizer, max_length=64, min_length=60)


# ---- once ----


def test_the_second_load_does_not_tokenise(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_chats(tmp_path / "a.jsonl", 10)
    first = load_rows(source, chat_tokenizer, max_length=64)
    read = []
    original = ChatTokenizer.encode

    def counted(self: ChatTokenizer, records: Any) -> Any:
        read.append(len(records))
        return original(self, records)

    monkeypatch.setattr(ChatTokenizer, "encode", counted)
    again = load_rows(source, chat_tokenizer, max_length=64, holdout=0.3, min_length=1)
    assert not read
    assert torch.equal(first.train[3]["labels"], again.train[3]["labels"])

    load_rows(source, chat_tokenizer, max_length=32)
    load_rows(source, chat_tokenizer, max_length=64, max_samples=8, holdout=0.2)
    other = load_tokenizer(str(save(chat_tokenizer, tmp_path / "same")))
    other("some text", truncation=True, max_length=2, padding="max_length")  # it remembers, and it does not matter
    load_rows(source, other, max_length=64)
    assert len(read) == 2  # the same tokenizer, loaded from another place, is the same
    other.chat_template = other.chat_template.replace("\n", " ")
    load_rows(source, other, max_length=64)
    assert len(read) == 3
    load_rows(write_chats(tmp_path / "a.jsonl", 11), chat_tokenizer, max_length=64)
    assert len(read) == 4


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    tokenizer.save_pretrained(folder)
    return folder


def test_what_was_not_read_to_its_end_is_read_again(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "a.jsonl"
    write_lines(path, [{"text": "w5 w6 w7"}, {"text": 3}])
    with pytest.raises(RetrofitError, match=r"a.jsonl, line 2: 'text' is a number, not a string"):
        load_rows(str(path), tokenizer, max_length=2)
    with pytest.raises(RetrofitError, match=r"a.jsonl, line 2: 'text' is a number, not a string"):
        load_rows(str(path), tokenizer, max_length=2)


def test_the_cache_is_that_of_datasets(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, text_file: Path, datasets_cache: Path
) -> None:
    load_rows(str(text_file), tokenizer, max_length=50)
    assert len(list((datasets_cache / "generator").rglob("*.arrow"))) == 1
    data = datasets.Dataset.from_dict({"text": [text_file.read_text()]})
    data.save_to_disk(tmp_path / "saved")
    before = sorted((tmp_path / "saved").iterdir())
    load_rows(str(tmp_path / "saved"), tokenizer, max_length=50)
    assert sorted((tmp_path / "saved").iterdir()) == before  # nothing is left in the user's folder


def test_a_checkpoint_without_tokenizer_is_refused(checkpoint: Path) -> None:
    assert load_tokenizer(str(checkpoint)).eos_token_id == 2
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).unlink()
    with pytest.raises(RetrofitError, match="tokenizer"):
        load_tokenizer(str(checkpoint))


# ---- documents by themselves, several sources, a source to be scored ----


def test_documents_can_have_rows_of_their_own(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["w5 w6 w7 w8 w9", "  ", "w10", "w11 w12", "w13 w14 w15"]
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    split = load_rows(source, tokenizer, max_length=4, holdout=0.2, packing=False)
    rows = [split.train[index] for index in range(len(split.train))]
    assert [row["input_ids"].tolist() for row in rows] == [[5, 6, 7, 8], [9, 2], [10, 2], [11, 12, 2]]
    assert all(torch.equal(row["input_ids"], row["labels"]) for row in rows)
    assert split.held_out.batch()[0].tolist() == [[13, 14, 15, 2]]
    assert split.held_out_part == "the last 20% of its documents"
    assert (split.counts.read, split.counts.empty, split.counts.truncated) == (5, 1, 0)
    long = load_rows(source, tokenizer, max_length=4, holdout=0.4, packing=False, min_length=3)
    assert [row["input_ids"].tolist() for row in map(long.train.__getitem__, range(2))] == [[5, 6, 7, 8], [9, 2]]
    assert (long.counts.read, long.counts.short) == (5, 2)
    padded = split.collator([rows[0], rows[1]])  # type: ignore[misc]
    assert padded["labels"][1].tolist() == [9, 2, *[-100] * 6]
    streamed = load_rows(source, tokenizer, max_length=4, eval_rows=1, packing=False, streaming=True)
    assert next(iter(streamed.train))["input_ids"].tolist() == [9, 2]


def test_sources_are_mixed_by_weight(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    one = write_lines(tmp_path / "one.jsonl", [{"text": " ".join(["w5"] * 79)}])
    two = write_lines(tmp_path / "two.jsonl", [{"text": " ".join(["w6"] * 159)}])
    split = load_rows(one, tokenizer, max_length=4, holdout=0.5, mix={two: 0.5})
    first = [split.train[index]["input_ids"][0].item() for index in range(len(split.train))]
    assert (first.count(5), first.count(6)) == (10, 10)
    assert first[:4].count(5) == 2  # evenly spread
    held_out = split.held_out.select(slice(6)).batch()[0][:, 0].tolist()
    assert (held_out.count(5), held_out.count(6)) == (2, 4)  # by their sizes: nothing is weighed there
    assert split.tokens == {"all": 200, "train": 80, "held_out": 120}  # as a pass reads them
    twice = load_rows(one, tokenizer, max_length=4, holdout=0.5, mix={two: 2})
    assert len(twice.train) == 10 + 2 * 20
    with pytest.raises(RetrofitError, match="larger weight"):
        load_rows(one, tokenizer, max_length=4, holdout=0.5, mix={two: 0.01})


def test_text_and_conversations_are_mixed(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    text = tmp_path / "text.txt"
    text.write_text("once upon a time " * 20)
    chats = write_chats(tmp_path / "chats.jsonl", 10)
    split = load_rows(str(text), chat_tokenizer, max_length=16, holdout=0.2, mix={chats: 1})
    batch = split.collator([split.train[index] for index in range(4)])  # type: ignore[misc]
    assert batch["input_ids"].shape == batch["labels"].shape
    assert len(split.train) == 25


@pytest.mark.parametrize("streaming", [False, True])
def test_a_source_of_its_own_is_scored(
    tmp_path: Path, text_file: Path, tokenizer: PreTrainedTokenizerFast, streaming: bool
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(" ".join(["w7"] * 100))
    source = write_lines(tmp_path / "text.jsonl", [{"text": text_file.read_text()}])
    split = load_rows(source, tokenizer, max_length=50, eval_data=str(other), streaming=streaming)
    assert split.held_out.batch()[0].tolist() == [[7] * 50] * 2
    assert split.held_out_part == f"all of {other}"
    assert streaming or len(split.train) == 60  # type: ignore[arg-type]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("where", ["data", "mix"])
@pytest.mark.parametrize("way", ["itself", "a link", "a copy"])
def test_a_text_that_is_trained_on_is_not_scored(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, text: str, way: str, where: str, streaming: bool
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"{name} {text}"}))
    scored = path = tmp_path / "a.jsonl"
    if way != "itself":
        scored = tmp_path / "c.jsonl"
        scored.symlink_to(path) if way == "a link" else shutil.copy(path, scored)
    source, mix = (path, {}) if where == "data" else (tmp_path / "b.jsonl", {str(path): 1.0})
    with pytest.raises(RetrofitError, match=r"eval_data: .*\.jsonl is trained on, too: give another text"):
        load_rows(
            str(source), tokenizer, max_length=50, mix=mix, eval_data=str(scored), streaming=streaming and not mix
        )


@pytest.mark.parametrize("streaming", [False, True])
def test_another_split_of_a_dataset_is_another_text(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, text: str, streaming: bool
) -> None:
    """A dataset that is scored is read with its defaults, the split ``train``."""
    half = len(text) // 2
    parts = {"train": [text[:half]], "test": [text[half:]]}
    splits = {name: datasets.Dataset.from_dict({"text": part}) for name, part in parts.items()}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    saved = str(tmp_path / "saved")
    found = load_rows(saved, tokenizer, max_length=50, data_split="test", eval_data=saved, streaming=streaming)
    assert len(found.held_out)
    with pytest.raises(RetrofitError, match="is trained on, too"):
        load_rows(saved, tokenizer, max_length=50, eval_data=saved, streaming=streaming)

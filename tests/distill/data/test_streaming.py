"""Streams: the rows a stream gives, the rows it holds out, a resumption at the same row, the share of each process."""

import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import retrofit
from distill import DistillConfig, DistillTrainer
from distill.data.split import Split
from distill.data.streaming import StreamedRows
from patches.errors import RetrofitError
from tests.helpers import load_rows


@pytest.fixture(autouse=True)
def no_cache_outside(datasets_cache: Path) -> None:
    """Nothing is left in the user's own."""


def documents(count: int) -> list[str]:
    """Of different lengths, all words different."""
    words = torch.randint(3, 101, (count, 12), generator=torch.Generator().manual_seed(0)).tolist()
    return [" ".join(f"w{word}" for word in row[: 5 + number % 8]) for number, row in enumerate(words)]


def chats(count: int) -> list[list[dict[str, str]]]:
    """Questions and answers of different lengths."""
    pairs = [(("user", "?" * (n % 5 + 1)), ("assistant", "x" * (n % 7 + 20))) for n in range(count)]
    return [[{"role": role, "content": text} for role, text in pair] for pair in pairs]


def write_lines(path: Path, key: str, values: list[Any]) -> str:
    path.write_text("\n".join(json.dumps({key: value}) for value in values))
    return str(path)


def ids(rows: Any, count: int) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in islice(rows, count)]


def test_packed_rows_are_those_of_the_whole_text_and_the_first_are_held_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    source = write_lines(tmp_path / "a.jsonl", "text", documents(60))
    whole = load_rows(source, tokenizer, max_length=20, holdout=0.06)
    expected = whole.train.batch()[0].tolist()
    split = load_rows(source, tokenizer, max_length=20, streaming=True, eval_rows=3)
    assert split.held_out.batch()[0].tolist() == expected[:3]
    assert split.held_out_part == "its first 3 rows"
    once = whole.tokens["all"] // 20 - 3  # rows
    rows = ids(split.train, 2 * once)
    assert rows[: len(expected) - 3] == expected[3:]
    assert rows[once:] == rows[:once]  # pass after pass
    list(islice(split.train, 2 * once + 1))
    assert split.counts.tokens_left_over == 2 * (whole.tokens["all"] % 20) > 0
    assert ids(split.train, 5) == expected[3:8]  # from the start each time
    assert split.tokens == {"all": None, "train": None, "held_out": 60}


def test_conversations_are_those_of_the_cached_form(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    source = write_lines(tmp_path / "a.jsonl", "messages", chats(20))
    options: dict[str, Any] = {"max_length": 48, "min_length": 44}
    whole = load_rows(source, chat_tokenizer, holdout=0.2, **options)
    split = load_rows(source, chat_tokenizer, streaming=True, eval_rows=2, **options)
    rows = [part[index] for part in (whole.train, whole.held_out) for index in range(len(part))]
    streamed = [split.held_out[0], split.held_out[1], *islice(split.train, len(rows) - 2)]
    for row, other in zip(rows, streamed, strict=True):
        assert torch.equal(row["input_ids"], other["input_ids"])
        assert torch.equal(row["labels"], other["labels"])
    counts = asdict(split.counts)
    assert counts == asdict(whole.counts) | {"read": counts["read"], "short": counts["short"]}
    assert 0 < counts["short"] <= whole.counts.short  # those up to the last row that was taken
    assert counts["truncated"] > 0
    list(islice(split.train, len(rows) - 2))
    assert asdict(split.counts) == counts  # of this reading alone


def test_a_stream_reads_no_more_than_it_is_asked_for(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "a.jsonl"
    text = json.dumps({"text": "w5 " * 30})
    path.write_text("\n".join([*[text] * 3000, "this line is broken"]))
    split = load_rows(str(path), tokenizer, max_length=20, streaming=True, eval_rows=4)
    assert len(ids(split.train, 3000)) == 3000
    with pytest.raises(RetrofitError, match="line 3001 is not JSON"):
        ids(split.train, 5000)


@pytest.mark.parametrize("rows", [0, 2])
def test_a_stream_that_is_too_short_says_so(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, rows: int) -> None:
    source = write_lines(tmp_path / "a.jsonl", "text", ["w5 " * (20 * rows + 3)])
    with pytest.raises(RetrofitError, match="is too short"):
        next(iter(load_rows(source, tokenizer, max_length=20, streaming=True, eval_rows=2).train))


# ---- in the trainer ----


def split_of(kind: str, folder: Path, words: PreTrainedTokenizerFast, chat: PreTrainedTokenizerFast) -> Split:
    if kind == "text":
        source = write_lines(folder / "a.jsonl", "text", documents(60))
        return load_rows(source, words, max_length=40, streaming=True, eval_rows=2)
    source = write_lines(folder / "a.jsonl", "messages", chats(13))
    return load_rows(source, chat, max_length=64, streaming=True, eval_rows=2)


@pytest.mark.parametrize("kind", ["text", "chat"])
@pytest.mark.parametrize("stop", [2, 6])  # in the first pass and in a later one
def test_resuming_a_stream_is_bit_equal(
    make_base: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
    chat_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    kind: str,
    stop: int,
) -> None:
    def trainer(folder: str) -> DistillTrainer:
        split = split_of(kind, tmp_path, tokenizer, chat_tokenizer)
        torch.manual_seed(3)
        base = make_base("Qwen2", vocab_size=len(chat_tokenizer))
        model = retrofit.patch(base, memory="ahn-gdn", window=6, sinks=2)
        args = DistillConfig(
            output_dir=str(tmp_path / folder),
            max_steps=8,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            window_sampling="ahn",
            logging_steps=1,
            save_steps=2,
            save_total_limit=None,
            dataloader_pin_memory=False,
            report_to="none",
            use_cpu=True,
        )
        return DistillTrainer(model, args, split.train, split.held_out, split.collator)

    whole, again = trainer("whole"), trainer("again")
    whole.train()
    torch.manual_seed(99)  # whatever state the new process is in
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{stop}"))
    losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (whole, again)]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 8  # every step its own rows
    for (name, one), (_, other) in zip(whole.model.memory_parameters(), again.model.memory_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert whole.train_dataset.counts == again.train_dataset.counts
    assert whole.evaluate()["eval_kl"] == again.evaluate()["eval_kl"]


def test_processes_share_the_rows_of_one(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    source = write_lines(tmp_path / "a.jsonl", "text", documents(60))
    split = load_rows(source, tokenizer, max_length=20, streaming=True, eval_rows=3)
    assert isinstance(split.train, StreamedRows)
    alone = ids(split.train, 12)
    shares = [ids(IterableDatasetShard(split.train, 2, num_processes=2, process_index=rank), 6) for rank in (0, 1)]
    together = [row for at in range(0, 6, 2) for share in shares for row in share[at : at + 2]]
    assert together == alone


def test_each_process_reads_for_itself(
    make_base: Callable[..., PreTrainedModel], tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = retrofit.patch(make_base("Qwen2"), memory="ahn-gdn", window=6, sinks=2)
    args = DistillConfig(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to="none")
    assert DistillTrainer(model, args).accelerator.dispatch_batches is False

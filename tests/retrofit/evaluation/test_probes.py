"""Probes made on the spot: what they hide is there, where and as long as asked for, and judged as it should be."""

import copy
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from patches.errors import RetrofitError
from retrofit.evaluation.asking import read_prompt
from retrofit.evaluation.benchmarks import load_benchmark
from retrofit.evaluation.haystack import NOISE, haystack, invented, longest, sentences_of
from retrofit.evaluation.needle import NAMES, needle_tasks
from retrofit.evaluation.recall import plain_tokens, sequence
from retrofit.evaluation.samples import Sample

# how many needles are hidden, and how many answers are asked for
COUNTS = {
    "passkey": (1, 1),
    "niah_single_1": (1, 1),
    "niah_single_2": (1, 1),
    "niah_single_3": (1, 1),
    "niah_multikey_1": (4, 1),
    "niah_multikey_2": (None, 1),  # the haystack is made of needles
    "niah_multikey_3": (None, 1),
    "niah_multivalue": (4, 4),
    "niah_multiquery": (4, 4),
}


def made(name: str, tokenizer: Any, length: int = 2500, depths: Sequence[float] = (0.5,), **how: Any) -> list[Sample]:
    (task,) = needle_tasks([name], tokenizer, [length], depths, samples=how.pop("samples", 1), **how)
    return list(task.samples)


@pytest.mark.parametrize("name", NAMES)
def test_needles_are_hidden_and_asked_for(name: str, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    (sample,) = made(name, byte_tokenizer)
    hidden, asked = COUNTS[name]
    assert len(set(sample.answers)) == asked
    assert all(answer in sample.prompt for answer in sample.answers)
    if name != "passkey":
        needles = sample.prompt.count("One of the special magic")
        assert needles == hidden if hidden else needles > 10
    question = sample.prompt[-300:]
    assert "?" in question
    assert not any(answer in question for answer in sample.answers)


@pytest.mark.parametrize("name", [name for name, (hidden, _) in COUNTS.items() if hidden != 1])
def test_every_key_and_every_value_is_there_once(name: str, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """A distractor with the key that is asked for would name a wrong value for it."""
    for seed in range(12):
        (sample,) = made(name, byte_tokenizer, 6000, seed=seed)
        needles = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", sample.prompt)
        values = dict.fromkeys(value for _, value in needles)
        assert len(values) == len(needles), "a value stands there twice"
        keys = [key for key, _ in needles]
        assert len(set(keys)) == (1 if name == "niah_multivalue" else len(keys)), "a key stands there twice"
        asked = [key for key in dict.fromkeys(keys) if key in sample.prompt.rpartition("\n")[2]]
        assert sorted(value for key, value in needles if key in asked) == sorted(sample.answers)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1500, 2501])
def test_prompt_and_answer_fill_the_length(name: str, length: int, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    (sample,) = made(name, byte_tokenizer, length)
    tokens = len(byte_tokenizer(sample.prompt)["input_ids"]) + sample.max_new_tokens
    assert length - 150 < tokens <= length  # a sentence more would be too long


def test_depth_is_where_the_needle_lies(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    samples = made("niah_single_1", byte_tokenizer, depths=(0.0, 0.25, 0.5, 0.75, 1.0))
    places = []
    for sample in samples:
        haystack = sample.prompt.split("\n")[1]
        places.append(haystack.index("One of the special") / len(haystack))
    assert places[0] == 0
    assert places[-1] > 0.9
    assert all(later - earlier == pytest.approx(0.25, abs=0.06) for earlier, later in pairwise(places))


def test_samples_differ_and_come_again(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    first, again, other = (
        made("niah_multikey_1", byte_tokenizer, samples=3, seed=seed, depths=(0.2, 0.8)) for seed in (0, 0, 1)
    )
    assert first == again
    assert len({sample.prompt for sample in [*first, *other]}) == 12
    assert len({sample.id for sample in first}) == 6


def test_the_haystack_may_be_the_user_s(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    (sample,) = made("niah_single_2", byte_tokenizer, text="It rained.\nThen it\nsnowed. ")
    assert "It rained. Then it snowed. It rained." in sample.prompt
    (noise,) = made("niah_single_1", byte_tokenizer, text="It rained.")
    assert NOISE in noise.prompt
    assert "It rained." not in noise.prompt


def test_through_the_chat_template(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    turns = "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}{% endfor %}"
    byte_tokenizer.chat_template = turns + "{% if add_generation_prompt %}<me>{% endif %}"
    try:
        (sample,) = made("passkey", byte_tokenizer, chat=True)
    finally:
        byte_tokenizer.chat_template = None
    assert sample.prompt.startswith("<user>There is an important info")
    assert sample.prompt.endswith("<me>The pass key is")


@pytest.mark.parametrize("adds", [False, True], ids=["template", "template and tokenizer"])
def test_a_chat_prompt_begins_once(adds: bool, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Llama's tokenizer and its template both write the token that begins a text; of every prompt one is read."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = "<bos>{% for turn in messages %}<u>{{ turn['content'] }}{% endfor %}<me>"
    if adds:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    row = {"context": "c", "input": "who?", "answers": ["Ann"], "all_classes": None, "_id": "x", "length": 3}
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n")
    (published,) = load_benchmark("longbench", str(tmp_path), tokenizer, tasks=["hotpotqa"])
    tasks = needle_tasks(NAMES, tokenizer, [1600], [0.5], samples=1, chat=True)
    for sample in (sample for task in [published, *tasks] for sample in task.samples):
        ids = read_prompt(tokenizer, sample)[0].tolist()
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1, sample.prompt


def test_a_template_that_refuses(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    with pytest.raises(RetrofitError, match="no chat template: do not pass --chat"):
        made("passkey", tokenizer, chat=True)
    tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(RetrofitError, match="chat template cannot be used: no system turn"):
        made("passkey", tokenizer, chat=True)


def test_what_cannot_be_asked(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(RetrofitError, match=r"probe: 'niah_single_4' is not one of .*did you mean 'niah_single_"):
        made("niah_single_4", byte_tokenizer)
    with pytest.raises(RetrofitError, match="give numbers from 0"):
        made("passkey", byte_tokenizer, depths=(1.5,))
    with pytest.raises(RetrofitError, match="niah_single_1 does not fit into 300 tokens: ask for"):
        made("niah_single_1", byte_tokenizer, 300)


def test_filling_stops_before_the_limit() -> None:
    def words(prompt: str, verbose: bool) -> dict[str, list[str]]:
        return {"input_ids": prompt.split()}

    def prompt(count: int) -> str:
        return f"read {' '.join(haystack(sentences_of('a b. c d.'), [(0.5, 'X')], count))} now"

    assert longest(prompt, words, 13) == "read a b. c d. X a b. c d. a b. now"
    assert longest(prompt, words, 1) == "read X now"
    assert len({invented(0)(i) for i in range(20)}) > 15


@pytest.mark.parametrize(("length", "count"), [(9, 2), (40, 5), (100, 16)])
def test_recall_asks_for_every_binding_once(length: int, count: int) -> None:
    vocabulary = torch.arange(10, 100)
    ids, asked = sequence(vocabulary, length, count, torch.Generator().manual_seed(0))
    assert len(ids) == length
    bound = {int(ids[2 * i]): int(ids[2 * i + 1]) for i in range(count)}
    assert len(bound) == count
    assert {int(ids[at]): int(ids[at + 1]) for at in asked} == bound
    between = ids[2 * count : length - 2 * count]
    assert not torch.isin(between, ids[: 2 * count]).any()


def test_special_tokens_are_not_drawn(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    assert plain_tokens(byte_tokenizer, 10).tolist() == [3, 4, 5, 6, 7, 8, 9]

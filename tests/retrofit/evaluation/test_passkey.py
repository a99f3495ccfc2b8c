"""Probes made on the spot: what they hide is there, where and as long as asked for, and judged as it should be."""

import copy
import random
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from patches.errors import RetrofitError
from retrofit.evaluation.contenders import Contender, plain_tokens
from retrofit.evaluation.passkey import ANSWER_TOKENS, NOISE, make_prompt, make_prompts, score_passkey
from retrofit.evaluation.recall import sequence
from retrofit.evaluation.store import ResultStore
from tests.conftest import tiny_base
from tests.helpers import awake


def made(tokenizer: PreTrainedTokenizerFast, length: int = 2500, depth: float = 0.5, **how: bool) -> tuple[str, str]:
    return make_prompt(tokenizer, length, depth, random.Random(0), **how)


@pytest.mark.parametrize("length", [350, 1500, 2501])
def test_prompt_and_answer_fill_the_length(length: int, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, key = made(byte_tokenizer, length)
    assert prompt.count(f"The pass key is {key}. Remember it.") == 1
    assert key not in prompt[-50:]
    tokens = len(byte_tokenizer(prompt)["input_ids"]) + ANSWER_TOKENS
    assert length - len(NOISE) - 1 <= tokens <= length  # a line more would be too long


def test_depth_is_where_the_key_lies(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    places = []
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        haystack = made(byte_tokenizer, depth=depth)[0].split("\n")[1]
        places.append(haystack.index("The pass key is") / len(haystack))
    assert places[0] == 0
    assert places == pytest.approx([0, 0.25, 0.5, 0.75, 1.0], abs=0.06)


def test_samples_differ_and_come_again(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    first, again, other = (make_prompts(byte_tokenizer, [400], [0.2, 0.8], samples=3, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert len({*first.values(), *other.values()}) == 12


@pytest.mark.parametrize("adds", [False, True], ids=["template", "template and tokenizer"])
def test_a_chat_prompt_begins_once(adds: bool, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Llama's tokenizer and its template both write the token that begins a text; of every prompt one is read."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = "<bos>{% for turn in messages %}<u>{{ turn['content'] }}{% endfor %}<me>"
    if adds:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    prompt, _ = made(tokenizer, chat=True)
    ids = tokenizer(prompt)["input_ids"]
    assert ids.index(tokenizer.bos_token_id) == 0
    assert ids.count(tokenizer.bos_token_id) == 1
    assert "<u>There is an important info" in prompt
    assert prompt.endswith("<me>The pass key is")


def test_what_cannot_be_asked(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    with pytest.raises(RetrofitError, match="passkey does not fit into 100 tokens: ask for"):
        made(tokenizer, 100)
    with pytest.raises(RetrofitError, match="no chat template: do not pass --chat"):
        made(tokenizer, chat=True)
    tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(RetrofitError, match="chat template cannot be used: no system turn"):
        made(tokenizer, chat=True)


@torch.no_grad()
def test_answers_are_those_of_generate(byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = awake(tiny_base("Llama", vocab_size=len(byte_tokenizer)), "ahn-gdn")
    ids = torch.randint(3, 250, (1, 33))
    prompt = byte_tokenizer.decode(ids[0])
    ids = byte_tokenizer(prompt, return_tensors="pt")["input_ids"]
    length = ids.shape[1]
    tokens = model.generate(ids, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=0)[0, length:]
    expected = byte_tokenizer.decode(tokens, skip_special_tokens=True)
    store = ResultStore(tmp_path, {})
    prompts = {(length, 0.5, 0): (prompt, expected[2:4]), (length, 0.5, 1): (prompt, "no such key")}
    score_passkey([Contender("m", model)], byte_tokenizer, store, prompts, chunk=10)
    assert [line["answers"] for line in store.results(kind="passkey")] == [{"m": expected}] * 2
    assert store.means("passkey", by="depth") == [{"length": length, "depth": 0.5, "samples": 2, "m": 0.5}]


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

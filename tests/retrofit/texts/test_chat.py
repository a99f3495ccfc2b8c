"""Conversations: both notations, which tokens are the assistant's, how long ones are cut, what is refused."""

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from patches.errors import RetrofitError
from retrofit.texts.chat import ChatTokenizer, cut, read_messages

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "né?"},
    {"role": "assistant", "content": "oui"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "non 👍"},
]
SHAREGPT = [
    {"from": "system", "value": "be brief"},
    {"from": "human", "value": "né?"},
    {"from": "gpt", "value": "oui"},
    {"from": "human", "value": "and"},
    {"from": "gpt", "value": "non 👍"},
]
PLAIN = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{%- generation %}{{ m.content }}<|end|>{% endgeneration -%}"
    "{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
)
# leaves the marks of earlier answers away, as templates of reasoning models do
REWRITING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def answers(tokenizer: Any, value: Any) -> list[str]:
    """The runs of labelled tokens, as text."""
    ((ids, answer),) = ChatTokenizer(tokenizer).encode([("here", value)])
    edges = np.flatnonzero(np.diff(answer, prepend=False, append=False)).reshape(-1, 2)
    return [tokenizer.decode(ids[start:end]) for start, end in edges]


@pytest.mark.parametrize(
    ("template", "expected"),
    [(PLAIN, ["oui<|end|>\n", "non 👍<|end|>\n"]), (MARKED, ["oui<|end|>", "non 👍<|end|>"])],
    ids=["plain", "marked"],
)
@pytest.mark.parametrize("chat", [CHAT, SHAREGPT], ids=["openai", "sharegpt"])
def test_every_answer_is_labelled_and_nothing_else(
    chat_tokenizer: PreTrainedTokenizerFast, chat: Any, template: str, expected: list[str]
) -> None:
    assert answers(with_template(chat_tokenizer, template), chat) == expected


def test_the_tokens_are_those_of_the_template(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    ((ids, _),) = ChatTokenizer(chat_tokenizer).encode([("here", CHAT)])
    assert ids.tolist() == chat_tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)


def test_what_follows_the_last_answer_is_kept_without_labels(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [*CHAT, {"role": "user", "content": "why"}]
    assert answers(chat_tokenizer, chat) == ["oui<|end|>\n", "non 👍<|end|>\n"]
    ((ids, answer),) = ChatTokenizer(chat_tokenizer).encode([("here", chat)])
    assert chat_tokenizer.decode(ids).endswith("why<|end|>\n")
    assert not answer[-1]


def test_two_answers_in_a_row_are_both_labelled(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [*CHAT[:3], {"role": "assistant", "content": "si"}]
    assert answers(chat_tokenizer, chat) == ["oui<|end|>\n", "si<|end|>\n"]


def test_a_template_that_rewrites_earlier_turns_is_refused_where_it_matters(
    chat_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = with_template(chat_tokenizer, REWRITING)
    assert answers(tokenizer, CHAT[:3]) == ["<think>oui<|end|>\n"]
    with pytest.raises(RetrofitError, match="here: the chat template writes earlier turns differently"):
        answers(tokenizer, CHAT)


def test_a_template_that_refuses_is_quoted_with_the_place(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = with_template(chat_tokenizer, "{{ raise_exception('no system please') }}")
    with pytest.raises(RetrofitError, match=r"here: the chat template refuses this conversation \(no system please\)"):
        answers(tokenizer, CHAT)


USER, REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
BAD = {
    "no list": ("hello", "here: a conversation must be a list"),
    "a mapping": ({"role": ["user"], "content": 1}, "here: a conversation must be a list"),
    "null": (None, "here: a conversation must be a list"),
    "empty": ([], "here: a conversation must be a list of at least one message"),
    "no object": ([USER, "b"], "here, message 2 is not an object"),
    "wrong role": (
        [USER, {"role": "asistant", "content": "b"}],
        r"here, message 2: 'asistant' is not one .*'assistant'\?",
    ),
    "tool": ([USER, {"role": "tool", "content": "b"}], "here, message 2: 'tool' is not one of the roles"),
    "role no string": ([{"role": ["user"], "content": "b"}], "here, message 1: 'role' is a list, not a string"),
    "no role": ([{"content": "b"}], "here, message 1 has neither 'role' nor 'from'"),
    "no content": ([{"role": "user", "content": None}], "here, message 1 has neither 'content' nor 'value'"),
    "parts": ([{"role": "user", "content": [{"type": "text"}]}], "here, message 1: 'content' is a list, not a string"),
    "tool call": ([USER, {**REPLY, "tool_calls": [{}]}], "here, message 2 holds 'tool_calls'"),
    "half a character": ([USER, {**REPLY, "content": "\ud800"}], "here, message 2: 'content' holds half a surrogate"),
    "answer first": ([REPLY, USER], "here: the conversation begins with an answer"),
    "no answer": ([USER, USER], "here: no message is the assistant's"),
}


def test_older_datasets_hold_messages_as_a_mapping_of_lists() -> None:
    chat = {"from": ["human", "gpt"], "value": ["a", "b"]}
    assert read_messages(chat, "here") == [USER, REPLY]


@pytest.mark.parametrize(("value", "said"), BAD.values(), ids=BAD)
def test_a_malformed_conversation_is_named(value: Any, said: str) -> None:
    with pytest.raises(RetrofitError, match=said):
        read_messages(value, "here")


def marks(*turns: tuple[int, int], after: int = 0) -> np.ndarray:
    """(prompt, answer) lengths as a mask."""
    return np.array([bit for prompt, reply in turns for bit in [False] * prompt + [True] * reply] + [False] * after)


@pytest.mark.parametrize(
    ("answer", "limit", "kept"),
    [
        (marks((6, 4)), 10, [[6, 4]]),  # fits
        (marks((20, 4)), 10, [[6, 4]]),  # a short answer stays whole, the prompt loses its end
        (marks((4, 20)), 10, [[4, 6]]),  # a short prompt stays whole, the answer loses its end
        (marks((10, 30)), 12, [[3, 9]]),  # neither is short: shares
        (marks((4, 2), (8, 2)), 12, [[4, 2], [4, 2]]),  # turns in order, the last in the room that is left
        (marks((8, 4), (8, 3)), 12, [[8, 4], [0, 0]]),  # no room left
        (marks((4, 2), after=9), 10, [[4, 2]]),  # what follows the last answer goes first
    ],
)
def test_long_conversations_are_cut_as_by_llama_factory(answer: np.ndarray, limit: int, kept: list[list[int]]) -> None:
    keep = cut(answer, limit)
    edges = np.flatnonzero(np.diff(answer, prepend=False, append=False)).reshape(-1, 2)
    start = 0
    for (middle, end), (prompt, reply) in zip(edges, kept, strict=True):
        assert keep[start:middle].tolist() == [True] * prompt + [False] * (middle - start - prompt)
        assert keep[middle:end].tolist() == [True] * reply + [False] * (end - middle - reply)
        start = end
    assert keep.sum() <= limit


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 70))
def test_no_cut_is_longer_than_its_limit_or_shorter_than_it_must(bits: list[bool], limit: int) -> None:
    answer = np.array([False, *bits, True])
    keep = cut(answer, limit)
    assert keep.sum() <= limit
    assert keep.sum() == min(limit, len(answer))  # here every token belongs to a turn

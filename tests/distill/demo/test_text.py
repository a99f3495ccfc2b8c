"""The demo's text: deterministic, names and surnames side by side, distances as one counts them by hand."""

from itertools import pairwise

import pytest
import torch
from transformers import AutoTokenizer

from distill.demo.text import MAX_BINDINGS, NAMES, SURNAMES, WORDS, documents, generator, recall_distance, tokenizer


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return documents(40, 256, generator(0, "test"))


@pytest.fixture(scope="module")
def texts(ids: torch.Tensor) -> list[list[str]]:
    return [[WORDS[token] for token in row] for row in ids]


def test_words_are_distinct() -> None:
    assert len(WORDS) == len(set(WORDS))


def test_same_source_same_documents(ids: torch.Tensor) -> None:
    assert torch.equal(ids, documents(40, 256, generator(0, "test")))
    assert not torch.equal(ids, documents(40, 256, generator(1, "test")))
    assert not torch.equal(ids, documents(40, 256, generator(0, "other")))


def test_shape_and_range() -> None:
    short = documents(500, 64, generator(0, "test"), people=0.9)
    assert short.shape == (500, 64)
    assert short.dtype == torch.long
    # neither a blank slot (-1) nor <pad> nor <unk> is ever left in a document
    assert WORDS.index(".") <= short.min()
    assert short.max() < len(WORDS)


def test_a_surname_follows_every_name_and_nothing_else(texts: list[list[str]]) -> None:
    for words in texts:
        for word, following in pairwise(words):
            assert (word in NAMES) == (following in SURNAMES)


def test_no_name_among_the_first_words(ids: torch.Tensor) -> None:
    short = documents(300, 64, generator(0, "test"), people=0.9)
    names = torch.tensor([WORDS.index(name) for name in NAMES])
    assert not torch.isin(torch.cat([short[:, :4], ids[:, :4]]), names).any()


def test_a_document_keeps_its_bindings(texts: list[list[str]]) -> None:
    bindings = []
    for words in texts:
        pairs = {pair for pair in pairwise(words) if pair[0] in NAMES}
        assert len(dict(pairs)) == len(pairs), "a name has two surnames"
        assert len({surname for _, surname in pairs}) == len(pairs), "two names share a surname"
        assert 2 <= len(pairs) <= MAX_BINDINGS
        bindings.append(pairs)
    assert bindings[0] != bindings[1]  # drawn afresh for each document


def test_recall_distance_equals_counting(ids: torch.Tensor, texts: list[list[str]]) -> None:
    expected = torch.zeros_like(ids)
    for row, words in enumerate(texts):
        seen: dict[str, int] = {}
        for at in range(1, len(words)):
            if words[at] in SURNAMES:
                if words[at - 1] in seen:
                    expected[row, at] = at - seen[words[at - 1]]
                seen[words[at - 1]] = at
    assert torch.equal(recall_distance(ids), expected)


def test_enough_answers_near_and_far(ids: torch.Tensor) -> None:
    distance = recall_distance(ids)
    assert 10 < (distance > 0).sum() / len(ids) < 18
    assert 3 < (distance > 36).sum() / len(ids) < 8


def test_tokenizer_round_trip(ids: torch.Tensor, texts: list[list[str]], tmp_path) -> None:
    tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == len(WORDS)
    assert loaded(" ".join(texts[0]))["input_ids"] == ids[0].tolist()
    assert loaded.decode(ids[0]) == " ".join(texts[0])
    assert loaded("zeppelin")["input_ids"] == [loaded.unk_token_id]

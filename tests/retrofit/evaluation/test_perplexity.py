"""Perplexity by size of state: what it must equal, that it reads in chunks, and where its texts come from."""

import math
from itertools import pairwise

import datasets
import pytest
import torch

import retrofit
from patches.errors import RetrofitError
from retrofit.evaluation.perplexity import POLICIES, perplexity, perplexity_by_size, table
from retrofit.evaluation.scores import evaluate
from retrofit.texts.tokens import read_sequences
from tests.conftest import tiny_base
from tests.helpers import tokens

LENGTH = 48


@pytest.fixture(scope="module")
def base():
    return tiny_base("Llama")


def test_full_attention_is_the_bases_own_loss(base):
    ids = tokens(3, LENGTH)
    with torch.no_grad():
        loss = base(ids, labels=ids).loss.item()
    found = perplexity_by_size(base, ids, [8], ["window"], chunk=7)
    assert found["full"][None] == pytest.approx(math.exp(loss), rel=1e-5)


def test_every_policy_that_holds_the_whole_text_is_full_attention(base):
    ids = tokens(2, LENGTH)
    found = perplexity_by_size(base, ids, [2 * LENGTH], chunk=16)
    assert list(found) == ["full", *POLICIES]
    for policy in POLICIES:
        assert found[policy][2 * LENGTH] == pytest.approx(found["full"][None], rel=1e-6)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_chunk_changes_nothing_and_the_size_does(base, policy):
    ids = tokens(2, LENGTH)
    by_chunk = [perplexity_by_size(base, ids, [8, 24], [policy], chunk=chunk)[policy] for chunk in (5, 16, 64)]
    for one, other in pairwise(by_chunk):
        assert one == pytest.approx(other, rel=1e-5)
    assert by_chunk[0][8] != pytest.approx(by_chunk[0][24], rel=1e-4)


@pytest.mark.parametrize(("policy", "window", "sinks"), [("window", 8, 0), ("window+4", 4, 4)])
def test_a_window_is_the_patched_model_of_that_size(base, policy, window, sinks):
    ids = tokens(2, LENGTH)
    model = retrofit.patch(base, "none", window, sinks)
    nll = evaluate(model, ids, start=0, teacher=False)["none"].mean_nll
    assert perplexity_by_size(base, ids, [8], [policy])[policy][8] == pytest.approx(math.exp(nll), rel=1e-5)


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("size", [8, 9])
def test_a_policy_holds_as_many_rows_as_its_size_says(base, policy, size):
    model = retrofit.patch(base, **POLICIES[policy](size))
    cache = model(tokens(1, LENGTH), use_cache=True).past_key_values
    memories = model.model.memories()
    assert {memory.capacity for memory in memories.values()} == {size}
    # what is held besides keys and values (scores, positions) is no more than a few numbers per row
    row = 2 * base.config.num_key_value_heads * base.config.head_dim * 4
    held = retrofit.cache_bytes(cache) / len(memories)
    assert size * row <= held < (size + 2) * row + size * 64


def test_no_more_than_a_chunk_is_read_at_once(base):
    seen = []
    model = retrofit.patch(base, "none", 8)
    model.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    with torch.no_grad():
        perplexity(model, tokens(2, 33), chunk=10)
    assert seen == [(1, 10), (1, 10), (1, 10), (1, 2)] * 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"policies": ["tovar"]}, r"did you mean 'tova'\?"),
        ({"sizes": [4]}, "these policies need 5 or more"),
        ({"sizes": [1], "policies": ["tova"]}, "need 2 or more"),
    ],
)
def test_what_cannot_be_made_is_said(base, arguments, says):
    with pytest.raises(RetrofitError, match=says):
        perplexity_by_size(base, tokens(1, LENGTH), **arguments)
    with pytest.raises(RetrofitError, match="predict nothing"):
        perplexity_by_size(base, tokens(1, 1))


def test_the_table_has_a_column_for_each_size():
    rows, columns = table({"full": {None: 7.16}, "tova": {64: 9.53, 128: 8.32}})
    assert rows == [{"policy": "full", "64": 7.16, "128": 7.16}, {"policy": "tova", "64": 9.53, "128": 8.32}]
    assert list(columns) == ["policy", "64", "128"]


def test_texts_come_from_a_folder_in_order(tmp_path, byte_tokenizer):
    (tmp_path / "2.txt").write_text("klmnopq")
    (tmp_path / "1.txt").write_text("abcdefghij")
    (tmp_path / "notes.md").write_text("zzzzzz")

    def read(**options):
        return [byte_tokenizer.decode(row) for row in read_sequences(str(tmp_path), byte_tokenizer, **options)]

    assert read(length=4) == ["abcd", "efgh", "klmn", "opq<eos>"]
    assert read(length=4, count=1) == ["abcd"]
    assert read_sequences(str(tmp_path / "2.txt"), byte_tokenizer, length=7).shape == (1, 7)
    with pytest.raises(RetrofitError, match="no text of 99 tokens"):
        read(length=99)


@pytest.mark.parametrize("split", ["test", "train"])
def test_a_datasets_test_split_is_read(monkeypatch, byte_tokenizer, split):
    asked = []
    splits = {split: datasets.Dataset.from_dict({"text": ["abcd", "efgh"]}).to_iterable_dataset()}
    splits = {"train": datasets.Dataset.from_dict({"text": ["xxxxxx"]}).to_iterable_dataset()} | splits
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or splits)
    rows = read_sequences("user/pg19", byte_tokenizer, length=4)
    assert [byte_tokenizer.decode(row) for row in rows] == ["abcd", "efgh"]
    assert asked == [(("user/pg19", None), {"revision": None, "streaming": True})]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: 1 / 0)
    with pytest.raises(RetrofitError, match=r"no file or folder here, and the dataset .* on the Hub cannot be"):
        read_sequences("user/pg19", byte_tokenizer, length=4)


@pytest.mark.parametrize("source", ["nowhere.txt", "a/b/c"])
def test_a_path_that_is_not_there_is_no_dataset(byte_tokenizer, source):
    with pytest.raises(RetrofitError, match="no file or folder"):
        read_sequences(source, byte_tokenizer)


def test_an_empty_folder_is_said(tmp_path, byte_tokenizer):
    with pytest.raises(RetrofitError, match="cannot be read: EmptyDatasetError"):
        read_sequences(str(tmp_path), byte_tokenizer)

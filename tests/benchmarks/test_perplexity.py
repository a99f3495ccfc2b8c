"""Perplexity by size of state: what it must equal, and what each policy holds."""

import math
from itertools import pairwise

import pytest
import torch

import retrofit
from benchmarks.perplexity import POLICIES, perplexity_by_size, table
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


def test_the_table_has_a_column_for_each_size():
    rows, columns = table({"full": {None: 7.16}, "tova": {64: 9.53, 128: 8.32}})
    assert rows == [{"policy": "full", "64": 7.16, "128": 7.16}, {"policy": "tova", "64": 9.53, "128": 8.32}]
    assert list(columns) == ["policy", "64", "128"]

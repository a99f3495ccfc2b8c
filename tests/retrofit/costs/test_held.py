"""Bytes: those beside a window by arithmetic, those of a cache by what it really holds."""

from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import retrofit
from retrofit.costs.held import row_bytes
from retrofit.evaluation.baselines import window_only
from tests.helpers import S, W, awake, feed, tokens

MakeBase = Callable[..., PreTrainedModel]


@pytest.mark.parametrize(
    ("kind", "gates"), [("ahn-gdn", 8), ("ahn-dn", 4)]
)  # one or two numbers for each of four heads
def test_the_state_and_the_gates_of_a_sequence(kind: str, gates: int, make_base: MakeBase) -> None:
    for dtype, each in ((torch.float32, 4), (torch.bfloat16, 4), (torch.float64, 8)):
        model = awake(make_base("Qwen2").to(dtype), kind)
        assert retrofit.kept_bytes(model) == (4 * 16 * 16 + W * gates) * each
        assert retrofit.kept_bytes(window_only(model)) == 0
        assert retrofit.kept_bytes(window_only(model, W + 3), W) == 3 * row_bytes(model.config, model.dtype)


def test_a_cache_by_hand(make_base: MakeBase) -> None:
    model = awake(make_base("Qwen2").to(torch.bfloat16), "ahn-gdn")
    _, cache = feed(model, tokens(3, 50), [50])
    rows = 2 * 2 * 16 * (W + S) * 2  # keys and values, two heads of 16, bfloat16
    gates = W * 2 * 4 * 4  # beta and log decay of four heads, float32
    assert retrofit.cache_bytes(cache) == 2 * 3 * (rows + gates + 4 * 16 * 16 * 4)


def test_while_nothing_was_evicted_it_grows_as_the_base_s(make_base: MakeBase) -> None:
    base = make_base("Qwen2")
    model = awake(base, "none")
    for length in (1, 5, W + S):
        _, ours = feed(model, tokens(1, length), [1] * length)
        _, theirs = feed(base, tokens(1, length), [1] * length, cache=DynamicCache())
        assert retrofit.cache_bytes(ours) == retrofit.cache_bytes(theirs) == 2 * 2 * 2 * 16 * length * 4


def test_nothing_is_nothing() -> None:
    assert retrofit.cache_bytes(DynamicCache()) == 0


def test_a_view_of_something_larger_is_counted_whole() -> None:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    cache.layers[0].keys = torch.zeros(1, 2, 100, 4)[:, :, :3]
    assert retrofit.cache_bytes(cache) == (800 + 24) * 4

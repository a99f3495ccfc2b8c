"""Invariant 12: a state lives in its cache alone, and goes where its cache goes."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tests.helpers import awake, close, feed, left_mask, logits, positions, tokens

LENGTH = 30


def test_two_generations_in_turn(one_model: Any) -> None:
    assert_apart(one_model)


def test_in_half_precision(kind: str, half: tuple[PreTrainedModel, torch.dtype, bool]) -> None:
    base, dtype, mixed = half
    with torch.autocast("cpu", dtype, enabled=mixed):
        assert_apart(awake(base if mixed else base.to(dtype), kind))


def assert_apart(model: Any) -> None:
    """Two texts that are read by turns, each into a cache of its own, give the bits that each gives alone."""
    texts = [tokens(2, LENGTH, seed) for seed in (0, 1)]
    alone = [feed(model, ids, [12, *[1] * 5, 13])[0] for ids in texts]
    caches, out = [DynamicCache(), DynamicCache()], [[], []]
    for start, end in [(0, 12), *((t, t + 1) for t in range(12, 17)), (17, LENGTH)]:
        for which, ids in enumerate(texts):
            out[which].append(feed(model, ids[:, start:end], [end - start], cache=caches[which])[0])
    for which in (0, 1):
        assert torch.equal(torch.cat(out[which], 1), alone[which])


def test_nothing_of_a_text_stays_on_the_model(one_model: Any) -> None:
    ids = tokens(2, LENGTH)
    before = logits(one_model, ids)
    feed(one_model, tokens(3, 50, seed=1), [50])
    logits(one_model, tokens(1, 50, seed=2))
    assert torch.equal(logits(one_model, ids), before)


def test_a_copy_goes_its_own_way(one_model: Any) -> None:
    ids, other = tokens(2, LENGTH), tokens(2, 8, seed=1)
    for length in (6, 20):  # before and after the first eviction
        _, cache = feed(one_model, ids[:, :length], [length])
        twin = copy.deepcopy(cache)
        feed(one_model, other, [1] * 8, cache=twin)
        rest = [1, 1, 1, LENGTH - length - 3]
        ours, _ = feed(one_model, ids[:, length:], rest, cache=cache)
        assert torch.equal(ours, feed(one_model, ids, [length, *rest])[0][:, length:])


def test_rows_are_repeated_reordered_and_selected(partner: PreTrainedModel, kind: str) -> None:
    """What beam search and the like do to a cache, rows of very different lengths in it."""
    model = awake(partner.double(), kind)
    ids, mask = tokens(3, LENGTH), left_mask([LENGTH, 17, 9], LENGTH)
    where = positions(mask)
    changes = {
        "reorder_cache": (torch.tensor([2, 0, 1]), [2, 0, 1]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
        "batch_select_indices": (torch.tensor([1, 2]), [1, 2]),  # the longest row leaves: all the others have padding
    }
    for start in (9, 22):  # before and after the first eviction
        for change, (argument, rows) in changes.items():
            _, cache = feed(model, ids[:, :start], [start], mask, where=where)
            getattr(cache, change)(argument)
            ours, _ = feed(model, ids[rows, start:], [1, 1, LENGTH - start - 2], mask[rows], cache, where[rows])
            whole = logits(model, ids[rows], mask[rows], where[rows])[:, start:]
            real = mask[rows, start:].bool()
            close(ours[real], whole[real])


def test_offloading_and_back(one_model: Any) -> None:
    ids = tokens(2, LENGTH)
    whole, _ = feed(one_model, ids, [20, 1, 9])
    _, cache = feed(one_model, ids[:, :20], [20])
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert torch.equal(feed(one_model, ids[:, 20:], [1, 9], cache=cache)[0], whole[:, 20:])


@pytest.mark.parametrize("sizes", [[1] * 6, [3, 3]], ids=str)
def test_a_fork_goes_its_own_way(one_model: Any, sizes: list[int]) -> None:
    model, ids, others = one_model.double(), tokens(2, 36), tokens(2, 6, seed=1)
    _, cache = feed(model, ids[:, :30], [30])
    fork = cache.fork()
    theirs = feed(model, others, sizes, cache=fork)[0]
    close(feed(model, ids[:, 30:], sizes, cache=cache)[0], logits(model, ids)[:, 30:])
    close(theirs, logits(model, torch.cat([ids[:, :30], others], 1))[:, 30:])

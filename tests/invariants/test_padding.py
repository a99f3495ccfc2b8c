"""Invariant 5: a left-padded batch equals each row alone; padding is never written and never counts as a sink."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from patches.kinds import KINDS
from tests.conftest import tiny_base
from tests.helpers import ON_A_WINDOW, SIZE, awake, close, feed, left_mask, logits, positions, tokens

MakeBase = Callable[..., PreTrainedModel]
# beyond the capacity of 10, just there, below it, fewer tokens than sinks
LENGTHS = (30, 19, 10, 3, 1)
TOTAL = 30


def assert_rows_are_alone(model: Any, batch: Tensor, ids: Tensor, lengths: tuple[int, ...]) -> None:
    """Each row's logits at its real tokens are those it has without the others and without padding."""
    for row, length in enumerate(lengths):
        if length:
            close(batch[row, -length:], logits(model, ids[row : row + 1, -length:])[0])


def test_a_padded_batch_is_its_rows(base: PreTrainedModel, kind: str) -> None:
    model = awake(base.double(), kind)
    ids, mask = tokens(5, TOTAL), left_mask(LENGTHS, TOTAL)
    where = positions(mask)
    assert_rows_are_alone(model, logits(model, ids, mask, where), ids, LENGTHS)
    for sizes in ([TOTAL - 4, *[1] * 4], [7, 6, 1, 1, 15]):  # the last: pieces of nothing but padding in some rows
        assert_rows_are_alone(model, feed(model, ids, sizes, mask, where=where)[0], ids, LENGTHS)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 3), (3, 9), (8, 0)])
def test_any_window_and_sinks(partner: PreTrainedModel, kind: str, window: int, sinks: int) -> None:
    model = awake(partner.double(), kind, window, sinks)
    ids, mask = tokens(5, TOTAL), left_mask(LENGTHS, TOTAL)
    where = positions(mask)
    assert_rows_are_alone(model, logits(model, ids, mask, where), ids, LENGTHS)
    assert_rows_are_alone(model, feed(model, ids, [9, 1, 13, 1, 6], mask, where=where)[0], ids, LENGTHS)


@pytest.mark.parametrize("others", ["full", "window"])
def test_memory_on_some_layers(kind: str, others: str, make_base: MakeBase) -> None:
    model = awake(make_base("Qwen2", attn_implementation="eager"), kind, layers=[1], others=others, push=0.03)
    ids, mask = tokens(5, TOTAL), left_mask(LENGTHS, TOTAL)
    assert_rows_are_alone(model, feed(model, ids, [7, 6, 1, 1, 15], mask, where=positions(mask))[0], ids, LENGTHS)


def test_windows_and_options_by_layer(kind: str, make_base: MakeBase) -> None:
    by_layer = {"0": {"window": 4}, "1": {"window": 11, **SIZE.get(kind, {})}}
    model = awake(make_base("Qwen3").double(), kind, by_layer=by_layer)
    ids, mask = tokens(5, TOTAL), left_mask(LENGTHS, TOTAL)
    where = positions(mask)
    assert_rows_are_alone(model, logits(model, ids, mask, where), ids, LENGTHS)
    assert_rows_are_alone(model, feed(model, ids, [7, 6, 1, 1, 15], mask, where=where)[0], ids, LENGTHS)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_lengths_and_pieces_nobody_thought_of(kind: str, data: st.DataObject) -> None:
    window, sinks = data.draw(st.integers(1, 10), "window"), data.draw(st.integers(0, 10), "sinks")
    sizes = data.draw(st.lists(st.integers(1, 15), min_size=1, max_size=5), "sizes")
    lengths = tuple(data.draw(st.lists(st.integers(0, sum(sizes)), min_size=1, max_size=3), "lengths"))
    model = awake(tiny_base("Qwen3").double(), kind, window, sinks)
    ids, mask = tokens(len(lengths), sum(sizes)), left_mask(lengths, sum(sizes))
    batch = feed(model, ids, sizes, mask, where=positions(mask))[0]
    assert not batch.isnan().any()
    assert_rows_are_alone(model, batch, ids, lengths)


def test_what_stands_in_the_padding_does_not_matter(one_model: Any) -> None:
    ids, other, mask = tokens(2, TOTAL), tokens(2, TOTAL, seed=1), left_mask([TOTAL, 14], TOTAL)
    other = torch.where(mask.bool(), ids, other)
    assert not torch.equal(ids, other)
    for ours, theirs in (
        (logits(one_model, ids, mask), logits(one_model, other, mask)),
        (feed(one_model, ids, [9, 20, 1], mask)[0], feed(one_model, other, [9, 20, 1], mask)[0]),
    ):
        assert torch.equal(ours[mask.bool()], theirs[mask.bool()])


# of these a state can be compared: rows of the others lie in other places beside padding, where the tests above and the
# next one hold what is read from them
@pytest.mark.parametrize("kind", ON_A_WINDOW)
def test_the_state_holds_no_padding(partner: PreTrainedModel, kind: str) -> None:
    model = awake(partner.double(), kind)
    ids, mask = tokens(2, TOTAL), left_mask([TOTAL, 16], TOTAL)
    _, batch = feed(model, ids, [12, 18], mask, where=positions(mask))
    _, alone = feed(model, ids[1:, -16:], [16])
    for ours, theirs in zip(batch.layers, alone.layers, strict=True):
        assert ours.state.keys() == theirs.state.keys()
        for name, tensor in ours.state.items():
            close(tensor[1:], theirs.state[name])
        if ours.state:  # a row of fewer tokens than the capacity has written nothing
            _, short = feed(model, ids, [12, 18], left_mask([TOTAL, 8], TOTAL))
            assert all(not tensor[1].any() for layer in short.layers for tensor in layer.state.values())


def test_positions_counted_from_the_left(partner: PreTrainedModel, kind: str) -> None:
    """As transformers counts where no positions are given: padding moves a row, and rotary attention does not mind."""
    model = awake(partner, kind, push=0.03)
    ids, mask = tokens(5, TOTAL), left_mask(LENGTHS, TOTAL)
    assert_rows_are_alone(model, logits(model, ids, mask), ids, LENGTHS)
    assert_rows_are_alone(model, feed(model, ids, [9, 1, 13, 1, 6], mask)[0], ids, LENGTHS)


def test_right_padding_in_training(partner: PreTrainedModel, kind: str) -> None:
    model = awake(partner.double(), kind)
    ids, mask = tokens(3, TOTAL), left_mask([TOTAL, 18, 4], TOTAL).flip(1)
    labels = ids.masked_fill(mask == 0, -100)
    batch = logits(model, ids, mask)
    for row, length in enumerate((TOTAL, 18, 4)):
        close(batch[row, :length], logits(model, ids[row : row + 1, :length])[0])
    where = positions(mask)
    given = logits(model, ids, mask, where)  # anything stands behind a row's end
    for row, length in enumerate((TOTAL, 18, 4)):
        close(given[row, :length], batch[row, :length])
    loss = model(ids, attention_mask=mask, labels=labels).loss
    assert loss.isfinite()


def test_a_row_that_is_all_padding_harms_no_other(one_model: Any) -> None:
    ids = tokens(2, TOTAL)
    batch = logits(one_model, ids, left_mask([TOTAL, 0], TOTAL))
    close(batch[0], logits(one_model, ids[:1])[0])
    assert not batch.isnan().any()


def test_rows_at_positions_of_their_own(one_model: Any) -> None:
    """Texts without padding that begin at different positions are each what they are alone, at once and in pieces."""
    model, ids = one_model.double(), tokens(2, 30)
    where = torch.arange(30) + torch.tensor([[0], [7]])
    together = logits(model, ids, where=where)
    for row in range(2):
        close(together[row], logits(model, ids[row : row + 1], where=where[row : row + 1])[0])
    close(feed(model, ids, (20, 4, 1, 1, 1, 3), where=where)[0], together)


def test_one_padded_row_and_its_copies(one_model: Any) -> None:
    """A batch of one row is padded as any other, and its rows may become several."""
    model, ids, mask = one_model.double(), tokens(1, 24), left_mask((19,), 24)
    where = positions(mask)
    alone = logits(model, ids[:, 5:])
    close(logits(model, ids, mask, where)[:, 5:], alone)
    for first in (14, 22):
        _, cache = feed(model, ids[:, :first], [first], mask[:, :first], where=where[:, :first])
        cache.batch_repeat_interleave(3)
        rest = feed(
            model, ids[:, first:].repeat(3, 1), [1] * (24 - first), mask.repeat(3, 1), cache, where.repeat(3, 1)
        )
        close(rest[0], alone[:, first - 5 :].expand(3, -1, -1))

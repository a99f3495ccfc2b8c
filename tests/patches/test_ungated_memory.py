"""Memories that can be given every token: padding, and the cache that turns into a ring before anything was written."""

from typing import Any

import pytest

from tests.conftest import tiny_base
from tests.helpers import awake, close, feed, left_mask, logits, tokens

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("tensor-cache", {"population": "all"}),
    ("tensor-cache", {"rule": "wedge"}),
    ("tensor-cache", {"slots": 3, "top_k": 2, "temperature": 0.1}),
    ("infini", {}),
    ("infini", {"positions": "none", "population": "all"}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
def test_a_padded_batch_is_its_rows(kind: str, options: dict[str, Any]) -> None:
    """Without positions given by hand: rows then stand at other positions than they do alone."""
    model = awake(tiny_base("Qwen2").double(), kind, push=1.0, **options)
    lengths, ids = (30, 19, 11, 4), tokens(4, 30)
    mask = left_mask(lengths, 30)
    for batch in (logits(model, ids, mask), feed(model, ids, [12, 1, 10, *[1] * 7], mask)[0]):
        for row, length in enumerate(lengths):
            close(batch[row, -length:], logits(model, ids[row : row + 1, -length:])[0], 1e-5)


@pytest.mark.parametrize("kind", ["tensor-cache", "infini"])
def test_a_ring_before_anything_was_written(kind: str) -> None:
    """A native window ends while padding still fills ours; the tokens that wait in the ring must be written later."""
    base = tiny_base("Mistral", sliding_window=10).double()
    model = awake(base, kind, window=8, sinks=2, layers=[1], push=1.0, population="all")
    ids, mask = tokens(2, 30), left_mask([26, 26], 30)
    batch, _ = feed(model, ids, [12, 1, 1, 1, 15], mask)
    close(batch[:, 4:], logits(model, ids[:, 4:]), 1e-5)

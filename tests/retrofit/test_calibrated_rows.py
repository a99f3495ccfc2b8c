"""The rows of a user's text that a memory is calibrated on: long enough for its window, as many tokens in all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import retrofit
from distill import model as distill_model
from distill.data.rows import cut_records
from retrofit.calibration import LENGTH, LONGEST, TOKENS, read_texts, row_length
from tests.conftest import tiny_base


@pytest.mark.parametrize(
    ("kind", "window", "options", "length"),
    [
        ("joint", 64, {}, LENGTH),
        ("joint", 1000, {}, 2 * 1002),
        ("expected", 1000, {}, 2 * 1002),
        ("expected", 300, {"rows": 98, "shares": "need"}, 3 * 400),
        ("expected", 64, {"rows": 9, "shares": "need"}, LENGTH),
    ],
)
def test_rows_are_long_enough_for_the_window(
    kind: str, window: int, options: dict[str, str], length: int, byte_checkpoint: Path, tmp_path: Path
) -> None:
    model = retrofit.patch(tiny_base("Qwen2"), kind, window, 2, **options)
    assert row_length(model) == length
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 1000)
    rows = read_texts(str(tmp_path / "text.txt"), str(byte_checkpoint), row_length(model))
    assert {row.shape for row in rows} == {(1, length)}
    assert len(rows) == -(-TOKENS // length)


def test_a_text_that_is_too_short_for_them_is_read_in_shorter_rows(
    byte_checkpoint: Path, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("x" * 3000)
    rows = read_texts(str(tmp_path / "text.txt"), str(byte_checkpoint), 4000)
    assert [row.shape for row in rows] == [(1, LENGTH)] * 2
    (tmp_path / "text.txt").write_text("x" * 20_000)
    (row, _) = read_texts(str(tmp_path / "text.txt"), str(byte_checkpoint), 70_000)
    assert row.shape == (1, LONGEST), "the teacher reads it with full attention"


@pytest.mark.parametrize("chars", [9 * LENGTH, 15 * LENGTH, 17 * LENGTH])
def test_as_many_tokens_are_read_whatever_the_text_holds(chars: int, byte_checkpoint: Path, tmp_path: Path) -> None:
    """Nine rows hold more than is read, and every second one of them too little."""
    (tmp_path / "text.txt").write_text("".join(chr(97 + at // LENGTH) for at in range(chars)))
    rows = read_texts(str(tmp_path / "text.txt"), str(byte_checkpoint))
    assert sum(row.shape[1] for row in rows) == TOKENS
    where = [int(row[0, 0] - rows[0][0, 0]) for row in rows]
    assert max(where) >= chars // LENGTH - 3, "spread over the whole text"


@pytest.mark.parametrize("first", [10, 1000, 4000])
def test_training_rows_are_spread_evenly_however_long_they_are(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Tensor] = []
    monkeypatch.setattr(distill_model, "calibrate", lambda model, texts: shown.extend(texts))
    lengths = [first, *[1000, 60, 2000, 300] * 24]
    documents: list[Any] = [{"input_ids": torch.full((length,), at)} for at, length in enumerate(lengths)]
    model = retrofit.patch(tiny_base("Qwen2"), "joint", 64, 2)
    distill_model.calibrate_on(model, cut_records(documents, lengths, 4000))
    places = [int(text[0, 0]) for text in shown]
    assert TOKENS <= sum(text.shape[1] for text in shown) < 1.5 * TOKENS
    steps = torch.tensor([*places[1:], len(lengths)]) - torch.tensor(places)
    assert steps.max() - steps.min() <= 1

"""The rows of a user's text that a memory is calibrated on: long enough for its window, as many tokens in all."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

import retrofit
from retrofit.calibration import LENGTH, LONGEST, TEXTS, read_texts, row_length
from tests.conftest import tiny_base


@pytest.mark.parametrize(
    ("kind", "window", "options", "length"),
    [
        ("joint", 64, {}, LENGTH),
        ("joint", 1000, {}, 2 * 1002),
        ("expected", 1000, {}, 2 * 1002),
        ("expected", 300, {"shares": "need"}, 8 * 300),
        ("expected", 64, {"shares": "need"}, LENGTH),
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
    assert len(rows) == -(-TEXTS * LENGTH // length)


def test_a_text_that_is_too_short_for_them_is_read_in_shorter_rows(
    byte_checkpoint: Path, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("x" * 3000)
    rows = read_texts(str(tmp_path / "text.txt"), str(byte_checkpoint), 4000)
    assert [row.shape for row in rows] == [(1, LENGTH)] * 2
    (tmp_path / "text.txt").write_text("x" * 20_000)
    (row, _) = read_texts(str(tmp_path / "text.txt"), str(byte_checkpoint), 70_000)
    assert row.shape == (1, LONGEST), "the teacher reads it with full attention"

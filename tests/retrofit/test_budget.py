"""A budget in bytes: it is kept, windows and bits are measured, and a calibrated model takes a smaller one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import retrofit
from patches.errors import RetrofitError
from patches.options import read_bytes
from retrofit.budget import fit_budget, read_budget, text_length
from retrofit.needs import lost_with
from tests.conftest import tiny_base
from tests.helpers import logits, tokens
from tests.test_cli import refused, run

ROW = 2 * 2 * 16 * 4  # bytes of a token's keys and values in a layer of a tiny base
LENGTH = 96
BUDGET = 24 * ROW


def kept(model: Any) -> float:
    """Bytes of a layer on average: sinks, window and entries."""
    memories = model.model.memories().values()
    return sum(one.capacity * ROW + one.state_bytes(model.dtype) for one in memories) / len(memories)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64KiB", 65536), ("2 GiB", 2**31), ("1.5kB", 1500), ("3M", 3_000_000), ("12", 12), (300, 300), ("7b", 7)],
)
def test_numbers_of_bytes_are_read_as_they_are_written(text: str | int, size: int) -> None:
    assert read_bytes(text) == size


@pytest.mark.parametrize("text", ["", "64KiX", "-3", "0", "iB", "5 %", "many", "1e3"])
def test_other_words_are_no_bytes(text: str) -> None:
    with pytest.raises(RetrofitError, match="number of bytes"):
        read_bytes(text)


def test_a_budget_is_for_a_layer_or_for_a_whole_deployment() -> None:
    config = tiny_base("Llama", num_hidden_layers=4).config  # full attention keeps ROW bytes of each token and layer

    def read(budget: str, **how: Any) -> int:
        return read_budget(budget, config, torch.float32, **how)

    assert read("9KiB") == 9 * 1024
    assert read("72KiB", batch=2) == read("36KiB", context=1000) == 9 * 1024
    assert read("5%", context=1000) == 50 * ROW
    assert read("5%") == config.max_position_embeddings * ROW // 20
    # two layers keep their own attention: at 10 tokens they take 20 rows of the 60
    assert read(str(60 * ROW), context=100, layers=[0, 1], others="window") == 29 * ROW
    assert read(str(220 * ROW), context=100, layers=[0, 1]) == 10 * ROW
    for budget, how, said in (
        (str(4 * 50 * ROW), {"context": 50}, "full cache of 50 tokens"),
        ("100%", {}, "full cache"),
        (str(200 * ROW), {"context": 100, "layers": [0, 1]}, "holds nothing beside the layers"),
        ("5%", {"context": 0}, "context=0"),
    ):
        with pytest.raises(RetrofitError, match=said):
            read(budget, **how)


def test_texts_are_several_times_as_long_as_what_is_kept() -> None:
    config = tiny_base("Llama").config
    entry = 2 * (6 + 2 + 7 + 2 + 4 + 2)  # of two heads: codes of 3 and 3.5 bits, scales, index, score
    assert text_length(config, 100 * entry, torch.float32, None) == 300
    assert text_length(config, 100 * entry, torch.float32, 200) == 200


@pytest.mark.parametrize("bits", [None, 16, [3, 4]])
def test_the_budget_is_kept_and_what_loses_least_is_taken(bits: Any, family: str) -> None:
    base, texts = tiny_base(family), [tokens(1, LENGTH, seed=3), tokens(1, LENGTH, seed=4)]
    layers = len(retrofit.patch(base, "none", 8).model.memories())
    model, rows = fit_budget(base, texts, BUDGET, sinks=2, bits=bits, context=LENGTH)
    for row in rows:
        assert BUDGET - 2 * ROW < row["bytes"] <= BUDGET, row
    assert kept(model) == pytest.approx(next(row["bytes"] for row in rows if row.get("chosen")))
    (chosen,) = (row for row in rows if row.get("chosen"))
    assert chosen["kl"] == min(row["kl"] for row in rows if "kl" in row)
    assert [row["loss"] for row in rows] == sorted(row["loss"] for row in rows)
    assert len(model.model.memories()) == layers
    assert len({row["window"] for row in rows}) > 1
    each = {row["key_bits"] for row in rows}
    assert len(each) > 2 if bits is None else each == {bits if isinstance(bits, int) else bits[0]}


def test_long_budgets_are_measured_in_miniature() -> None:
    """A text that holds everything would show nothing; window and entries come back in their own size."""
    base, texts = tiny_base("Llama"), [tokens(1, LENGTH, seed=3)]
    model, rows = fit_budget(base, texts, 10 * BUDGET, sinks=2)
    assert 9.5 * BUDGET < kept(model) <= 10 * BUDGET
    assert all("kl" not in row or row["kl"] > 0 for row in rows)


def test_in_python(tmp_path: Path) -> None:
    base, texts, ids = tiny_base("Qwen2"), [tokens(1, LENGTH, seed=3)], tokens(2, 60)
    model = retrofit.patch(base, "expected", budget=BUDGET, texts=texts)
    assert kept(model) <= BUDGET
    whole = logits(model, ids)
    retrofit.save_adapter(model, tmp_path)
    assert torch.equal(logits(retrofit.load_adapter(base, tmp_path), ids), whole)
    for how in ({}, {"texts": texts, "window": 4}, {"context": 9, "window": 4}):
        with pytest.raises(RetrofitError, match="give a window"):
            retrofit.patch(base, "expected", **how)
    for how in ({"memory": "none", "texts": texts}, {"memory": "expected"}, {"memory": "expected", "rows": 3}):
        with pytest.raises(RetrofitError, match="a budget is measured"):
            retrofit.patch(base, budget=BUDGET, **how)
    with pytest.raises(RetrofitError, match="hold no window"):
        retrofit.patch(base, "expected", budget=8 * ROW, texts=texts)
    with pytest.raises(RetrofitError, match="too short"):
        retrofit.patch(base, "expected", budget=BUDGET, texts=[tokens(1, 9)])


@pytest.mark.parametrize("shares", ["even", "need"])
def test_a_model_takes_another_budget_without_calibrating_again(shares: str, tmp_path: Path) -> None:
    base, texts, ids = tiny_base("Qwen3"), [tokens(1, LENGTH, seed=3)], tokens(1, 60)
    model = retrofit.patch(base, "expected", 8, 2, rows=12, bits=[3, 4], shares=shares)
    retrofit.calibrate(model, texts)
    before, cache = logits(model, ids), model(ids, use_cache=True).past_key_values
    size = int(kept(model)) - 100
    model.set_budget(size)
    assert size - 20 < kept(model) <= size
    numbers = [number for memory in model.model.memories().values() for number in memory.rows]
    assert max(numbers) - min(numbers) <= 1 or shares == "need"
    assert not torch.equal(logits(model, ids), before)
    with pytest.raises(RetrofitError, match="start a new cache"):
        model(ids[:, :1], past_key_values=cache)
    model.set_budget(f"{size}B", window=4)
    assert size - 20 < kept(model) <= size
    retrofit.save_adapter(model, tmp_path)
    again = retrofit.load_adapter(base, tmp_path)
    assert [one.rows for one in again.model.memories().values()] == [
        one.rows for one in model.model.memories().values()
    ]
    assert torch.equal(logits(again, ids), logits(model, ids))
    with pytest.raises(RetrofitError, match="hold no entry beside a window of 4"):
        model.set_budget(5 * ROW)
    with pytest.raises(RetrofitError, match="'none' has no budget"):
        retrofit.patch(base, "none", 8).set_budget(1000)


def test_between_two_points_a_curve_is_straight() -> None:
    assert [lost_with(number, [0, 4, 8], [8.0, 2.0, 1.0]) for number in (0, 2, 4, 6, 8, 99)] == [8, 5, 2, 1.5, 1, 1]


def test_from_the_command_to_an_export(byte_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(chr(97 + int(i)) for i in tokens(1, 9000)[0] % 26))
    line = ["patch", byte_checkpoint, "--memory", "expected", "--data", "text.txt"]
    shown = run(*line, "--budget", "6KiB", "-o", "model")
    assert shown.exit_code == 0, shown.output
    assert "at most 6,144 bytes per layer and sequence" in shown.output
    assert "entries" in shown.output
    model = AutoModelForCausalLM.from_pretrained("model")
    assert 0.9 * 6144 < kept(model) <= 6144
    for more, said in (
        (["--budget", "6KiB", "--option", "rows=3"], "rows"),
        (["--budget", "much"], "no number of bytes"),
        (["--context", "99"], "add --budget"),
        (["--budget", "100"], "hold no window"),
    ):
        refused(run(*line, *more, "-o", "other"), said)
    refused(run(*line[:2], "--budget", "6KiB", "-o", "other"), "'none' has no budget")
    refused(run(*line[:4], "--budget", "6KiB", "-o", "other"), "add --data")
    assert not Path("other").exists()


def test_layers_that_keep_their_own_attention(make_base: Callable[..., PreTrainedModel]) -> None:
    base = make_base("Ministral")  # its first layer slides
    model, _ = fit_budget(base, [tokens(1, LENGTH, seed=3)], BUDGET, sinks=2)
    assert list(model.model.memories()) == [1]
    assert kept(model) <= BUDGET

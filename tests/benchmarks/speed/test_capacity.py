"""The capacity benchmark: the paper's table within its error bars, and the count against a loop written out."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.speed import capacity
from benchmarks.speed.__main__ import app
from patches.errors import RetrofitError


def test_the_papers_table_comes_out() -> None:
    rows = capacity.run(capacity.Case(), repeats=48)
    assert len(rows) == 12
    for row in rows:
        assert abs(row["z"]) < 2.5, row


def test_orthogonal_keys_hold_more_and_decay_holds_less() -> None:
    plain, decayed, orthogonal = (
        capacity.capacities(32, *how).mean() for how in ((1.0, 32), (0.98, 32), (1.0, 32, 32))
    )
    assert decayed < plain < orthogonal


@pytest.mark.parametrize("decay", [1.0, 0.97])
def test_the_count_is_the_loops(decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs are added to a matrix one by one until the noise is longer than the first value."""
    drawn = []
    original = capacity._unit
    monkeypatch.setattr(capacity, "_unit", lambda x: drawn.append(original(x)) or drawn[-1])
    found = capacity.capacities(8, decay, seeds=4)
    keys, values = (x[:, 0].double() for x in drawn)
    for seed in range(4):
        k, v = keys[seed], values[seed]
        A, pairs = torch.zeros(8, 8, dtype=torch.float64), 0
        for n in range(len(k)):
            A = decay * A + torch.outer(k[n], v[n])
            signal = decay**n
            if (k[0] @ A - signal * v[0]).norm() > signal:
                break
            pairs += 1
        assert found[seed] == pairs


def test_the_verb_writes_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = CliRunner().invoke(app, ["capacity", "--seeds", "2", "--decay", "0.9", "--json", str(file)])
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text())
    assert set(capacity.COLUMNS) == set(rows[0])
    assert all(("paper" in row) == (row["name"] != "decayed") for row in rows), "the paper's decay is another one"


def test_refusals() -> None:
    with pytest.raises(RetrofitError, match="decay: 1"):
        capacity.Case(decay=1.0)
    with pytest.raises(RetrofitError, match="seeds=1"):
        capacity.run(capacity.Case(), repeats=1)

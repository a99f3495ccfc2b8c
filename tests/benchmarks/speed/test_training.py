"""Benchmarks of training: that they compare what they say. Never how fast anything is."""

import copy
from pathlib import Path

import pytest
import torch

from benchmarks.speed import loss, step, two_forms
from patches.errors import RetrofitError


def test_loss_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter([6 * 2**20, 2**20])  # each would start a process
    monkeypatch.setattr(two_forms, "peak_bytes", lambda _, prepare, *a: prepare(*a)() is not None and next(held))
    naive, chunked, ratio = loss.run(loss.Case(positions=9, width=4, vocabulary=30), repeats=2)
    assert [row["name"] for row in (naive, chunked, ratio)] == ["naive", "chunked", "chunked / naive"]
    assert [row["extra_mib"] for row in (naive, chunked, ratio)] == [6, 1, 1 / 6]
    assert set(loss.COLUMNS) == set(ratio)


def test_losses_that_differ_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.FORMS, "chunked", lambda *a: 2 * loss.FORMS["naive"](*a))
    with pytest.raises(RetrofitError, match="differ"):
        loss.run(loss.Case(positions=9, width=4, vocabulary=31), repeats=1)
    with pytest.raises(RetrofitError, match="dtype: 'int8'"):
        loss.Case(dtype="int8")


def test_step_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(step, "peak_bytes", lambda _, prepare, case, second: asked.append(second) or 2**20)
    case = step.Case(memory="ahn-dn", window=8, sinks=2, layers=1, hidden=128, length=40)
    rows = {row["name"]: row for row in step.run(case, repeats=2)}
    assert asked == [False, True]
    parts = (step.TEACHER, step.STUDENT, step.LOSS, step.BACKWARD)
    assert list(rows) == [step.ONE, step.TWO, step.PARTS, *parts, step.LONGER]
    low, high = (sum(rows[name][f"seconds_{end}"] for name in parts) for end in ("low", "high"))
    assert low * 0.9 <= rows[step.PARTS]["seconds"] <= high * 1.1
    assert [rows[name]["to"] for name in rows] == [step.PARTS, step.ONE, *5 * [None], "student, T"]
    assert set(step.COLUMNS) == set(rows[step.ONE])


def test_both_steps_leave_the_same_gradient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = step.Case(memory="ahn-dn", window=8, sinks=2, layers=1, hidden=128, length=40)
    model = case.model(40)
    found = []
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda *_a, **_k: found.append([p.grad.clone() for _, p in model.memory_parameters() if p.grad is not None]),
    )
    step._whole(model, case, str(tmp_path))()
    step._whole(model, case, str(tmp_path), teacher=copy.deepcopy(model))()
    assert len(found[0]) == len(found[1]) > 0
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"length": 260}, "no position past the window: take 262"),
        ({"memory": "none"}, "nothing to fit"),
        ({"hidden": 100}, "100"),
    ],
)
def test_steps_that_cannot_be_taken(values: dict[str, object], said: str) -> None:
    with pytest.raises(RetrofitError, match=said):
        step.Case(**values)

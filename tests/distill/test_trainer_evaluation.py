"""What the trainer evaluates while it trains, and what it does with it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback

import retrofit
from distill import DistillTrainer
from distill.checkpoint import checkpoints, damage
from distill.data.rows import Rows
from tests.distill.test_trainer import Model, make_trainer, memory, opened


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_the_best_checkpoint_is_kept_and_loaded(
    model: Model, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    kls = iter([0.3, 0.1, 0.2, 0.2, 0.25])
    monkeypatch.setattr(DistillTrainer, "_kl_by_distance", lambda self, one, data: {"": next(kls, 0.3)})
    settings = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_total_limit": limit}
    trainer = make_trainer(model, rows, tmp_path, load_best_model_at_end=True, **settings)
    trainer._window_only_kl["eval"] = trainer.eval_dataset, {"": 1.0}
    trainer.train()
    best = tmp_path / "checkpoint-2"
    assert Path(trainer.state.best_model_checkpoint) == best
    assert trainer.state.best_metric == 0.1
    saved = load_file(best / "adapter_model.safetensors")
    for name, parameter in memory(model).items():
        assert torch.equal(parameter, saved[f"base_model.model.{name}"]), name
    kept = [int(folder.name.split("-")[1]) for folder in checkpoints(tmp_path)]
    assert kept == {None: [1, 2, 3, 4], 1: [2], 2: [2, 4]}[limit]
    last = json.loads((checkpoints(tmp_path)[-1] / "trainer_state.json").read_text())
    assert Path(last["best_model_checkpoint"]) == best
    assert damage(best) == ""


@pytest.mark.parametrize(
    ("kls", "best"),
    [([0.1, 0.3, 0.2, 0.4], 1), ([0.3, 0.1, 0.2, 0.4], 2), ([0.4, 0.3, 0.1, 0.2], 3), ([0.2, 0.4, 0.3, 0.1], 4)],
)
def test_an_evaluation_between_two_checkpoints_may_be_the_best(
    model: Model, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kls: list[float], best: int
) -> None:
    """That at the end of the local steps (step 3) or another one: what is chosen has a checkpoint, and it is loaded."""
    found = iter(kls)
    monkeypatch.setattr(DistillTrainer, "_kl_by_distance", lambda self, one, data: {"": next(found)})
    settings = {"max_steps": 4, "local_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 4}
    trainer = make_trainer(model, rows, tmp_path, load_best_model_at_end=True, **settings)
    trainer._window_only_kl["eval"] = trainer.eval_dataset, {"": 1.0}
    trainer.train()
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (best, 0.1)
    saved = load_file(tmp_path / f"checkpoint-{best}" / "adapter_model.safetensors")
    for name, parameter in memory(model).items():
        assert torch.equal(parameter, saved[f"base_model.model.{name}"]), name
    assert damage(tmp_path / f"checkpoint-{best}") == ""


def test_early_stopping_stops_at_the_step_after_the_best(
    model: Model, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kls = iter([0.3, 0.1, 0.2, 0.05])
    monkeypatch.setattr(DistillTrainer, "_kl_by_distance", lambda self, one, data: {"": next(kls)})
    settings = {"max_steps": 9, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    stop = [EarlyStoppingCallback(1)]
    trainer = make_trainer(model, rows, tmp_path, stop, load_best_model_at_end=True, **settings)
    trainer._window_only_kl["eval"] = trainer.eval_dataset, {"": 1.0}
    trainer.train()
    assert (trainer.state.global_step, trainer.state.best_global_step) == (3, 2)


def test_evaluation_reports_the_window_only_model_beside_the_memory(model: Model, rows: Rows, tmp_path: Path) -> None:
    trainer = make_trainer(model, rows, tmp_path)
    fresh = trainer.evaluate()
    assert fresh["eval_kl"] == fresh["eval_kl_window_only"] > 0  # a fresh memory adds exactly nothing
    assert fresh["eval_kl_gap_closed"] == 0
    opened(model)
    disturbed = trainer.evaluate()
    assert disturbed["eval_kl"] != disturbed["eval_kl_window_only"] == fresh["eval_kl_window_only"]
    named = trainer.evaluate({"near": rows.select(slice(2)), "far": rows.select(slice(3))})
    assert set(named) == {key.replace("eval_", f"eval_{name}_") for name in ("near", "far") for key in disturbed}


def test_other_rows_have_a_window_only_model_of_their_own(model: Model, rows: Rows, tmp_path: Path) -> None:
    trainer = make_trainer(model, rows, tmp_path)
    first = trainer.evaluate()["eval_kl_window_only"]
    others = rows.select(slice(5, None))
    expected = make_trainer(model, rows, tmp_path).evaluate(others)["eval_kl_window_only"]
    assert trainer.evaluate(others)["eval_kl_window_only"] == expected != first


def test_evaluation_tells_distances_past_the_window_apart(model: Model, rows: Rows, tmp_path: Path) -> None:
    metrics = make_trainer(opened(model), rows, tmp_path).evaluate()
    scores = retrofit.evaluate(model, rows.batch()[0][:5], start=8)["ahn-gdn"].kl  # (5, 31): columns from W + S on
    expected = {"": scores, "_beyond_0": scores[:, :12], "_beyond_12": scores[:, 12:24], "_beyond_24": scores[:, 24:]}
    found = {key.removeprefix("eval_kl"): metrics[key] for key in metrics if key.startswith(("eval_kl_b", "eval_kl"))}
    for key, part in expected.items():
        assert found[key] == pytest.approx(part.mean().item(), rel=1e-4)
    assert {key for key in found if key.startswith("_beyond")} == expected.keys() - {""}

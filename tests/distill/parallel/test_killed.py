"""Runs that end badly (SIGKILL, a full disk, a gradient that is not finite, other data) and what can be resumed."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distill import DistillTrainer, distill
from distill.checkpoint import checkpoints, damage
from distill.config import DistillConfig
from distill.parallel.processes import ATTEMPT, LAUNCH
from distill.trainer import DRAFT
from patches.errors import RetrofitError
from retrofit.adapter import WEIGHTS
from tests.helpers import ROOT


@pytest.fixture
def recipe(checkpoint: Path, text_file: Path, tmp_path: Path) -> DistillConfig:
    """Five steps on a tiny checkpoint, saved after the second and the fourth."""
    values: dict[str, Any] = {"window": 6, "sinks": 2, "max_length": 40, "eval_rows": 4, "eval_steps": 4}
    places = {"base": str(checkpoint), "data": str(text_file), "output_dir": str(tmp_path / "run")}
    return DistillConfig(**places, **values, max_steps=5, save_steps=2)


def whole_run(recipe: DistillConfig) -> dict[str, Any]:
    """The adapter of a run that nothing happens to."""
    output = Path(f"{recipe.output_dir}-whole")
    distill(DistillConfig.from_dict({**recipe.to_recipe(), "output_dir": str(output)}))
    return load_file(output / "adapter" / WEIGHTS)


def assert_goes_on_to_the_same_end(recipe: DistillConfig) -> None:
    run = Path(str(recipe.output_dir))
    assert [path.name for path in checkpoints(run)] == ["checkpoint-2"]
    assert damage(run / "checkpoint-2") == ""
    assert not (run / "adapter").exists()
    distill(recipe, resume=True)
    assert not (run / DRAFT).exists()
    resumed = load_file(run / "adapter" / WEIGHTS)
    for name, value in whole_run(recipe).items():
        assert torch.equal(value, resumed[name]), name


@pytest.mark.parametrize("fate", ["kill", "kill-saving"])
def test_a_killed_run_goes_on(recipe: DistillConfig, tmp_path: Path, fate: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe.to_recipe()))
    command = [sys.executable, str(Path(__file__).parent / "ill_fated.py"), fate, "distill", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (Path(str(recipe.output_dir)) / DRAFT / "checkpoint-4" / "optimizer.pt").exists() == (fate == "kill-saving")
    assert_goes_on_to_the_same_end(recipe)


@pytest.mark.parametrize("room", [8_000, 20_000], ids=["for no adapter", "for the adapter, not the optimizer"])
def test_a_full_disk_is_one_sentence_and_the_run_goes_on(
    recipe: DistillConfig, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, hard = DistillTrainer._save_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def save_checkpoint(self: DistillTrainer, *args: Any) -> None:
        # a write past the limit fails as one to a full disk does, with another number
        resource.setrlimit(resource.RLIMIT_FSIZE, (room if self.state.global_step == 4 else hard, hard))
        save(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(DistillTrainer, "_save_checkpoint", save_checkpoint)
        try:
            with pytest.raises(RetrofitError, match="the checkpoint of step 4 cannot be written to"):
                distill(recipe)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert not (Path(str(recipe.output_dir)) / DRAFT).exists()
    assert_goes_on_to_the_same_end(recipe)


def test_a_gradient_that_is_not_finite_is_never_saved(recipe: DistillConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    training_step = DistillTrainer.training_step

    def poisoned(self: DistillTrainer, *args: Any) -> Any:
        loss = training_step(self, *args)
        if self.state.global_step == recipe.max_steps - 1:
            next(self.model.memory_parameters())[1].grad.view(-1)[0] = float("nan")
        return loss

    monkeypatch.setattr(DistillTrainer, "training_step", poisoned)
    with pytest.raises(RetrofitError, match="the gradient is not finite at step 5: the run stopped"):
        distill(recipe)
    run = Path(str(recipe.output_dir))
    assert [path.name for path in checkpoints(run)] == ["checkpoint-2", "checkpoint-4"]
    assert not (run / "adapter").exists()
    for value in load_file(run / "checkpoint-4" / WEIGHTS).values():
        assert value.isfinite().all()


def test_other_data_is_no_resumption(recipe: DistillConfig) -> None:
    distill(recipe)
    data = Path(str(recipe.data))
    words = data.read_text().split()
    words[40] = "w3" if words[40] != "w3" else "w4"
    data.write_text(" ".join(words))
    with pytest.raises(RetrofitError, match=r"the data of the run in .* has changed"):
        distill(recipe, resume=True)
    (Path(str(recipe.output_dir)) / "run.json").unlink()
    with pytest.raises(RetrofitError, match=r"run\.json is missing or damaged"):
        distill(recipe, resume=True)


def test_a_launch_goes_on_where_it_had_only_begun_to_write(
    recipe: DistillConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(str(recipe.output_dir))
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"launch": "ours"}))
    with pytest.raises(RetrofitError, match="already holds something"):
        distill(recipe)
    for name, value in ((LAUNCH, "ours"), (ATTEMPT, "1")):
        monkeypatch.setenv(name, value)
    distill(recipe)
    assert (run / "recipe.yaml").is_file()


def test_rows_within_the_window_train_nothing(recipe: DistillConfig, tmp_path: Path) -> None:
    # a memory that no row of a batch reaches still gets its zero gradient: other processes wait for it
    from distill.config import DistillConfig
    from retrofit import patch
    from tests.conftest import tiny_base

    model = patch(tiny_base("Qwen2"), memory="ahn-gdn", window=6, sinks=2)
    arguments = DistillConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    ids = torch.arange(3, 11)[None]
    loss = DistillTrainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids})
    loss.backward()
    assert loss.item() == 0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for _, p in model.memory_parameters())

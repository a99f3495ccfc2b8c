"""What the trainer refuses, and how a step or a save that fails ends."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from torch import Tensor
from transformers import PreTrainedModel

import retrofit
from distill import DistillConfig, DistillTrainer
from distill.data.rows import Rows
from distill.lora import add_lora
from distill.objective import Objective
from distill.preflight import refuse_unsupported
from patches.errors import RetrofitError
from tests.distill.test_trainer import Model, make_trainer, memory


@pytest.mark.parametrize(
    ("settings", "environment", "said"),
    [
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor"),
        ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha"),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, "FSDP of accelerate's configuration"),
        ({}, {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "context, sequence and tensor parallelism"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, {}, "context, sequence and tensor parallelism"),
        ({"parallelism_config": ParallelismConfig(sp_size=2)}, {}, "context, sequence and tensor parallelism"),
    ],
)
def test_what_the_trainer_would_ignore_is_refused(
    model: Model,
    rows: Rows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    environment: dict[str, str],
    said: str,
) -> None:
    args = DistillConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, **settings)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RetrofitError, match=f"DistillTrainer does not support {said}: "):
        DistillTrainer(model, args, rows)


@pytest.mark.parametrize(
    ("settings", "processes", "said"),
    [
        ({}, 1, "start two or more"),
        ({"fsdp_config": {"version": 1}}, 2, "second version only"),
        ({"segment": 8}, 2, "fsdp does not go with segment=8"),
        ({"local_steps": 1}, 2, "fsdp does not go with local_steps=1"),
    ],
)
def test_what_does_not_go_with_fsdp_is_refused(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], processes: int, said: str
) -> None:
    args = DistillConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, fsdp=True, **settings)
    monkeypatch.setattr(DistillConfig, "world_size", processes)
    with pytest.raises(RetrofitError, match=said):
        DistillTrainer(model, args)


@pytest.mark.parametrize("asked", [{"lora": True}, {"segment": 8}, {"activation_offloading": True}, {"local_steps": 1}])
def test_what_does_not_work_with_zero3_is_refused(model: Model, tmp_path: Path, asked: dict[str, Any]) -> None:
    (name,) = asked
    if asked.pop("lora", False):
        add_lora(model, {"r": 2})
    args = DistillConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, **asked)
    args.hf_deepspeed_config = SimpleNamespace(is_zero3=lambda: True)
    with pytest.raises(RetrofitError, match=f"^{name} does not work with ZeRO-3, .*: use zero2, or leave {name} out$"):
        refuse_unsupported(model, args)
    args.hf_deepspeed_config = SimpleNamespace(is_zero3=lambda: False)
    refuse_unsupported(model, args)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError("[inline_container.cc:664] . PytorchStreamWriter failed writing"), "the disk or a quota is full"),
    ],
)
def test_a_failed_save_leaves_no_checkpoint(
    model: Model, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(DistillTrainer, "_save_rng_state", full)
    with pytest.raises(RetrofitError, match=f"checkpoint of step 2 cannot be written to .*{said}"):
        make_trainer(model, rows, tmp_path).train()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_naming_the_step(
    model: Model, rows: Rows, tmp_path: Path, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(model, rows, tmp_path)
    whole, seen = Objective.losses, []

    def losses(self: Objective, student: Any, model: Any, batch: Any, scored: Tensor) -> Tensor:
        seen.append(sorted(batch["row"].tolist()))
        return whole(self, student, model, batch, scored) * (bad if len(seen) == 3 else 1)

    monkeypatch.setattr(Objective, "losses", losses)
    with pytest.raises(RetrofitError, match=f"the loss is {bad} at step 3, rows") as error:
        trainer.train()
    assert f"rows {', '.join(map(str, seen[2]))} of the training data" in str(error.value)
    assert all(any(torch.equal(rows[row]["input_ids"], rows.batch()[0][row]) for row in batch) for batch in seen)
    assert all(parameter.isfinite().all() for parameter in memory(model).values())


def test_mse_refuses_a_memory_it_would_not_see(
    make_base: Callable[..., PreTrainedModel], rows: Rows, tmp_path: Path
) -> None:
    behind = retrofit.patch(make_base("Qwen2"), memory="tensor-cache", window=6, sinks=2)
    with pytest.raises(RetrofitError, match="'tensor-cache' joins behind it"):
        make_trainer(behind, rows, tmp_path, mse_weight=0.1)


def test_a_model_without_memory_parameters_is_refused(
    make_base: Callable[..., PreTrainedModel], rows: Rows, tmp_path: Path
) -> None:
    bare = retrofit.patch(make_base("Qwen2"), memory="none", window=6, sinks=2)
    with pytest.raises(RetrofitError, match="memory 'none' has no parameters to train"):
        make_trainer(bare, rows, tmp_path)
    with pytest.raises(RetrofitError, match="Qwen2ForCausalLM has no memory to train: patch it first"):
        make_trainer(make_base("Qwen2"), rows, tmp_path)


def test_a_memory_that_cannot_follow_drawn_windows_is_refused_before_training(
    make_base: Callable[..., PreTrainedModel], rows: Rows, tmp_path: Path
) -> None:
    halves = retrofit.patch(make_base("Qwen2"), memory="kvm", window=128, sinks=2, chunk=64, rows=64)
    make_trainer(halves, rows, tmp_path)
    says = "window_sampling='ahn' trains at other windows too; one is refused: window=32 is not a multiple of chunk=64"
    with pytest.raises(RetrofitError, match=says):
        make_trainer(halves, rows, tmp_path, window_sampling="ahn")
    fitting = retrofit.patch(make_base("Qwen2"), memory="kvm", window=128, sinks=2, chunk=32, rows=64)
    make_trainer(fitting, rows, tmp_path, window_sampling="ahn")

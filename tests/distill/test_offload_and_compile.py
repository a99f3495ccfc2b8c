"""Activations in main memory and a compiled step: the same losses, gradients and runs; what cannot be is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, training_args

from distill import DistillConfig, offload
from distill.data.rows import Rows
from distill.dry_run import plan
from distill.objective import Objective
from distill.preflight import check_recipe
from distill.simulate import checkpoint_layers
from patches.errors import RetrofitError
from tests.distill.one_step import CONFIG
from tests.distill.test_segments import batch, scored
from tests.distill.test_trainer import losses, make_trainer, memory
from tests.helpers import TRAINABLE, awake

MakeBase = Callable[..., PreTrainedModel]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was sent away: every tensor, however small, is copied as if it lay on a GPU."""
    found: list[Tensor] = []

    def send(tensor: Tensor) -> offload.Waiting:
        found.append(tensor)
        copy = tensor.clone()
        return lambda: copy.clone()

    monkeypatch.setattr(offload, "LEAST", 0)
    monkeypatch.setattr(offload, "in_main_memory", send)
    return found


@pytest.mark.parametrize("kind", TRAINABLE)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_gradients_through_main_memory(make_base: MakeBase, sent: list[Tensor], kind: str, checkpointing: bool) -> None:
    model = awake(make_base("Llama").double(), kind).train()
    if checkpointing:
        checkpoint_layers(model)
    objective, rows = Objective(), batch(left=3)
    expected = scored(model, objective, rows)
    assert not sent
    with offload.offloaded(model):
        found = scored(model, objective, rows)
    assert torch.equal(found[0], expected[0])
    for mine, whole in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-12)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert sent
    assert not any(tensor.untyped_storage().data_ptr() in weights for tensor in sent)


@pytest.fixture
def model(make_base: MakeBase) -> Any:
    return fresh(make_base)


def fresh(make_base: MakeBase) -> Any:
    """The same model each time, as in a process of its own."""
    return awake(make_base("Qwen2", num_hidden_layers=1), "ahn-gdn", 6, 2)


def run(make_base: MakeBase, rows: Rows, folder: Path, last: str = "", **settings: Any) -> dict[str, Any]:
    """Losses and weights of a run, resumed from the checkpoint ``last`` in its folder if one is named."""
    model = fresh(make_base)
    trainer = make_trainer(model, rows, folder, **settings)
    trainer.train(resume_from_checkpoint=str(folder / last) if last else None)
    return {**memory(model), "losses": torch.tensor(losses(trainer))}


def test_a_run_through_main_memory_resumes(make_base: MakeBase, rows: Rows, tmp_path: Path, sent: list[Tensor]) -> None:
    expected = run(make_base, rows, tmp_path / "plain")
    assert not sent
    for last in ("", "checkpoint-2"):
        found = run(make_base, rows, tmp_path / "run", last, activation_offloading=True)
        assert sent
        sent.clear()
        for name, number in found.items():
            assert torch.equal(number, expected[name]), name


def test_a_compiled_run_and_its_resumption(
    make_base: MakeBase, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, compiled = run(make_base, rows, tmp_path / "plain"), torch._dynamo.utils.counters["stats"]
    for last in ("", "checkpoint-2"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters["graph_break"].clear()
        compiled.clear()
        monkeypatch.setattr("patches.kernels._chosen", {})  # as in a process of its own
        how = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
        found = run(make_base, rows, tmp_path / "run", last, **how)
        assert 0 < compiled["unique_graphs"] <= 3
        assert not torch._dynamo.utils.counters["graph_break"]
        for name, number in found.items():
            torch.testing.assert_close(number, expected[name], rtol=0, atol=1e-4 if name != "losses" else 1e-5)


def test_what_is_elsewhere_is_not_counted(tmp_path: Path) -> None:
    Qwen2Config(**{**CONFIG, "vocab_size": 64}).save_pretrained(tmp_path / "base")
    shape = {"base": str(tmp_path / "base"), "window": 480, "sinks": 32, "max_length": 1024, "max_steps": 2}
    here, layers, away, both = (
        plan(
            DistillConfig(**shape, gradient_checkpointing=checkpointing, activation_offloading=offloading)
        ).activation_bytes
        for offloading in (False, True)
        for checkpointing in (False, True)
    )
    assert here > layers > both
    assert here > away


def test_compiling_does_not_switch_tf32_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(
        training_args, "enable_tf32", lambda on: torch.set_float32_matmul_precision("high" if on else "highest")
    )
    before = torch.get_float32_matmul_precision()
    DistillConfig(output_dir=str(tmp_path), torch_compile=True, use_cpu=True)
    assert torch.get_float32_matmul_precision() == before == "highest"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"activation_offloading": True, "segment": 8}, "activation_offloading does not go with segment=8"),
        ({"torch_compile": True, "segment": 8}, "torch_compile does not go with segment=8"),
        ({"torch_compile": True, "local_steps": 1}, "local_steps=1"),
        ({"torch_compile": True, "window_sampling": "ahn"}, "window_sampling=ahn"),
        ({"torch_compile": True, "fsdp": True}, "torch_compile does not go with fsdp=True"),
    ],
)
def test_what_does_not_go_together(settings: dict[str, Any], said: str, model: Any, rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match=said):
        check_recipe(DistillConfig(**settings))
    with pytest.raises(RetrofitError, match=said):
        make_trainer(model, rows, tmp_path, **settings)


def test_a_memory_whose_steps_a_compiler_cannot_see(make_base: MakeBase, rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match="torch_compile does not work with memory 'kvm'"):
        make_trainer(awake(make_base("Qwen2"), "kvm"), rows, tmp_path, torch_compile=True)

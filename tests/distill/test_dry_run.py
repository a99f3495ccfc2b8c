"""`distill --dry-run`: formulas by hand, memory against a step that was really run, and that no weights are needed."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

import retrofit
from cli import app
from distill import dry_run
from distill.config import DistillConfig
from distill.dry_run import hours, plan, table
from distill.lora import add_lora
from distill.objective import Objective
from distill.simulate import Tracker, step_bytes
from patches.config import MemoryConfig
from patches.errors import RetrofitError
from tests.distill.one_step import CONFIG, SETTINGS
from tests.helpers import ROOT

PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
MakeBase = Callable[..., PreTrainedModel]


@pytest.fixture
def unweighed(tmp_path: Path, make_base: MakeBase) -> Path:
    """A folder with a configuration and nothing else."""
    make_base("Qwen2").config.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def small(folder: Path, **keys: Any) -> DistillConfig:
    given: dict[str, Any] = {
        "base": str(folder),
        "window": 8,
        "sinks": 2,
        "max_length": 40,
        "max_steps": 50,
        "per_device_train_batch_size": 3,
    }
    return DistillConfig(**{**given, **keys})


def test_operations_by_hand(unweighed: Path) -> None:
    L, E, H, D, F, V, T = 2, 64, 4, 16, 96, 101, 40
    body = 2 * L * (2 * E * H * D + 2 * E * 2 * D + 3 * E * F) * T
    full, windowed = (4 * pairs * H * D * L for pairs in (T * (T + 1) // 2, 55 + 10 * (T - 10)))
    weights = 3 * H * E + H * D * D  # three gates, read_proj
    scan = L * (2 * weights * T + 2 * 3 * H * D * D * (T - 10))
    head = 2 * V * E * (T - 10)
    plain = (body + full) + (body + windowed + scan) + (body + 2.5 * windowed + 2 * scan) + 3 * head
    student = body + windowed + scan
    found = plan(small(unweighed, gradient_accumulation_steps=2))
    assert (found.step_flops, found.step_flops_plain) == (int(plain * 6), int(plain * 6))
    assert found.step_flops_checkpointed == int((plain + student) * 6)
    assert plan(small(unweighed, gradient_checkpointing=True)).step_flops == int((plain + student) * 3)
    assert plan(small(unweighed, loss="ce")).step_flops == int((plain - body - full - head) * 3)
    projected = 2 * L * (2 * E * H * D + 2 * E * 2 * D) * T
    assert found.local_flops == int((body + full + 2 * (projected + windowed) + 3 * scan) * 6)


def test_parameters_are_those_that_are_trained(unweighed: Path, make_base: MakeBase) -> None:
    found = plan(small(unweighed, memory="joint", layers=[1]))
    model = retrofit.patch(make_base("Qwen2"), "joint", 8, 2, layers=[1])
    assert found.trained == sum(parameter.numel() for _, parameter in model.memory_parameters())
    assert found.trained + found.base_parameters == model.num_parameters()


@PEFT
def test_lora_is_counted(unweighed: Path, make_base: MakeBase) -> None:
    found, without = (plan(small(unweighed, lora=lora)) for lora in ({"r": 2}, {}))
    model = retrofit.patch(make_base("Qwen2"), "ahn-gdn", 8, 2)
    add_lora(model, {"r": 2})
    assert found.trained == sum(p.numel() for p in model.parameters() if p.requires_grad) > without.trained
    assert found.base_parameters == without.base_parameters


def test_a_gpu_more_learns_more_in_the_same_hours(unweighed: Path) -> None:
    recipe = small(unweighed, gradient_accumulation_steps=2)
    found = plan(recipe)
    rows = table(found, recipe, 989, 0.45)
    assert [row["rows_per_step"] for row in rows] == [6, 12, 24, 48, 96, 192]
    assert rows[2]["tokens"] == 50 * 24 * 40 / 1e6
    assert rows[5]["gpu_hours"] == 32 * rows[0]["gpu_hours"]
    assert hours(found, recipe, 10, 0.5) == pytest.approx(50 * found.step_flops / 5e12 / 3600)
    staged = replace(recipe, local_steps=20)
    total = 30 * found.step_flops + 20 * found.local_flops
    assert hours(plan(staged), staged, 10, 0.5) == pytest.approx(total / 5e12 / 3600)


def test_zero_divides_what_its_stages_say(unweighed: Path) -> None:
    found = replace(plan(small(unweighed)), base_bytes=800, gathered_bytes=50, trained=100, activation_bytes=7)
    assert [found.memory(1, stage) for stage in (0, 2, 3)] == [800 + 1600 + 7] * 3
    assert [found.memory(4, stage) for stage in (0, 2, 3)] == [2407, 800 + 400 + 300 + 7, 200 + 50 + 100 + 300 + 7]


def test_windows_are_those_the_run_will_draw(unweighed: Path) -> None:
    found = plan(small(unweighed, window_sampling="ahn", max_length=200, max_steps=20))
    assert sum(found.windows.values()) == 20
    assert {W + S for W, S in found.windows} <= {32, 64, 128}
    mean = sum(count * (200 - W - S) for (W, S), count in found.windows.items()) / 20
    assert found.scored == mean


@pytest.mark.parametrize("checkpointing", [True, False])
def test_predicted_memory_beside_a_step_that_was_run(checkpointing: bool) -> None:
    """Near what one step really adds to the resident memory of a process (docs/estimate.md has the figures)."""
    kind, length = "ahn-gdn", 2048
    predicted = step_bytes(
        Qwen2Config(**CONFIG), MemoryConfig(kind, **SETTINGS), 1, length, torch.float32, checkpointing
    )
    measured = one_step(kind, checkpointing, length)
    print(f"predicted {predicted / 2**20:.0f} MiB, measured {measured / 2**20:.0f} MiB")
    assert predicted == pytest.approx(measured, rel=0.25)


def one_step(kind: str, checkpointing: bool, length: int) -> int:
    # a fixed threshold hands every freed tensor back to the system: the heap's holes are not the step's
    environment = {"PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536", "HF_HUB_OFFLINE": "1"}
    script = ROOT / "tests" / "distill" / "one_step.py"
    command = [sys.executable, str(script), kind, str(int(checkpointing)), str(length)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_long_rows_are_predicted_from_a_few_segments() -> None:
    """Four layers and twenty segments are predicted from two and three layers, and what is allocated is just that."""
    config = Qwen2Config(**{**CONFIG, "hidden_size": 64, "num_hidden_layers": 4})
    settings, tokens, objective = MemoryConfig("ahn-gdn", 28, 4), 640, Objective(segment=32)
    predicted = step_bytes(config, settings, 1, tokens, torch.float32, False, objective)
    model = retrofit.patch(Qwen2ForCausalLM(config), "ahn-gdn", 28, 4).train()
    for _, parameter in model.memory_parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with Tracker() as tracker:
        objective.losses(
            model, model, {"input_ids": ids, "labels": ids}, torch.arange(tokens)[None] >= 32
        ).sum().backward()
    assert predicted == pytest.approx(tracker.peak, rel=0.1)
    assert step_bytes(config, settings, 1, tokens, torch.float32, False) > 2 * predicted


def test_a_teacher_in_main_memory_takes_two_layers_of_its_cache() -> None:
    config = Qwen2Config(**{**CONFIG, "hidden_size": 64, "num_hidden_layers": 12})
    settings, tokens = MemoryConfig("ahn-gdn", 28, 4), 2**16
    here, elsewhere = (
        step_bytes(config, settings, 1, tokens, torch.float32, True, Objective(segment=32, offload_teacher=offloaded))
        for offloaded in (False, True)
    )
    of_layer = 2 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads * 4 * tokens
    assert 0 < here - elsewhere <= 10 * of_layer


def test_checkpointing_keeps_one_row_of_states_per_layer() -> None:
    settings = MemoryConfig("ahn-gdn", 32, 4)
    deep = Qwen2Config(**{**CONFIG, "num_hidden_layers": 40})
    shallow = Qwen2Config(**CONFIG)
    more = [step_bytes(config, settings, 2, 256, torch.bfloat16, True) for config in (deep, shallow)]
    assert more[0] - more[1] == 34 * 2 * 256 * 512 * 2


def test_the_command_needs_no_weights(unweighed: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    arguments = ["distill", str(unweighed), "--window", "8", "--sinks", "2", "--max-length", "40", "--dry-run"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    for key in data["recipe"]:
        assert f"\n{key}:" in f"\n{result.stdout}"
    assert "45% of 989 TFLOP/s" in result.stdout
    assert [row["gpus"] for row in data["rows"]] == list(dry_run.GPUS)
    assert not (tmp_path / "base" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"base": None}, "has no 'base'"),
        ({"base": "/no/such/folder"}, "there is no folder"),
        ({"memory": "tova"}, "has nothing to fit"),
        ({"memory": "kmv"}, "did you mean 'kvm'"),
        ({"layers": [7]}, "is not a layer of this base"),
        ({"memory": "tensor-cache", "loss": "mse"}, "joins behind it"),
        (
            {"memory": "kvm", "window_sampling": "ahn", "window": 24, "options": {"chunk": 12}},
            "window_sampling='ahn' trains at other windows too",
        ),
        pytest.param({"lora": {"rank": 2}}, "is not a field of peft.LoraConfig", marks=PEFT),
    ],
)
def test_mistakes(unweighed: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(RetrofitError, match=said):
        plan(small(unweighed, **keys))

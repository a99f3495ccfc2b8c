"""Shipped recipes: valid, commented as they are meant to be, and dry-run without weights or a network."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import app
from distill import dry_run
from distill.config import load_recipe
from patches.errors import RetrofitError
from retrofit.costs import bases
from retrofit.recipes import shipped_recipes
from tests.pages import text_of

AHN = [f"qwen2.5-{size}-ahn-{kind}" for size in ("3b", "7b", "14b") for kind in ("mamba2", "dn", "gdn")]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def local_only(path: str, **kwargs: Any) -> Any:
        if Path(path).is_dir():
            return bases.Qwen2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        raise RetrofitError("the Hub cannot be reached")

    monkeypatch.setattr(bases, "load_config", local_only)
    # the step on tensors without data takes half a minute at 24,576 tokens: its own tests run it
    monkeypatch.setattr(dry_run, "step_bytes", lambda *_: 10 * 2**30)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_dry_runs(name: str, tmp_path: Path) -> None:
    base = [] if load_recipe(name).base else ["--base", str(tmp_path)]
    result = CliRunner().invoke(app, ["distill", name, *base, "--dry-run"])
    assert result.exit_code == 0, result.output
    if not base:
        assert "the Hub cannot be reached: published shape" in result.stdout


def test_a_flag_takes_a_recipes_deepspeed_away(tmp_path: Path) -> None:
    for given, expected in (([], "zero3"), (["--deepspeed", "none"], None), (["--deepspeed", "zero2"], "zero2")):
        path = tmp_path / "plan.json"
        dry = ["distill", "qwen2.5-14b-ahn-gdn", *given, "--dry-run", "--json", str(path)]
        assert CliRunner().invoke(app, dry).exit_code == 0
        assert json.loads(path.read_text())["recipe"]["deepspeed"] == expected
        path.unlink()


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_recipe_says_its_command_first(name: str) -> None:
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    assert re.match(r"# \S.*\.\n#\n#   retrofit distill " + re.escape(name) + " ", text)


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if name.startswith("qwen")])
def test_the_hours_it_names_are_those_of_the_dry_run(name: str) -> None:
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    said = re.search(r"at most ([\d.]+) hours\n.*\((\d+) GPU hours\)", text)
    assert said, "no hours"
    recipe = load_recipe(name)
    found = dry_run.hours(dry_run.plan(recipe), recipe, 989, 0.45)
    assert float(said[1]) == pytest.approx(found, abs=0.06)
    assert int(said[2]) == pytest.approx(32 * found, abs=1)


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if load_recipe(name).max_steps == 740])
def test_the_commands_take_the_papers_rows_per_step(name: str) -> None:
    recipe = load_recipe(name)
    command = re.search(r"--nproc (\d+)(?: --gradient-accumulation-steps (\d+))? ", shipped_recipes()[name].read_text())
    assert command, "no command for several GPUs"
    assert (
        int(command[1]) * recipe.per_device_train_batch_size * int(command[2] or recipe.gradient_accumulation_steps)
        == 128
    )


@pytest.mark.parametrize("page", ["README.md", "docs/many-gpus.md"])
def test_the_share_that_is_trained_is_counted(page: str) -> None:
    plan = dry_run.plan(load_recipe("qwen2.5-7b-ahn-gdn"))
    share = f"{plan.trained / plan.base_parameters:.2%}".replace("%", " %")
    assert f"{share} of the model for `ahn-gdn` on Qwen2.5-7B" in text_of(page)


def test_the_nine_ahn_runs() -> None:
    recipes = {name: load_recipe(name) for name in AHN}
    assert {recipe.memory for recipe in recipes.values()} == {"ahn-mamba2", "ahn-dn", "ahn-gdn"}
    differing = {"base", "memory", "deepspeed"}
    first = recipes[AHN[0]].to_recipe()
    for name, recipe in recipes.items():
        assert recipe.deepspeed == ("zero3" if "14b" in name else None)  # the others fit a GPU of 80 GB whole
        assert {key for key, value in recipe.to_recipe().items() if value != first[key]} <= differing, name
        assert recipe.base == f"Qwen/Qwen2.5-{name.split('-')[1].upper()}-Instruct"
    settings = {
        "learning_rate": 1e-4,
        "warmup_steps": 0.1,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "adam_beta2": 0.999,
        "max_steps": 740,
        "max_length": 24576,
        "min_length": 288,
        "max_samples": 100000,
        "window_sampling": "ahn",
        "label_shift": "ahn",
        "loss": "kl",
        "dtype": "bfloat16",
        "gradient_checkpointing": True,
    }
    assert settings.items() <= first.items()
    assert first["per_device_train_batch_size"] * first["gradient_accumulation_steps"] * 32 == 128


def test_the_ablations_differ_in_what_they_are_about() -> None:
    paper = load_recipe("qwen2.5-7b-ahn-mamba2").to_recipe()
    changed = {"ce": {"loss"}, "fixed-1024": {"window", "window_sampling"}}
    for ablation, keys in changed.items():
        ours = load_recipe(f"qwen2.5-7b-ahn-mamba2-{ablation}").to_recipe()
        assert {key for key in ours if ours[key] != paper[key]} == keys


def test_check_looks_at_the_memory_too(tmp_path: Path) -> None:
    wrong = {
        "memory: kmv": "did you mean 'kvm'",
        "memory: kvm\noptions: {row: 3}": "has no option 'row'",
        "memory: tova": "has nothing to fit",
        "report_to: wandbb": "did you mean 'wandb'",
        "deepspeed: zero4": "there is no file zero4",
        "lora: {rr: 2}": "is not a field of peft.LoraConfig",
    }
    for text, said in wrong.items():
        path = tmp_path / "run.yaml"
        path.write_text(text)
        result = CliRunner().invoke(app, ["recipes", "check", str(path)])
        assert result.exit_code == 2
        assert said in result.stderr

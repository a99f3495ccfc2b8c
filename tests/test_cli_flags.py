"""Flags that are made from settings: every key has one, and what it says is what the settings say."""

import json
from pathlib import Path
from typing import Any

import pytest

from distill.config import DistillConfig
from distill.recipe import DistillKeys
from retrofit.evaluation.settings import Settings
from retrofit.settings import Setting, settings
from tests.test_cli import refused, run

RECIPE = {
    "base": "b",
    "data": "d",
    "output_dir": "o",
    "init_adapter": "a",
    "report_to": "wandb",
    "memory": "kvm",
    "options": {"rows": 4},
    "by_layer": {"1": {"rows": 5}},
    "lora": {"r": 8},
    "layers": [0, 2],
    "data_name": "n",
    "data_revision": "v1",
    "data_split": "test",
    "max_samples": 7,
    "holdout": 0.25,
    "learning_rate": 0.02,
    "adam_beta2": 0.5,
    "deepspeed": "zero2",
    "mix": {"a.txt": 2},
    "eval_data": "e",
    "num_train_epochs": 2.0,
    "lr_scheduler_kwargs": {"min_lr": 0.1},
    "segment": 64,
    "local_learning_rate": 0.5,
    "segments_back": 2,
    "patience": 3,
    "hub_model_id": "user/name",
    "lr_scheduler_type": "linear",
    "optim": "sgd",
    "eval_steps": 3,
    "save_steps": 3,
    "logging_steps": 3,
    "warmup_steps": 3,
    "max_steps": 7,
}
# a stream cannot have these
OF_FILES = {"mix", "num_train_epochs", "dataloader_num_workers", "group_by_length"}
EVAL = {"data": "t", "window": 8, "sinks": 1, "seq_len": 64, "limit": 3, "max_length": 900}
EVAL |= {"probes": ("passkey",), "adapters": ("x", "y"), "tasks": ("a", "b")}
EVAL |= {"depths": (0.5, 1.0), "include_path": "p"}


def other(key: Setting, chosen: dict[str, Any]) -> Any:
    """A value that is not the default."""
    if key.name in chosen:
        return chosen[key.name]
    if key.choices:
        return key.choices[-1] if key.default != key.choices[-1] else key.choices[0]
    values = {bool: not key.default, tuple: (7, 9)}
    return values[key.kind] if key.kind in values else key.kind(key.default + 1)


def flags(of: Any, chosen: dict[str, Any], but: set[str]) -> list[str]:
    """The command line that sets every key ``but`` some."""
    line = []
    for name, key in settings(of).items():
        value, flag = other(key, chosen), key.flag or f"--{name.replace('_', '-')}"
        if name in but:
            continue
        if key.kind is bool:
            line += [flag if value else flag.replace("--", "--no-")]
        elif key.kind is tuple:
            line += [part for one in value for part in (flag, str(one))]
        else:
            line += [flag, value if isinstance(value, str) else json.dumps(value)]
    return line


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the verbs make of a command line."""
    found: list[Any] = []

    def keep(of: Any, *_: object, **__: object) -> None:
        found.append(of)
        raise KeyboardInterrupt

    monkeypatch.setattr("distill.dry_run.dry_run", keep)
    monkeypatch.setattr("retrofit.evaluation.run.run_evaluation", keep)
    return found


@pytest.mark.parametrize(
    ("verb", "of", "chosen", "but"),
    [
        (["distill", "small-text-ahn-gdn", "--dry-run"], DistillKeys, RECIPE, {"streaming"}),
        (["distill", "small-text-ahn-gdn", "--dry-run"], DistillKeys, RECIPE, OF_FILES),
        (["eval", "m"], Settings, EVAL, {"chunk"}),
    ],
    ids=["distill", "distill a stream", "eval"],
)
def test_every_setting_has_a_flag(
    verb: list[str], of: Any, chosen: dict[str, Any], but: set[str], seen: list[Any]
) -> None:
    assert run(*verb, *flags(of, chosen, but)).exit_code == 130
    (made,) = seen
    for name, key in settings(of).items():
        if name not in but:
            assert getattr(made, name) == other(key, chosen) != key.default, name


def test_what_no_flag_says_is_left_as_it_was(seen: list[Any]) -> None:
    assert run("distill", "qwen2.5-3b-joint", "--max-steps", 3, "--dry-run").exit_code == 130
    assert run("eval", "m").exit_code == 130
    recipe, evaluation = seen
    assert (recipe.max_steps, recipe.memory) == (3, "joint")
    assert recipe.max_length != DistillConfig(base="b").max_length
    assert evaluation == Settings("m")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["distill", "b", "--layers", "[x]"], "layers: ['x'] is not a list of whole numbers"),
        (["distill", "b", "--lora", "{r: *a}"], "lora: not a YAML file"),
        (["distill", "b", "--max-steps", "9" * 30], "is out of range, it must be at most"),
        (["distill", "b", "--loss", "kll"], "loss: 'kll' is not one of kl, ce, mse (did you mean 'kl'?)"),
        (["distill", "b", "--adam-beta1", "many"], "'--adam-beta1'"),
        (
            ["distill", "b", "--batch_size", "3"],
            "'batch_size' is called 'per_device_train_batch_size': rename",
        ),
        (["distill", "b", "--max-stebs", "3"], "--max-steps"),
        (["distill", "b", "--options", "{a: 1}", "--option", "a=2"], "--option a is given by another flag, too"),
        (["distill", "b", "--base", "c"], "--base c: the base is b already: leave one of them out"),
        (["patch", "b", "-o", "x", "--option", "rows=3", "--option", "rows=4"], "--option rows is given twice"),
        (["eval", "m", "--length", "0"], "lengths: 0 is out of range, it must be 1 or more"),
        (["eval", "m", "--dtype", "int8"], "dtype: 'int8' is not one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_setting_refuses_its_flag_refuses(line: list[str], said: str) -> None:
    refused(run(*line), said)


@pytest.mark.parametrize(("verb", "of"), [("distill", DistillKeys), ("eval", Settings)])
def test_help_says_what_the_settings_say(verb: str, of: Any) -> None:
    page = " ".join(run(verb, "--help").output.split())
    for name, key in settings(of).items():
        if name != "chunk":
            assert (key.flag or f"--{name.replace('_', '-')}") in page
            assert key.help.split(".")[0][:20] in page


@pytest.mark.parametrize(
    "line",
    [
        "--learning-rate 1e-3 --adam-epsilon 1e-6 --dataloader-drop-last --no-packing --bf16",
        "--learning_rate=1e-3 --adam_epsilon=1e-6 --dataloader_drop_last True --packing False --bf16 true",
    ],
)
def test_flags_of_transformers_are_written_as_there(line: str, seen: list[Any]) -> None:
    """Before the base, too, since it is then that a switch could take it for its value."""
    assert run("distill", *line.split(), "b", "--dry-run").exit_code == 130
    (made,) = seen
    assert (made.base, made.learning_rate, made.adam_epsilon) == ("b", 1e-3, 1e-6)
    assert (made.dataloader_drop_last, made.packing, made.bf16, made.fp16) == (True, False, True, False)


def test_a_recipe_that_is_no_mapping(tmp_path: Path) -> None:
    for text in ("- a", "hello", "5", "[]", "false", "2001-01-01"):
        (tmp_path / "r.yaml").write_text(text)
        for line in (["distill", tmp_path / "r.yaml"], ["recipes", "check", tmp_path / "r.yaml"]):
            refused(run(*line), "a recipe is a mapping of keys to values")

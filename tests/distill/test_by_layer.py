"""Layers with windows and options of their own (``by_layer``): every verb takes them from a recipe."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import retrofit
from distill.config import DistillConfig, load_recipe
from distill.preflight import budgets
from distill.simulate import step_bytes
from patches.config import MemoryConfig
from patches.errors import RetrofitError
from retrofit.bench.run import Case
from retrofit.evaluation.contenders import contenders
from tests.helpers import S, logits, tokens
from tests.test_cli import refused, run


def test_a_recipe_that_is_distilled(byte_checkpoint: Path, tmp_path: Path) -> None:
    memory = {"memory": "joint", "window": 9, "sinks": 1, "by_layer": {"1": {"window": 4}}, "options": {"features": 6}}
    file = tmp_path / "need.yaml"
    file.write_text(yaml.safe_dump(memory))
    assert load_recipe(file).by_layer == memory["by_layer"]
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    few = ["--max-steps", "3", "--local-steps", "1", "--max-length", "48", "--eval-rows", "2"]
    line = ["distill", file, "--base", byte_checkpoint, "--data", tmp_path / "text.txt", *few]
    refused(run(*line, "--by-layer", "{1: {wndow: 3}}", "-o", tmp_path / "run"), "no option 'wndow'")
    refused(run(*line, "--by-layer", "{5: {window: 3}}", "-o", tmp_path / "run"), "5 is not a layer of this base")
    refused(run(*line, "--window-sampling", "ahn", "-o", tmp_path / "run"), "leave the windows out of by_layer")
    result = run(*line, "-o", tmp_path / "run")
    assert result.exit_code == 0, result.output
    fitted = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    again = retrofit.load_adapter(str(byte_checkpoint), tmp_path / "run" / "adapter")
    assert [one.window for one in fitted.model.memories().values()] == [9, 4]
    assert torch.equal(logits(fitted, tokens(1, 30)), logits(again, tokens(1, 30)))
    for words in (
        ["patch", byte_checkpoint, "-o", tmp_path / "patched"],
        ["estimate", byte_checkpoint, "--length", 90],
    ):
        result = run(*words, "--recipe", file)
        assert result.exit_code == 0, result.output
        refused(run(*words, "--recipe", file, "--window", 9), "--window")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert [one.window for one in model.model.memories().values()] == [9, 4]


WIDE: dict[str, Any] = {"memory": "joint", "window": 600, "sinks": 4, "max_length": 512}


def test_rows_are_longer_than_every_window(make_base: Callable[..., Any]) -> None:
    """A layer whose window holds whole rows would be exported as it began."""
    recipe = DistillConfig.from_dict({**WIDE, "by_layer": {"1-3": {"window": 40}, "4": {"features": 6}}})
    config = make_base("Llama", num_hidden_layers=5).config
    assert budgets(replace(recipe, max_length=606), config) == (44, 604)
    with pytest.raises(RetrofitError, match=r"512 tokens never leave a window of 600 .* set 606 or more"):
        budgets(recipe, config)
    with pytest.raises(RetrofitError, match="never leave a window of 600"):
        DistillConfig.from_dict({**WIDE, "by_layer": {"1": {"window": 700}, "4": {"features": 6}}})


@pytest.mark.parametrize(
    "more",
    [
        {"window": 8, "by_layer": {"0-1": {"window": 700}}},
        {"window": 700, "by_layer": {"1": {"window": 8}}, "layers": [0], "others": "window"},
        {"window": 8, "by_layer": {"0": {"window": 700}}, "layers": [0]},
    ],
)
def test_a_window_that_no_layer_with_the_memory_has_leaves_nothing_to_learn(
    more: dict[str, Any], byte_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 600)
    file, line = tmp_path / "recipe.yaml", ["distill", tmp_path / "recipe.yaml", "--base", byte_checkpoint]
    file.write_text(yaml.safe_dump({**WIDE, **more}))
    for arguments in (["--dry-run"], ["--data", tmp_path / "text.txt", "-o", tmp_path / "run"]):
        refused(run(*line, *arguments), "512 tokens never leave a window of 700", "set 706 or more")
    assert not (tmp_path / "run").exists()


def test_others_are_compared_at_the_windows_that_layers_have(make_base: Callable[..., Any]) -> None:
    own = retrofit.patch(make_base("Llama"), "joint", 4, S, by_layer={"0-1": {"window": 20}})
    rows = contenders({"wide": own, "narrow": retrofit.patch(make_base("Llama"), "ahn-gdn", 9, S)})
    assert [row.window for row in rows if row.name == "window-only"] == [9]
    arm = Case(memories=("ahn-dn",), lengths=(64,)).arm(own, "ahn-dn")
    assert [memory.window for memory in arm.model.memories().values()] == [20, 20]


def test_what_a_step_takes_is_that_of_the_narrowest_window(make_base: Callable[..., Any]) -> None:
    config, bytes_of = make_base("Llama").config, partial(step_bytes, rows=1, tokens=96, dtype=torch.float32)
    own = MemoryConfig("joint", 64, S, by_layer={"0": {"window": 8}, "1": {"window": 9}})
    assert bytes_of(config, own, checkpointing=False) == bytes_of(
        config, MemoryConfig("joint", 8, S), checkpointing=False
    )

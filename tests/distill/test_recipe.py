"""Recipes: what is read, and what is refused with which sentence."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from distill.config import DistillConfig, load_recipe
from distill.recipe import RENAMED
from patches.errors import RetrofitError
from retrofit.recipes import shipped_recipes
from retrofit.settings import settings
from tests.helpers import ROOT


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_a_file_and_its_dictionary_give_the_same_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "memory: ahn-dn\nwindow: 16\nlayers: [0, 2]\nlearning_rate: 3e-2\n"))
    assert (recipe.memory, recipe.window, recipe.layers, recipe.learning_rate) == ("ahn-dn", 16, [0, 2], 0.03)
    assert DistillConfig.from_dict(recipe.to_recipe()) == recipe


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("windw: 32", "unknown key 'windw' (did you mean 'window'?)"),
        ("window: 0", "window: 0 is out of range"),
        ("window: 1.5", "window: 1.5 is not a whole number"),
        ("learning_rate: fast", "learning_rate: 'fast' is not a number"),
        ("learning_rate: 0", "learning_rate: 0 is out of range, it must be more than 0"),
        ("by_layer: {0: {window: 8}, '0': {window: 9}}", "names something twice"),
        ("layers: 3", "layers: 3 is not a list of whole numbers"),
        ("layers: [true]", "layers: [True] is not a list of whole numbers"),
        ("options: [a]", "options: ['a'] is not a mapping"),
        ("options: {window: 4}", "options: 'window' is not an option of a memory"),
        ("window_sampling: anh", "window_sampling: 'anh' is not one of fixed, ahn (did you mean 'ahn'?)"),
        ("window: 600", "max_length: 512 tokens never leave a window of 600"),
        ("min_length: 512", "min_length: 512 would leave out every conversation"),
        ("data_name: 3", "data_name: 3 is not text"),
        ("streaming: 1", "streaming: 1 is not true or false"),
        ("seed: 4294967296", "seed: 4294967296 is out of range, it must be 0 or more and at most 4294967295"),
        ("max_steps: 9223372036854775807", "it must be at most 2147483647"),
        ("max_steps: 1\nmax_steps: 2", "'max_steps' is given twice"),
        ("lr: 1\nsteps: 2", "'lr' is called 'learning_rate', 'steps' is called 'max_steps': rename it"),
        ("optim: adamv", "optim: 'adamv' is not one of"),
        ("hub_strategy: often", "hub_strategy: 'often' is not one of end, every_save"),
        ("adam_beta1: many", "adam_beta1: 'many' is not a number"),
        ("label_names: [3]", "label_names: [3] is not a list"),
        ("- 1", "a recipe is a mapping of keys to values, this is a list"),
        ("window: [", "not a YAML file"),
    ],
)
def test_mistakes_are_named_with_their_file(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RetrofitError) as error:
        load_recipe(path)
    assert str(path) in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_name_suggests_a_shipped_one() -> None:
    with pytest.raises(RetrofitError, match=r"did you mean 'small-text-ahn-gdn'\?"):
        load_recipe("small-text-ahn-gnd")


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid(name: str) -> None:
    load_recipe(name)


@pytest.mark.parametrize("given", [{}, {"base": "b"}, {"base": "b", "data": "d"}])
def test_what_is_left_open_is_asked_for(given: dict[str, Any]) -> None:
    with pytest.raises(RetrofitError, match=r"the recipe has no '\w+': set it"):
        DistillConfig(**given).places()


def test_every_field_of_transformers_may_stand_in_a_recipe() -> None:
    fields = settings(TrainingArguments)
    assert len(fields) > 80
    known = settings(DistillConfig)
    for name in fields:
        assert name in known
    made = DistillConfig.from_dict({name: known[name].default for name in fields})
    assert made == DistillConfig()
    assert DistillConfig.from_dict(DistillConfig(adam_beta1=0.5, hub_token="secret").to_recipe()).adam_beta1 == 0.5
    assert "secret" not in str(DistillConfig(hub_token="secret").to_recipe())


def test_reading_a_recipe_does_not_import_torch() -> None:
    code = "import sys, distill.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_sentences_name_keys_as_recipes_do() -> None:
    """No sentence that a user may read advises a key that is refused under this name."""
    old = "|".join(key for key in RENAMED if "_" in key)
    for file in (ROOT / "distill").rglob("*.py"):
        for sentence in re.findall(r"(?:RetrofitError|print|say)\((.*?)\)\n", file.read_text(), re.DOTALL):
            named = re.findall(rf"(?<![\w{{.])({old})(?![\w}}:])", "".join(re.findall(r'"[^"]*"', sentence)))
            assert not named, f"{file.name}: {sentence}"

"""`retrofit allocate`: bytes go where they are needed, the budget holds, and what it writes is taken by other verbs."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import Result

import retrofit
from distill.config import DistillConfig
from distill.preflight import budgets
from distill.simulate import step_bytes
from patches.config import MemoryConfig
from patches.errors import RetrofitError
from patches.kinds import KINDS
from retrofit.allocation.allocate import Allocation, allocate
from retrofit.allocation.recipe import read_memory, write_memory
from retrofit.allocation.sizes import Size, Sizer, spend
from retrofit.bench.run import Case
from retrofit.evaluation.contenders import contenders
from tests.helpers import S, logits, tokens
from tests.test_cli import refused, run

ROW = 2 * 2 * 16 * 4  # bytes of a token's keys and values in a layer of a tiny base
BUDGET = 24 * ROW
LENGTH = 96


def patched(base: Any, found: Allocation) -> Any:
    recipe = dict(found.recipe)
    options = recipe.pop("options", {})
    return retrofit.patch(base, **recipe, **options)


def kept(model: Any) -> int:
    """Bytes of all layers, the sinks left out."""
    memories = model.model.memories().values()
    return sum(memory.window * ROW + memory.state_bytes(model.dtype) for memory in memories)


@pytest.fixture
def needy(make_base: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """A base whose first layer looks everywhere and whose second one writes nothing."""
    base = make_base("Llama")
    with torch.no_grad():
        base.model.layers[1].self_attn.o_proj.weight.zero_()
    return base


@pytest.mark.parametrize("kind", ["none", "expected", "joint"])
def test_bytes_go_where_they_are_needed(kind: str, needy: PreTrainedModel) -> None:
    found = allocate(
        needy, kind, BUDGET * (4 if kind == "joint" else 1), tokens(1, 3 * LENGTH), tokens(1, 3 * LENGTH, 1), sinks=S
    )
    assert found.share[0] == pytest.approx(1)
    first, second = found.chosen.sizes.values()
    assert first.bytes > second.bytes
    for plans in filter(None, (found.window, found.memory)):
        assert plans["need"].kl <= plans["even"].kl
    assert found.window["need"].kl_held_out < found.window["even"].kl_held_out
    assert (found.memory is None) == (kind in ("none", "joint"))


def test_windows_are_those_that_the_kind_takes(make_base: Callable[..., PreTrainedModel]) -> None:
    base = make_base("Mistral", sliding_window=64)
    kvm = Sizer(base.config, "kvm", S, {"chunk": 16, "rows": 16}, torch.float32)
    assert [kvm.fitting(kvm.size(48).bytes + more).window for more in (0, 15 * ROW, -1)] == [48, 48, 32]
    texts = tokens(2, LENGTH)
    with pytest.raises(RetrofitError, match=r"chunk=16 is more than rows=14.* --option NAME=VALUE"):
        # before anything is measured
        allocate(base, "kvm", BUDGET, texts, texts, sinks=S, options={"chunk": 16}, say=pytest.fail)
    h2o = Sizer(base.config, "h2o", S, {}, torch.float32).fitting(10**6, rows=30)
    assert (h2o.window, h2o.rows) == (64 - S - 30, 30)


@pytest.mark.parametrize("kind", KINDS)
def test_the_budget_holds(kind: str, make_base: Callable[..., PreTrainedModel]) -> None:
    base = make_base("Qwen3")
    sizer = Sizer(base.config, kind, S, {}, torch.float32)
    budget = 2 * sizer.size(4, 1 if sizer.option else None).bytes
    sizes = list(sizer.sizes(budget))
    assert len(sizes) == (3 if sizer.option else 1)
    for size in sizes:
        assert size.bytes <= budget < size.bytes + 4 * ROW
    chosen = spend(sizes, [[1.0] * len(sizes)] * 2, 2 * budget)
    assert sum(size.bytes for size in chosen) <= 2 * budget


def test_bytes_are_those_of_a_real_model(make_base: Callable[..., PreTrainedModel]) -> None:
    base = make_base("Qwen2")
    found = allocate(base, "expected", BUDGET, tokens(2, LENGTH), tokens(1, LENGTH, 1), sinks=S)
    model = patched(base, found)
    assert kept(model) == sum(size.bytes for size in found.chosen.sizes.values()) <= 2 * BUDGET
    windows = [size.window for size in found.chosen.sizes.values()]
    assert [memory.window for memory in model.model.memories().values()] == windows


def test_layers_without_the_memory_and_layers_that_slide(make_base: Callable[..., PreTrainedModel]) -> None:
    from retrofit.allocation.allocate import settings_of

    sizer = Sizer(make_base("Llama", num_hidden_layers=4).config, "expected", S, {"bits": 8}, torch.float32)
    sizes = dict(enumerate([Size(8, 3, 0), Size(8, None, 0), Size(5, 3, 0), Size(5, 3, 0)]))
    expected = {"layers": [0, 2, 3], "others": "window", "by_layer": {"2-3": {"window": 5}}}
    made = settings_of(sizer, sizes)
    assert made == {"memory": "expected", "window": 8, "sinks": S, "bits": 8, "rows": 3, **expected}
    assert settings_of(sizer, dict.fromkeys(range(4), Size(8, None, 0))) == {"memory": "none", "window": 8, "sinks": S}
    slides = make_base("Ministral")  # its first layer has a window of its own
    found = allocate(slides, "none", BUDGET, tokens(1, LENGTH), tokens(1, LENGTH, 1), sinks=S)
    assert list(found.chosen.sizes) == [1]


def test_from_the_command_to_an_export(byte_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(chr(97 + int(i)) for i in tokens(1, 3000)[0] % 26))
    line = ["allocate", byte_checkpoint, "--data", "text.txt", "--bytes", BUDGET, "--rows", 2, "--length", LENGTH]

    def ran(*arguments: object) -> Result:
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        return result

    shown = ran(*line, "--sinks", S, "-o", "need.yaml", "--json", "rows.json").output
    assert "window alone" in shown
    rows = json.loads(Path("rows.json").read_text())
    assert sum(row["bytes"] for row in rows if "bytes" in row) <= 2 * BUDGET
    refused(run(*line, "-o", "need.yaml"), "need.yaml exists", "--overwrite")
    refused(run(*line, "-o", "x.yaml", "--json", "./x.yaml"), "named twice", "another one")
    ran("patch", byte_checkpoint, "--recipe", "need.yaml", "--data", "text.txt", "-o", "model")
    model = AutoModelForCausalLM.from_pretrained("model")
    windows = [row["window"] for row in rows if "window" in row]
    assert [memory.window for memory in model.model.memories().values()] == windows
    ran("estimate", byte_checkpoint, "--recipe", "need.yaml", "--length", 90, "--json", "cost.json")
    cost = json.loads(Path("cost.json").read_text())[-1]
    cache = model(tokens(1, 90), use_cache=True).past_key_values
    assert cost["cache_bytes"] == retrofit.cache_bytes(cache)
    refused(run("patch", byte_checkpoint, "--recipe", "need.yaml", "--window", 9, "-o", "other"), "--window")
    refused(run(*line, "--bytes", 10, "-o", "x.yaml"), "bytes: 10 hold no window", "give")
    refused(run(*line, "--memory", "expected", "--option", "rows=3", "-o", "x.yaml"), "rows", "leave it out")
    refused(run(*line[:-2], "--length", 2000, "-o", "x.yaml"), "text.txt holds 1 rows")
    refused(run("allocate", "model", *line[2:], "-o", "x.yaml"), "has a memory already")
    assert not Path("x.yaml").exists()


def test_a_recipe_that_is_distilled(byte_checkpoint: Path, tmp_path: Path) -> None:
    from distill.config import load_recipe

    memory = {"memory": "joint", "window": 9, "sinks": 1, "by_layer": {"1": {"window": 4}}, "options": {"features": 6}}
    file = tmp_path / "need.yaml"
    file.write_text(write_memory(memory, "made by hand"))
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
    model = retrofit.patch(str(byte_checkpoint), **read_memory(file))
    assert [one.window for one in model.model.memories().values()] == [9, 4]
    assert logits(model, tokens(1, 30)).isfinite().all()


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- 1", "is not a recipe"),
        ("windw: 3", "did you mean 'window'"),
        ("memory: none", "has no 'window'"),
        ("{memory: none, window: 3, options: [1]}", "write options by name"),
        ("{memory: none, window: 3, options: {layers: [0]}}", "'layers' is not an option"),
    ],
)
def test_files_that_describe_no_memory(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "memory.yaml"
    file.write_text(text)
    with pytest.raises(RetrofitError, match=says):
        read_memory(file)

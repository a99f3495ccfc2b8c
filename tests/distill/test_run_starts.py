"""What a run starts from, and whom it reports to."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import distill.model as distill_model
import retrofit
from distill import distill
from distill.config import DistillConfig
from distill.run import how_to_resume
from patches.errors import RetrofitError
from retrofit.adapter import WEIGHTS
from retrofit.convert import published_name
from tests.distill.test_run import MakeBase, changed, signal_at
from tests.retrofit.test_convert import published, write_published


def test_a_run_goes_on_from_an_adapter(recipe: DistillConfig, tmp_path: Path) -> None:
    first = Path(str(recipe.output_dir))
    distill(recipe)
    again = changed(
        recipe,
        init_adapter=str(first / "adapter"),
        output_dir=str(tmp_path / "on"),
        window=5,
        learning_rate=1e-12,
        max_steps=1,
    )
    distill(again)
    weights = [load_file(path / "adapter" / WEIGHTS) for path in (first, tmp_path / "on")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=1e-10)
    assert json.loads((tmp_path / "on" / "adapter" / "adapter_config.json").read_text())["memory"]["window"] == 5


def test_a_run_goes_on_from_published_ahn_weights(recipe: DistillConfig, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(str(recipe.base))
    theirs = published(base, "ahn-gdn")
    folder = write_published(tmp_path / "theirs", "ahn-gdn", theirs, base.config)
    distill(changed(recipe, init_adapter=str(folder), learning_rate=1e-12, max_steps=1))
    ours = load_file(Path(str(recipe.output_dir)) / "adapter" / WEIGHTS)
    assert len(ours) == len(theirs) - 2  # the unused D of each layer
    for name, tensor in ours.items():
        key = published_name("ahn-gdn", name.removeprefix("base_model.model."))
        torch.testing.assert_close(tensor, theirs[key].float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"memory": "ahn-dn"}, "holds memory 'ahn-gdn', the recipe asks for 'ahn-dn'"),
        ({"layers": [0]}, "holds layers None, the recipe asks for [0]"),
        ({"base": "other"}, "was made for"),
    ],
)
def test_an_adapter_of_something_else_is_refused(
    recipe: DistillConfig, tmp_path: Path, make_base: MakeBase, values: dict[str, Any], said: str
) -> None:
    checkpoint = AutoModelForCausalLM.from_pretrained(str(recipe.base))
    retrofit.save_adapter(retrofit.patch(checkpoint, "ahn-gdn", 6, 2), tmp_path / "adapter")
    if "base" in values:
        make_base("Llama", seed=5).save_pretrained(tmp_path / "other")
        for file in Path(str(recipe.base)).glob("*token*"):
            shutil.copy(file, tmp_path / "other")
        values = {"base": str(tmp_path / "other")}
    with pytest.raises(RetrofitError) as error:
        distill(changed(recipe, init_adapter=str(tmp_path / "adapter"), **values))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("report_to", "said"),
    [
        ("wandbb", "report_to: 'wandbb' is not one of none, all, "),
        ("none,mlflow", "report_to: 'mlflow' is not installed: pip install mlflow"),
    ],
)
def test_reporters_are_checked_before_anything_is_read(recipe: DistillConfig, report_to: str, said: str) -> None:
    with pytest.raises(RetrofitError) as error:
        distill(changed(recipe, report_to=report_to, data="nowhere.txt"))
    assert said in str(error.value)


def test_a_run_reports_to_tensorboard(recipe: DistillConfig) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    distill(changed(recipe, report_to="tensorboard", max_steps=1))
    assert list(Path(str(recipe.output_dir)).rglob("events.out.tfevents*"))


@pytest.mark.parametrize(
    ("memory", "settings", "what"),
    [
        ("joint-rows", {"options": {"rows": 5, "bits": 8}, "by_layer": {"1": {"rows": [7, 2]}}}, "query_mean"),
        ("joint", {}, "opening"),
    ],
)
def test_a_memory_that_calibrates_is_calibrated_once(
    recipe: DistillConfig, monkeypatch: pytest.MonkeyPatch, memory: str, settings: dict[str, Any], what: str
) -> None:
    """On the run's own rows, before the first step; a resumed run has it from its checkpoint."""
    recipe = changed(recipe, memory=memory, local_steps=3, **settings)
    shown: list[Any] = []
    calibrate = distill_model.calibrate
    monkeypatch.setattr(distill_model, "calibrate", lambda model, texts: (shown.append(texts), calibrate(model, texts)))
    distill(recipe)
    assert len(shown) == 1
    assert sum(text.shape[1] for text in shown[0]) >= recipe.max_length
    whole = load_file(Path(str(recipe.output_dir)) / "adapter" / WEIGHTS)
    measured = [tensor for name, tensor in whole.items() if name.endswith(what)]
    assert measured
    assert all(tensor.any() for tensor in measured)

    again = changed(recipe, output_dir=str(recipe.output_dir) + "-again")
    signal_at(monkeypatch, 4)
    with pytest.raises(SystemExit):
        distill(again)
    monkeypatch.undo()
    monkeypatch.setattr("distill.run.calibrate_on", lambda *_: pytest.fail("it was calibrated again"))
    distill(again, resume=True)
    resumed = load_file(Path(str(again.output_dir)) / "adapter" / WEIGHTS)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("processes", "here", "flags"),
    [
        (1, None, ""),
        (4, "4", " --nproc 4"),
        (16, "8", "   (by the launcher of all 16 processes)"),
    ],
)
def test_a_stopped_run_says_how_its_machines_go_on(
    monkeypatch: pytest.MonkeyPatch, processes: int, here: str | None, flags: str
) -> None:
    if here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    said = how_to_resume(Path("runs/my first"), processes)
    assert said == f"retrofit distill 'runs/my first/recipe.yaml' --resume{flags}"

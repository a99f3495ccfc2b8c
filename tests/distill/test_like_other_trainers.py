"""Keys that users of other trainers know: passes, schedules, early stopping, rows by length, readers, pushes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from distill import DistillTrainer, distill
from distill.checkpoint import checkpoints
from distill.config import DistillConfig
from distill.data.rows import ByLength, pack_tokens
from distill.objective import attention_outputs
from distill.preflight import check_recipe
from distill.run import steps_of
from patches.errors import RetrofitError
from retrofit import patch
from retrofit.adapter import WEIGHTS
from tests.distill.test_run import changed
from tests.helpers import load_rows
from tests.hub_server import HubServer


@pytest.fixture
def recipe(checkpoint: Path, text_file: Path, tmp_path: Path) -> DistillConfig:
    """Four steps on a tiny checkpoint."""
    places = {"base": str(checkpoint), "data": str(text_file), "output_dir": str(tmp_path / "run")}
    shape: dict[str, Any] = {"window": 6, "sinks": 2, "max_length": 40, "eval_rows": 4}
    return DistillConfig(**places, **shape, max_steps=4, eval_steps=2, save_steps=2)


@pytest.fixture
def model_with_windows(make_base: Callable[..., PreTrainedModel]) -> Any:
    """A memory in the second layer, sinks and window alone in the first."""
    return patch(make_base("Qwen2"), "ahn-gdn", 6, 2, layers=[1], others="window")


def weights(recipe: DistillConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(str(recipe.output_dir)) / "adapter" / WEIGHTS)


@pytest.mark.parametrize(
    ("epochs", "batch", "accumulated", "processes", "steps"),
    [(1, 4, 1, 1, 17), (2, 4, 1, 1, 34), (0.5, 4, 1, 1, 9), (1, 4, 2, 2, 5), (1, 100, 8, 4, 1)],
)
def test_passes_decide_the_steps(
    recipe: DistillConfig, epochs: float, batch: int, accumulated: int, processes: int, steps: int
) -> None:
    asked = changed(
        recipe, num_train_epochs=epochs, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulated
    )
    assert steps_of(asked, 67, processes) == steps


def test_a_run_of_one_pass_with_a_schedule_of_its_own(recipe: DistillConfig) -> None:
    asked = changed(
        recipe,
        max_steps=-1,
        num_train_epochs=1,
        per_device_train_batch_size=32,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": 5e-3},
        warmup_steps=0.0,
        optim="sgd",
        dataloader_num_workers=1,
    )
    metrics = distill(asked)
    rates = [entry["learning_rate"] for entry in metrics["curve"] if "learning_rate" in entry]
    assert metrics["recipe"]["max_steps"] == len(rates) == 3  # 67 rows
    assert min(rates) >= 5e-3
    assert "exp_avg" not in str(torch.load(Path(str(recipe.output_dir)) / "checkpoint-2" / "optimizer.pt"))


def test_a_run_of_passes_resumes_with_the_same_words(recipe: DistillConfig) -> None:
    asked = changed(recipe, max_steps=-1, num_train_epochs=1, per_device_train_batch_size=32)
    metrics = distill(asked)
    assert distill(asked, resume=True)["rows"][-1]["kl"] == metrics["rows"][-1]["kl"]


def test_rows_of_like_length_come_together_and_in_the_same_order_again(recipe: DistillConfig) -> None:
    rows = [{"input_ids": torch.zeros(length)} for length in torch.randint(1, 50, (64,)).tolist()]
    sampler, again = ByLength(4, rows, seed=3), ByLength(4, rows, seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(64))
    batches = [[len(rows[index]["input_ids"]) for index in first[at : at + 4]] for at in range(0, 64, 4)]
    assert sum(max(batch) - min(batch) for batch in batches) < 16 * 10  # at random, 16 x 30
    sampler.set_epoch(1)
    assert list(sampler) != first
    again.set_epoch(1)
    sampler.set_epoch(1)
    assert list(again) == list(sampler)


def test_lengths_are_known_without_reading_a_row(tmp_path: Path, chat_tokenizer: Any, datasets_cache: Path) -> None:
    texts = [{"text": "abc" * (5 + number % 9)} for number in range(40)]
    said = ["abc" * (1 + number % 5) for number in range(30)]
    talks = [{"messages": [{"role": role, "content": text} for role in ("user", "assistant")]} for text in said]
    for name, lines in {"a": texts, "b": talks}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    mix = {str(tmp_path / "b.jsonl"): 0.7}
    found = load_rows(str(tmp_path / "a.jsonl"), chat_tokenizer, max_length=20, packing=False, mix=mix)
    for rows in (found.train, found.held_out, found.held_out.select(slice(3)), pack_tokens(torch.arange(100), 30)):
        assert rows.lengths() == [len(rows[index]["input_ids"]) for index in range(len(rows))]


def test_documents_are_called_documents(
    recipe: DistillConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"text": " ".join(["w5", "w6", "w7"] * (4 + number % 9))} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = changed(recipe, data=str(tmp_path / "a.jsonl"), packing=False)
    distill(asked)
    assert "held-out documents of at most 40 tokens, text past the window" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(RetrofitError, match="none of the 4 held-out documents has text beyond 38 tokens"):
        distill(changed(asked, window=36, output_dir=str(tmp_path / "other")))


def test_mse_looks_at_the_layers_that_are_fitted(model_with_windows: Any) -> None:
    with attention_outputs(model_with_windows) as outputs:
        model_with_windows(torch.arange(3, 33)[None])
    assert len(outputs) == 1


def test_documents_by_length_resume_where_they_were(recipe: DistillConfig, tmp_path: Path) -> None:
    lines = [{"text": " ".join(["w5", "w6", "w7"] * (5 + number % 9))} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = changed(recipe, data=str(tmp_path / "a.jsonl"), packing=False, group_by_length=True, min_length=12)
    distill(asked)
    whole = weights(asked)
    for path in checkpoints(Path(str(asked.output_dir)))[1:]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    distill(asked, resume=True)
    for name, value in weights(asked).items():
        assert torch.equal(value, whole[name]), name


def test_patience_stops_and_takes_the_best(recipe: DistillConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    kls = iter([0.5, 0.3, 0.4, 0.6, 0.1])
    measured = DistillTrainer._kl_by_distance

    def scripted(self: DistillTrainer, model: Any, data: Any) -> dict[str, float]:
        of_memory = model is self.accelerator.unwrap_model(self.model)
        return {"": next(kls)} if of_memory else measured(self, model, data)

    monkeypatch.setattr(DistillTrainer, "_kl_by_distance", scripted)
    asked = changed(recipe, max_steps=10, eval_steps=1, save_steps=1, patience=2)
    metrics = distill(asked)
    assert [entry["step"] for entry in metrics["curve"] if "loss" in entry] == [1, 2, 3, 4]
    best = load_file(Path(str(asked.output_dir)) / "checkpoint-2" / WEIGHTS)
    for name, value in weights(asked).items():
        assert torch.equal(value, best[name]), name
    moved = changed(
        asked, output_dir=str(Path(str(asked.output_dir)).with_name("moved"))
    )  # it knows that it has stopped
    Path(str(asked.output_dir)).rename(str(moved.output_dir))
    again = distill(moved, resume=True)
    assert [entry["step"] for entry in again["curve"] if "loss" in entry] == [1, 2, 3, 4]
    for name, value in weights(moved).items():
        assert torch.equal(value, best[name]), name


def test_every_checkpoint_is_pushed(recipe: DistillConfig, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrofit.hub.WAITS", ())
    token = "hf_" + "m" * 34
    hub.users[token] = "user"
    monkeypatch.setenv("HF_TOKEN", token)
    distill(changed(recipe, push_to_hub=True, hub_model_id="user/fitted"))
    assert hub.repos["user/fitted"].messages[-3:] == ["Step 2", "Step 4", "The trained memory"]


def test_a_hub_that_fails_does_not_stop_the_run(
    recipe: DistillConfig, hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("retrofit.hub.WAITS", ())
    distill(changed(recipe, push_to_hub=True, hub_model_id="user/fitted"))  # nobody is logged in
    assert capsys.readouterr().err.count("was not pushed") == 3
    assert weights(recipe)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"patience": 2, "eval_steps": 1}, r"save_steps \(2\) must be equal to eval_steps \(1\)"),
        ({"streaming": True, "max_steps": -1, "num_train_epochs": 1}, "leave out streaming"),
        ({"mix": {"a.txt": 0}}, "how often its rows are read"),
        ({"mix": {"a.txt": "much"}}, "how often its rows are read"),
        ({"optim": "adamw"}, "optim: 'adamw' is not one of"),
        ({"lr_scheduler_kwargs": {"no_such": 1}}, "lr_scheduler_kwargs do not fit cosine"),
        (
            {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": "abc"}},
            "lr_scheduler_kwargs do not",
        ),
        ({"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"num_cycles": 1}}, "constant has none"),
        (
            {"lr_scheduler_type": "polynomial", "learning_rate": 1e-4, "lr_scheduler_kwargs": {"lr_end": 5e-4}},
            "lr_scheduler_kwargs do not",
        ),
        ({"hub_model_id": "no body"}, "write user/name"),
    ],
)
def test_mistakes(recipe: DistillConfig, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(RetrofitError, match=said):
        check_recipe(changed(recipe, **keys))


def test_an_optimizer_that_torch_refuses_is_one_sentence(recipe: DistillConfig) -> None:
    with pytest.raises(RetrofitError, match=r"adamw_torch_fused cannot be made [(]Invalid beta"):
        distill(changed(recipe, adam_beta1=2.0))
    assert not Path(str(recipe.output_dir)).exists()

"""Whole runs on a tiny checkpoint: what is written, interrupted and resumed, refused."""

import json
import math
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import retrofit
from distill import DistillTrainer, distill
from distill import run as distill_run
from distill.checkpoint import checkpoints, damage, last_whole, write_checksums
from distill.config import DistillConfig
from distill.recipe import DistillKeys
from patches.errors import RetrofitError
from patches.options import LARGEST
from retrofit.adapter import WEIGHTS
from retrofit.files import only_writer
from retrofit.settings import settings

MakeBase = Callable[..., PreTrainedModel]

ROWS = ["teacher", "window-only", "window-only, equal memory", "ahn-gdn"]


def changed(recipe: DistillConfig, **values: Any) -> DistillConfig:
    return DistillConfig.from_dict({**recipe.to_recipe(), **values})


def signal_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT) -> None:
    """Send this process a signal in the middle of a training step."""
    original = DistillTrainer.training_step

    def training_step(self: DistillTrainer, *args: Any) -> Any:
        if self.state.global_step == step:
            os.kill(os.getpid(), number)
        return original(self, *args)

    monkeypatch.setattr(DistillTrainer, "training_step", training_step)


def test_a_run_writes_everything(recipe: DistillConfig, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = distill(recipe)
    run = Path(str(recipe.output_dir))
    names = {"adapter", "model", "metrics.json", "log.jsonl", "recipe.yaml", "run.json", "checkpoint-4", "checkpoint-6"}
    assert {path.name for path in run.iterdir()} == names
    assert json.loads((run / "metrics.json").read_text()) == metrics

    rows = {row["name"]: row for row in metrics["rows"]}
    assert list(rows) == ROWS
    assert (rows["teacher"]["kl"], rows["teacher"]["kl_gap_closed"]) == (0.0, 1.0)
    assert rows["window-only"]["kl_gap_closed"] == 0.0
    kept = 4 * (4 * 16 * 16 + 6 * 8)  # the state, and two gates of four heads for each of 6 tokens
    assert [rows[name]["kept_bytes"] for name in ROWS] == [None, 0, 17 * 256, kept]
    assert [rows[name]["window"] for name in ROWS] == [None, 6, 23, 6]
    assert rows["ahn-gdn"]["seconds"] > 0
    assert all(math.isfinite(row["nll"]) for row in rows.values())
    curve = metrics["curve"]
    assert [entry["step"] for entry in curve if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert [entry["step"] for entry in curve if "eval_kl" in entry] == [4, 6]
    assert [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] == curve
    assert curve[-2]["eval_kl"] == pytest.approx(rows["ahn-gdn"]["kl"], rel=1e-4)
    printed = capsys.readouterr()
    assert "window-only, equal memory" in printed.out
    assert re.search(r"distilling .* KL \d\.\d+, held out \d.*, \d+\.\d GiB, .* tokens/s", printed.err)
    assert all(entry["memory_bytes"] > 2**20 for entry in curve)

    for folder in ("adapter", "model"):
        card = (run / folder / "README.md").read_text()
        assert metrics["command"] in card
        assert f"| ahn-gdn | 6 | {rows['ahn-gdn']['kl']:.4f} |" in card

    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    ids = tokenizer(" ".join(f"w{i}" for i in range(20, 50)), return_tensors="pt")["input_ids"]
    exported = AutoModelForCausalLM.from_pretrained(run / "model")
    adapted = retrofit.load_adapter(str(recipe.base), run / "adapter")
    assert torch.equal(exported(ids).logits, adapted(ids).logits)
    assert exported.config.use_cache
    assert exported.config.memory["window"] == 6


def test_a_recipe_written_from_memory_of_trl_runs_at_once(recipe: DistillConfig) -> None:
    """Every key after the first three is one of TRL's SFTConfig, as its examples write it."""
    text = f"""
base: {recipe.base}
data: {recipe.data}
window: 6
output_dir: {recipe.output_dir}
max_length: 40
packing: true
learning_rate: 2.0e-3
num_train_epochs: 1
per_device_train_batch_size: 8
per_device_eval_batch_size: 4
gradient_accumulation_steps: 2
gradient_checkpointing: true
gradient_checkpointing_kwargs: {{use_reentrant: false}}
activation_offloading: false
lr_scheduler_type: linear
warmup_steps: 2
weight_decay: 0.01
adam_beta1: 0.8
adam_beta2: 0.95
max_grad_norm: 0.3
optim: adamw_torch
bf16: true
seed: 42
data_seed: 7
eval_strategy: steps
eval_steps: 2
save_strategy: epoch
save_total_limit: 1
logging_steps: 2
logging_first_step: true
dataloader_num_workers: 1
dataloader_drop_last: true
report_to: [none]
push_to_hub: false
remove_unused_columns: false
"""
    metrics = distill(DistillConfig.from_dict(yaml.safe_load(text)))
    run = Path(str(recipe.output_dir))
    assert [path.name for path in checkpoints(run)] == ["checkpoint-4"]  # of 67 rows
    optimizer = torch.load(run / "checkpoint-4" / "optimizer.pt")["param_groups"][0]
    assert (optimizer["betas"], optimizer["initial_lr"]) == ((0.8, 0.95), 2e-3)
    assert [entry["step"] for entry in metrics["curve"] if "loss" in entry] == [1, 2, 4]
    assert [entry["step"] for entry in metrics["curve"] if "eval_kl" in entry] == [2, 4]
    again = DistillConfig.from_dict(yaml.safe_load((run / "recipe.yaml").read_text()))
    assert again.to_recipe() == DistillConfig.from_dict(yaml.safe_load(text)).to_recipe()
    assert distill(again, resume=True)["rows"][-1]["kl"] == metrics["rows"][-1]["kl"]


def test_a_run_begun_with_other_names_is_refused(recipe: DistillConfig) -> None:
    run = Path(str(recipe.output_dir))
    run.mkdir()
    (run / "recipe.yaml").write_text("lr: 0.1\nsteps: 3\n")
    with pytest.raises(RetrofitError, match=r"recipe.yaml: 'lr' is called 'learning_rate', 'steps' is called 'max_st"):
        distill(recipe, resume=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_resuming_gives_the_same_result(
    recipe: DistillConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    whole = distill(changed(recipe, output_dir=str(tmp_path / "whole")))
    with monkeypatch.context() as patched:
        signal_at(patched, 2, number)
        with pytest.raises(SystemExit) as stopped:
            distill(recipe)
    run = Path(str(recipe.output_dir))
    assert stopped.value.code == 130
    assert [path.name for path in checkpoints(run)] == ["checkpoint-3"]
    assert not (run / "adapter").exists()
    assert f"retrofit distill {run / 'recipe.yaml'} --resume" in capsys.readouterr().err.replace("\n", "")
    assert signal.getsignal(number) is not None

    resumed = distill(DistillConfig.from_dict(yaml.safe_load((run / "recipe.yaml").read_text())), resume=True)
    for before, after in zip(whole["rows"], resumed["rows"], strict=True):
        assert {**before, "seconds": 0} == {**after, "seconds": 0}
    losses = [[entry["loss"] for entry in m["curve"] if "loss" in entry] for m in (whole, resumed)]
    assert losses[0] == losses[1]
    assert [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] == resumed["curve"]


def test_a_finished_run_resumes_to_its_results(recipe: DistillConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = distill(recipe)
    monkeypatch.setattr(DistillTrainer, "train", pytest.fail)
    again = distill(recipe, resume=True)
    assert [{**row, "seconds": 0} for row in again["rows"]] == [{**row, "seconds": 0} for row in first["rows"]]


def test_another_run_is_not_replaced_unless_asked(recipe: DistillConfig) -> None:
    run = Path(str(recipe.output_dir))
    run.mkdir()
    (run / "note.txt").write_text("mine")
    with pytest.raises(RetrofitError, match="already holds something"):
        distill(recipe)
    assert [path.name for path in run.iterdir()] == ["note.txt"]
    distill(changed(recipe, max_steps=2), overwrite=True)
    distill(changed(recipe, max_steps=1), overwrite=True)
    assert [path.name for path in checkpoints(run)] == ["checkpoint-1"]
    assert (run / "note.txt").read_text() == "mine"


def test_a_run_keeps_its_folder_from_its_first_moment_to_its_last(
    recipe: DistillConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the base is loaded, and while the results are written."""
    fork, codes = multiprocessing.get_context("fork"), []

    def asked(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            other = fork.Process(target=lambda: only_writer(str(recipe.output_dir)).__enter__())
            other.start()
            other.join()
            codes.append(other.exitcode)
            return function(*args, **kwargs)

        return wrapped

    for name in ("load_rows", "export_model"):
        monkeypatch.setattr(f"distill.run.{name}", asked(getattr(distill_run, name)))
    distill(changed(recipe, max_steps=1))
    assert codes == [1, 1]
    asked(int)()
    assert codes[-1] == 0


def test_resuming_on_another_base_is_refused(recipe: DistillConfig, make_base: Callable[..., PreTrainedModel]) -> None:
    distill(recipe)
    other = make_base("Llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    other.save_pretrained(str(recipe.base))
    with pytest.raises(RetrofitError, match="is not the one that it was started with"):
        distill(recipe, resume=True)


def test_resuming_with_other_settings_is_refused(recipe: DistillConfig) -> None:
    distill(changed(recipe, max_steps=1))
    said = r"other settings: max_steps \(was 1\), learning_rate \(was 0.01\)"
    with pytest.raises(RetrofitError, match=said):
        distill(changed(recipe, max_steps=2, learning_rate=0.1), resume=True)
    with pytest.raises(RetrofitError, match="there is no run to resume"):
        distill(changed(recipe, output_dir=str(recipe.output_dir) + "-other"), resume=True)


FILES = [WEIGHTS, "adapter_config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


@pytest.mark.parametrize("name", [*FILES, "checksums.json"])
@pytest.mark.parametrize("how", ["cut", "missing", "changed"])
def test_a_damaged_checkpoint_is_passed_over(
    name: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path / f"checkpoint-{step}")
    assert last_whole(tmp_path, Console(stderr=True)) == tmp_path / "checkpoint-2"
    file = tmp_path / "checkpoint-2" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # one bit
    file.unlink() if how == "missing" else file.write_bytes(content[:-30] if how == "cut" else content)
    assert last_whole(tmp_path, Console(stderr=True, width=500)) == tmp_path / "checkpoint-1"
    assert f"{tmp_path / 'checkpoint-2'} cannot be used, " in capsys.readouterr().err


def write_checkpoint(folder: Path) -> None:
    """The files a checkpoint must have."""
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_bytes(bytes(range(256)) * 4)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": int(folder.name.split("-")[-1])}))
    write_checksums(folder)


def test_checksums_can_be_counted_again(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    write_checkpoint(folder)
    write_checksums(folder)
    assert not damage(folder)


@pytest.mark.parametrize("listing", [FILES, " ".join(FILES), dict.fromkeys(FILES, 1), 3, None])
def test_a_listing_that_is_none(listing: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    write_checkpoint(folder)
    (folder / "checksums.json").write_text(json.dumps(listing))
    assert "damaged" in damage(folder)


def test_resuming_from_the_checkpoint_before_a_damaged_one(
    recipe: DistillConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = distill(changed(recipe, save_steps=2, max_steps=4))
    run = Path(str(recipe.output_dir))
    (run / "checkpoint-4" / "optimizer.pt").write_bytes(b"")
    again = distill(changed(recipe, save_steps=2, max_steps=4), resume=True)
    assert "going back to the one before it" in capsys.readouterr().err
    assert [{**row, "seconds": 0} for row in again["rows"]] == [{**row, "seconds": 0} for row in whole["rows"]]


@pytest.mark.parametrize("content", ["{[", "[1]", "stebs: 3"])
def test_a_damaged_recipe_of_the_run_is_one_sentence(recipe: DistillConfig, content: str) -> None:
    run = Path(str(recipe.output_dir))
    run.mkdir()
    (run / "recipe.yaml").write_text(content)
    with pytest.raises(RetrofitError, match=r"recipe\.yaml: "):
        distill(recipe, resume=True)


@pytest.mark.parametrize("what", ["base", "data"])
def test_a_run_does_not_replace_what_it_reads(recipe: DistillConfig, what: str) -> None:
    read = Path(str(getattr(recipe, what)))
    with pytest.raises(RetrofitError, match="which is an input"):
        distill(changed(recipe, output_dir=str(read if read.is_dir() else read.parent)), overwrite=True)
    assert read.exists()


def test_weights_that_are_not_finite_after_the_last_step_are_not_exported(recipe: DistillConfig) -> None:
    one = changed(recipe, warmup_steps=0.0, max_steps=1)
    object.__setattr__(one, "learning_rate", 1e300)  # which no recipe may say
    with pytest.raises(RetrofitError, match="weights are not finite after step 1"):
        distill(one)
    assert {path.name for path in Path(str(recipe.output_dir)).iterdir()} <= {"log.jsonl", "recipe.yaml", "run.json"}


# settings that say how much there is to do, in what portions or from what, not how: no number is computed with them
FIXED = (
    "window",
    "sinks",
    "max_length",
    "min_length",
    "holdout",
    "max_steps",
    "num_train_epochs",
    "local_steps",
    "dataloader_num_workers",
    "segment",
)
FIXED += ("segments_back", "patience")


@pytest.mark.parametrize("end", ["least", "most"])
def test_a_step_at_the_limits_of_every_number(recipe: DistillConfig, end: str) -> None:
    """What a recipe may say can be run: no number that is let in ends in infinities."""
    numbers = {
        name: key for name, key in settings(DistillKeys).items() if key.kind in (int, float) and name not in FIXED
    }
    lowest = {name: 1e-300 if key.least is None else key.least for name, key in numbers.items()}
    highest = {name: key.most or LARGEST for name, key in numbers.items()} | {
        "adam_beta2": 1 - 1e-16,
        "warmup_steps": 0,
    }
    values = {"least": lowest, "most": highest}[end]
    metrics = distill(changed(recipe, max_steps=1, **{n: numbers[n].kind(value) for n, value in values.items()}))
    assert all(math.isfinite(row["nll"]) for row in metrics["rows"])


def test_a_first_step_that_fails_leaves_nothing(recipe: DistillConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RetrofitError("the loss is nan")

    distill(changed(recipe, max_steps=1))
    run = Path(str(recipe.output_dir))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    monkeypatch.setattr(DistillTrainer, "training_step", fail)
    for output in (run, run.parent / "new" / "run"):
        with pytest.raises(RetrofitError, match="the loss is nan"):
            distill(changed(recipe, output_dir=str(output)), overwrite=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert not (run.parent / "new").exists()


def test_a_run_says_that_it_compiles(
    recipe: DistillConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before its first step, which takes so long that nothing seems to happen."""

    def first(*_: Any) -> None:
        raise RetrofitError("the first step")

    monkeypatch.setattr(DistillTrainer, "training_step", first)
    for compiled in (False, True):
        with pytest.raises(RetrofitError, match="the first step"):
            distill(changed(recipe, torch_compile=compiled))
        assert ("compiling: the first step takes minutes" in capsys.readouterr().err) is compiled


def test_drafts_of_a_killed_run_are_cleaned(recipe: DistillConfig) -> None:
    run = Path(str(recipe.output_dir))
    distill(changed(recipe, max_steps=1))
    names = {path.name for path in run.iterdir()}
    for name in (".model.abcd_123.retrofit", ".adapter.x1.retrofit", ".saving"):
        (run / name).mkdir()
    distill(changed(recipe, max_steps=1), resume=True)
    assert {path.name for path in run.iterdir()} == names


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(recipe: DistillConfig) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(recipe.base))
    tokenizer.add_tokens(["w200", "w201"])
    tokenizer.save_pretrained(str(recipe.base))
    with pytest.raises(RetrofitError, match="the tokenizer has ids up to 102, the base has embeddings for 101 tokens"):
        distill(recipe)
    assert not Path(str(recipe.output_dir)).exists()


BAD = {
    "no such base": ({"base": "no/such/folder"}, "no/such/folder"),
    "no such data": ({"data": "no/such/file.txt"}, "no file or folder"),
    "no such memory": ({"memory": "ahn-gnd"}, "did you mean 'ahn-gdn'"),
    "no such option": ({"options": {"decay": 1}}, "option 'decay'"),
    "too short": ({"max_length": 2000}, "with 10% of 1 rows of 2000 tokens held out"),
    "nothing to train": ({"memory": "none"}, "has nothing to fit"),
}


@pytest.mark.parametrize(("values", "said"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(recipe: DistillConfig, values: dict[str, Any], said: str) -> None:
    with pytest.raises(RetrofitError) as error:
        distill(changed(recipe, **values))
    assert said in str(error.value)
    assert not Path(str(recipe.output_dir)).exists()

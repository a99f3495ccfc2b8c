"""Conversations through the real command and through whole runs: counted, scored, streamed and resumed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from distill import DistillTrainer, distill
from distill.config import DistillConfig
from patches.errors import RetrofitError
from tests.distill.test_run import changed

ROOT = Path(__file__).parents[3]
ROWS = ["teacher", "window-only", "window-only, equal memory", "ahn-gdn"]


@pytest.fixture
def chat_checkpoint(
    tmp_path: Path, make_base: Callable[..., PreTrainedModel], chat_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A tiny Qwen2 with a tokenizer that has a chat template."""
    make_base("Qwen2", vocab_size=len(chat_tokenizer)).save_pretrained(tmp_path / "base")
    chat_tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Conversations of 27 tokens, of 32 to 62, and of 127."""
    answers = ["", *("tell " * (1 + number % 7) for number in range(39)), "tell " * 20]
    turns = [[{"from": "human", "value": "say it"}, {"from": "gpt", "value": answer}] for answer in answers]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"conversations": chat}) for chat in turns))
    return path


@pytest.fixture
def recipe(chat_checkpoint: Path, chats: Path, tmp_path: Path) -> DistillConfig:
    return DistillConfig(
        base=str(chat_checkpoint),
        data=str(chats),
        output_dir=str(tmp_path / "run"),
        window=30,
        sinks=2,
        max_length=64,
        min_length=30,
        max_steps=6,
        per_device_train_batch_size=2,
        eval_rows=4,
        eval_steps=4,
        save_steps=4,
    )


def test_the_command_distils_on_conversations(chat_checkpoint: Path, chats: Path, tmp_path: Path) -> None:
    flags = "--window 30 --sinks 2 --max-length 64 --min-length 30 --max-samples 1000 --data-format chat"
    flags += " --max-steps 3 -o run"
    command = [sys.executable, "-m", "cli", "distill", str(chat_checkpoint), "--data", str(chats), *flags.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert [row["name"] for row in metrics["rows"]] == ROWS
    assert (metrics["data"]["read"], metrics["data"]["short"], metrics["data"]["truncated"]) == (41, 1, 1)
    assert "41 conversations read; 1 of at most 30 tokens, left out; 1 cut to 64 tokens, 63 tokens lost" in done.stderr
    assert "4 held-out conversations of at most 64 tokens, answers past the window" in done.stdout
    assert "the last 10% of its conversations held out" in (tmp_path / "run" / "adapter" / "README.md").read_text()

    lines = chats.read_text().replace('"gpt"', '"gtp"', 1)
    chats.write_text(lines)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    command += ["--overwrite"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {chats}, line 1, message 2: 'gtp' is not one of the roles")
    assert "Traceback" not in done.stderr


def test_the_table_and_the_training_measure_the_same(recipe: DistillConfig) -> None:
    metrics = distill(recipe)
    kl = {row["name"]: row["kl"] for row in metrics["rows"]}
    last = [entry for entry in metrics["curve"] if "eval_kl" in entry][-1]
    assert kl["ahn-gdn"] == pytest.approx(last["eval_kl"], rel=1e-4)
    assert kl["window-only"] == pytest.approx(last["eval_kl_window_only"], rel=1e-4)
    assert kl["window-only"] > 0


@pytest.mark.parametrize("streaming", [False, True])
def test_a_stopped_run_resumes_to_the_same_result(
    recipe: DistillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    recipe = changed(recipe, streaming=streaming)
    whole = distill(changed(recipe, output_dir=str(tmp_path / "whole")))
    original = DistillTrainer.training_step

    def stopped(self: DistillTrainer, *args: Any) -> Any:
        if self.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(DistillTrainer, "training_step", stopped)
        with pytest.raises(SystemExit):
            distill(recipe)
    resumed = distill(recipe, resume=True)
    for before, after in zip(whole["rows"], resumed["rows"], strict=True):
        assert {**before, "seconds": 0} == {**after, "seconds": 0}
    assert whole["data"] == resumed["data"]
    assert whole["tokens"] == resumed["tokens"]


def test_answers_within_the_window_are_refused_before_the_run(recipe: DistillConfig) -> None:
    with pytest.raises(RetrofitError, match="none of the 4 held-out conversations has answers beyond 102 tokens"):
        distill(changed(recipe, window=100, max_length=110, data=_short(recipe)))
    assert not Path(str(recipe.output_dir)).exists()


def _short(recipe: DistillConfig) -> str:
    """The same conversations without the long one, which is the last."""
    path = Path(str(recipe.data))
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    return str(path)

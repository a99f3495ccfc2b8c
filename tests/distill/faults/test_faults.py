"""What a run loses when it is killed 200 times, hangs, or its disk or its data fails for a while: nothing."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distill import DistillTrainer, distill
from distill.config import DistillConfig
from distill.data.rows import Rows
from patches.errors import RetrofitError
from retrofit.adapter import WEIGHTS
from retrofit.texts import tokens
from retrofit.texts.tokens import TokenRows
from tests.conftest import tiny_base
from tests.distill.faults.conftest import KILLS
from tests.helpers import ROOT


@pytest.fixture
def place(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with base/, text.txt and documents.jsonl, and an environment for processes that are started."""
    tiny_base("Llama").save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    ids = torch.randint(3, 101, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in ids))
    lines = (json.dumps({"text": " ".join(f"w{i}" for i in ids[at : at + 30])}) for at in range(0, 3000, 30))
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    values = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def recipe(place: Path, output: Path, **keys: Any) -> DistillConfig:
    """Six steps, saved after every second one."""
    values: dict[str, Any] = {"base": str(place / "base"), "data": str(place / "text.txt"), "output_dir": str(output)}
    values |= {
        "window": 6,
        "sinks": 2,
        "max_length": 40,
        "max_steps": 6,
        "save_steps": 2,
        "eval_steps": 2,
        "eval_rows": 4,
    }
    return DistillConfig(**{**values, **keys})


def assert_equal(run: Path, whole: Path) -> None:
    """Both runs came to the same weights, bit for bit, by the same losses."""
    for name, value in load_file(whole / "adapter" / WEIGHTS).items():
        assert torch.equal(load_file(run / "adapter" / WEIGHTS)[name], value), name
    curves = [json.loads((folder / "metrics.json").read_text())["curve"] for folder in (run, whole)]
    losses, others = ([(entry["step"], entry["loss"]) for entry in curve if "loss" in entry] for curve in curves)
    assert losses == others
    assert {path.name for path in run.iterdir()} == {path.name for path in whole.iterdir()}


def test_a_run_of_two_processes_that_is_killed_all_the_time(place: Path) -> None:
    command = [sys.executable, str(Path(__file__).parent / "kills.py"), str(place), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found["kills"], "kills in", round(found["seconds"]), "s:", found["by_phase"])
    assert found["kills"] == KILLS
    assert found["killed"] == found["undisturbed"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only the administrator can mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("room", [0, 4, 12, 20, 40, 80], ids="{} KiB left".format)
@pytest.mark.parametrize("step", [2, 5])
def test_a_disk_that_fills_and_empties_again(
    place: Path, small_disk: Path, room: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = place / "whole", small_disk / "run"
    distill(recipe(place, whole))
    filler = small_disk / "filler"
    training_step = DistillTrainer.training_step

    def fill(self: DistillTrainer, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step and not filler.exists():
            free = os.statvfs(small_disk)
            filler.write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - room * 1024)))
        return training_step(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(DistillTrainer, "training_step", fill)
        with pytest.raises((RetrofitError, OSError)) as full:
            distill(recipe(place, run))
    error = full.value
    assert isinstance(error, RetrofitError) or error.errno in (errno.ENOSPC, errno.EDQUOT), error
    filler.unlink()
    distill(recipe(place, run), resume=True)
    assert_equal(run, whole)


@pytest.mark.parametrize("keys", [{"streaming": True}, {"packing": False}], ids=["a stream", "documents"])
def test_data_that_fails_in_the_middle_and_comes_back(
    place: Path, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch, datasets_cache: Path
) -> None:
    monkeypatch.setattr(tokens, "BATCH", {"text": 2})  # a stream reads on while it trains
    data = {"data": str(place / "documents.jsonl"), "per_device_train_batch_size": 2, "max_length": 30, **keys}
    distill(recipe(place, place / "whole", **data))
    step, records, rows, training_step = [0], TokenRows.__iter__, Rows.__getitem__, DistillTrainer.training_step

    def gone() -> None:
        if step[0] >= 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO), data["data"])

    def failing(self: TokenRows) -> Iterator[Any]:
        for found in records(self):
            gone()
            yield found

    def count(self: DistillTrainer, *args: Any, **kwargs: Any) -> Any:
        step[0] = self.state.global_step
        return training_step(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(DistillTrainer, "training_step", count)
        patched.setattr(TokenRows, "__iter__", failing)
        patched.setattr(Rows, "__getitem__", lambda self, index: (gone(), rows(self, index))[1])
        with pytest.raises((OSError, RetrofitError), match="documents"):
            distill(recipe(place, place / "run", **data))
    distill(recipe(place, place / "run", **data), resume=True)
    assert_equal(place / "run", place / "whole")

"""``make real``'s fit in a process of its own: its adapter, its failures, and its end when nobody waits."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

from benchmarks import real_fit
from patches.errors import RetrofitError

RECIPE = {
    "memory": "joint",
    "window": 6,
    "sinks": 2,
    "max_length": 24,
    "per_device_train_batch_size": 1,
    "holdout": 0.2,
}
RECIPE |= {"max_steps": 3, "local_steps": 3, "eval_rows": 2}


@pytest.fixture
def output(checkpoint: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with base/, mix.jsonl and a recipe of three steps."""
    (tmp_path / "mix.jsonl").write_text(json.dumps({"text": text}) + "\n")
    recipe = tmp_path / "small.yaml"
    recipe.write_text(json.dumps(RECIPE))
    monkeypatch.setattr(real_fit, "RECIPE", str(recipe))
    return tmp_path


def test_a_fit_runs_once_and_a_cut_one_goes_on(output: Path) -> None:
    said: list[str] = []

    def fitted() -> bytes:
        with real_fit.fit_beside(output, "bfloat16", said.append) as fit:
            return (fit.wait() / "adapter_model.safetensors").read_bytes()

    first = fitted()
    assert "dtype: bfloat16" in (output / "joint" / "recipe.yaml").read_text()
    assert fitted() == first
    assert len(said) == 1, "the second time there is nothing to fit"
    for name in ("model", "adapter"):
        shutil.rmtree(output / "joint" / name)
    (output / "joint" / "metrics.json").unlink()
    assert fitted() == first


def test_a_failed_fit_names_its_log(output: Path) -> None:
    (output / "mix.jsonl").write_text("no JSON\n")
    with real_fit.fit_beside(output, "float32", print) as fit, pytest.raises(RetrofitError, match=r"joint\.log"):
        fit.wait()
    assert "mix.jsonl" in (output / "joint.log").read_text()


def test_a_failed_fit_is_noticed_before_the_end(output: Path) -> None:
    (output / "mix.jsonl").write_text("no JSON\n")
    with real_fit.fit_beside(output, "float32", print) as fit:
        assert fit.process is not None
        fit.process.wait()
        with pytest.raises(RetrofitError, match=r"joint\.log"):
            fit.leave_it_a_core()


def test_a_fit_with_other_settings_is_made_anew(output: Path) -> None:
    for steps in (6, 9):
        Path(real_fit.RECIPE).write_text(json.dumps({**RECIPE, "max_steps": steps}))
        with real_fit.fit_beside(output, "float32", print) as fit:
            assert fit.wait().is_dir()
    last = json.loads((output / "joint" / "log.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 3, "a third of them, in float32"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_fit_too(output: Path, number: int) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    Path(real_fit.RECIPE).write_text(json.dumps({**RECIPE, "max_steps": 100_000}))
    try:
        with pytest.raises(SystemExit) as ended, real_fit.fit_beside(output, "float32", print) as fit:
            signal.raise_signal(number)
        assert ended.value.code == 128 + number
        assert fit.process is not None
        assert fit.process.poll() is not None
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_nobody_waits_for_a_fit_that_was_left(output: Path) -> None:
    Path(real_fit.RECIPE).write_text(json.dumps({**RECIPE, "max_steps": 100_000}))
    with pytest.raises(KeyError), real_fit.fit_beside(output, "float32", print):
        raise KeyError
    assert not (output / "joint" / "adapter").exists()


def test_the_fit_has_a_core_to_itself(output: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with real_fit.fit_beside(output, "float32", print) as fit:
            assert torch.get_num_threads() == 2
            assert fit.process is not None
            fit.process.wait()
            fit.leave_it_a_core()
            assert torch.get_num_threads() == 3, "it has ended"
    finally:
        torch.set_num_threads(before)

"""Checkpoints to damage copies of, and the count of what was refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import retrofit
from retrofit.convert import published_name
from retrofit.export import export_model
from retrofit.loading import load_base, load_tokenizer
from tests.robustness.inputs import EXAMPLES, TALLY


@pytest.fixture(scope="session")
def whole(byte_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One whole folder of each sort: a base, an adapter for it, an export, published AHN weights."""
    folder = tmp_path_factory.mktemp("whole")
    model = retrofit.patch(str(byte_checkpoint), "ahn-gdn", window=8, sinks=2, layers=[0, 1])
    retrofit.save_adapter(model, folder / "adapter")
    export_model(model, folder / "export", load_tokenizer(str(byte_checkpoint)))
    ahn = folder / "ahn"
    ahn.mkdir()
    (ahn / "config.json").write_text('{"_ahn_implementation": "GatedDeltaNet", "num_hidden_layers": 2}')
    weights = {published_name("ahn-gdn", name): p.clone() for name, p in model.memory_parameters()}
    weights |= {f"model.layers.{i}.ahn.fn.D": torch.ones(4) for i in range(2)}
    save_file(weights, ahn / "model.safetensors")
    shutil.copytree(byte_checkpoint, folder / "base")
    return {name: folder / name for name in ("base", "adapter", "export", "ahn")}


@pytest.fixture(scope="session")
def base(whole: dict[str, Path]) -> Any:
    """The base, loaded."""
    return load_base(str(whole["base"]))


@pytest.fixture
def copy_of(whole: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of the whole folders, to be damaged."""
    return lambda name: Path(shutil.copytree(whole[name], tmp_path / name))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many inputs each loader refused, where one process saw them all."""
    if TALLY:
        terminalreporter.write_line(f"malformed inputs, {EXAMPLES} asked for:")
        for what, count in sorted(TALLY.items()):
            terminalreporter.write_line(f"  {count:6}  {what}")
        refused = sum(count for what, count in TALLY.items() if what.endswith("refused"))
        terminalreporter.write_line(f"  {refused:6}  refused in all, each in one sentence")

"""`retrofit serve` takes the engine that is there, hands on what it does not know, and says what is missing."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import retrofit
from patches.errors import RetrofitError
from retrofit.serving.serve import engine_command
from tests.helpers import ROOT, fresh_process


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that seem to be there; change the set in a test."""
    there = {"vllm", "fastapi", "uvicorn", "openai"}
    find: Any = importlib.util.find_spec
    asked = set(there)

    def seems(name: str, *args: Any) -> Any:
        return (object() if name in there else None) if name in asked else find(name, *args)

    monkeypatch.setattr("retrofit.serving.serve.find_spec", seems)
    return there


def test_vllm_if_it_is_there(byte_checkpoint: Path, installed: set[str]) -> None:
    command, says = engine_command(str(byte_checkpoint), None, "127.0.0.1", 8123, ["--max-model-len", "64"])
    assert command[0] == sys.executable
    assert command[-7:] == [str(byte_checkpoint), "--host", "127.0.0.1", "--port", "8123", "--max-model-len", "64"]
    assert "vllm" in " ".join(command)
    assert "many requests" in says


def test_transformers_if_not(byte_checkpoint: Path, installed: set[str]) -> None:
    installed.remove("vllm")
    command, says = engine_command(str(byte_checkpoint), None, "127.0.0.1", 8123)
    assert command[1:4] == ["-m", "retrofit.serving.transformers_server", "serve"]
    assert "one request at a time" in says


@pytest.mark.parametrize(
    ("engine", "missing", "says"),
    [
        ("vllm", "vllm", "vLLM is not installed"),
        ("transformers", "uvicorn", "needs uvicorn"),
        ("vlm", "", "did you mean"),
    ],
)
def test_what_is_missing_is_named(
    byte_checkpoint: Path, installed: set[str], engine: str, missing: str, says: str
) -> None:
    installed.discard(missing)
    with pytest.raises(RetrofitError, match=says):
        engine_command(str(byte_checkpoint), engine, "127.0.0.1", 8123)


def test_no_such_model(installed: set[str]) -> None:
    with pytest.raises(RetrofitError, match="there is no folder"):
        engine_command("/nowhere", None, "127.0.0.1", 8123)


def test_transformers_server_finds_what_it_asks_for(byte_checkpoint: Path, tmp_path: Path) -> None:
    """It looks for the first architecture in transformers, and for continuous batching on the model."""
    retrofit.patch(str(byte_checkpoint), "joint", 8, 2).save_pretrained(tmp_path / "model")
    code = """
from retrofit.serving.transformers_server import tell
tell()
import transformers
config = transformers.AutoConfig.from_pretrained("model")
model = getattr(transformers, config.architectures[0]).from_pretrained("model")
assert type(model).__module__ == "patches.qwen2" and not hasattr(model, "init_continuous_batching")
print("found")
"""
    assert "found" in fresh_process(code, tmp_path, path=ROOT)

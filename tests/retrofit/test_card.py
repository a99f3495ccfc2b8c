"""Model cards: metadata the Hub can read, and what a stranger needs to load the thing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedModel

import retrofit
from retrofit.card import adapter_card, model_card
from tests.conftest import tiny_base


def metadata(card: str) -> dict[str, Any]:
    start, front, _ = card.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(front)


@pytest.fixture
def config(make_base: Callable[..., PreTrainedModel]) -> Any:
    model = retrofit.patch(make_base("Qwen2"), "ahn-gdn", 32, 4, layers=[1], others="window")
    model.config.memory.update(base="someone/a-model", base_revision="abc123")
    return model.config


def test_the_adapter_s_card(config: Any) -> None:
    card = adapter_card(config.memory, "## Figures\n\nKL 0.1")
    found = metadata(card)
    assert (found["base_model"], found["base_model_relation"]) == ("someone/a-model", "adapter")
    assert {"retrofit", "memory-ahn-gdn"} <= set(found["tags"])
    assert found["library_name"] == "peft"
    for part in ("`abc123`", "4 sinks", "32 tokens", "layers [1]", "load_adapter", "import retrofit", "KL 0.1"):
        assert part in card
    assert 'from_pretrained("someone/a-model")' in card
    assert "trust_remote_code" not in card


def test_the_model_s_card(config: Any) -> None:
    card = model_card(config.memory)
    assert metadata(card)["base_model_relation"] == "finetune"
    assert "trust_remote_code=True" in card


@pytest.mark.parametrize("base", ["/a-model", "./model", "../model", "~/model", "runs/a/model", "runs/model", None, ""])
def test_a_base_that_is_no_hub_id_is_no_link(
    config: Any, base: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    config.memory["base"] = base
    assert "base_model" not in metadata(adapter_card(config.memory))


def test_the_python_in_it_is_python(config: Any) -> None:
    for card in (adapter_card(config.memory), model_card(config.memory)):
        code = card.split("```python\n")[1].split("```")[0]
        compile(code, "card", "exec")


def test_it_is_written_beside_the_weights(make_base: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    model = retrofit.patch(make_base("Qwen2"), "ahn-gdn", 32, 4)
    retrofit.save_adapter(model, tmp_path / "adapter", details="made by hand")
    assert "made by hand" in (tmp_path / "adapter" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("by_layer", "said"), [
    ({"0": {"rows": [3, 1]}}, "up to there the model is its base; layers have options of their own"),
    ({"0": {"window": 6}}, "a window of 8 tokens, but in some layers otherwise"),
])  # fmt: skip
def test_what_is_said_of_layers_unlike_each_other(by_layer: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = retrofit.patch(tiny_base("Llama"), "expected", 8, 2, by_layer=by_layer)
    retrofit.save_adapter(model, tmp_path / "adapter")
    assert said in (tmp_path / "adapter" / "README.md").read_text()

"""The demo from end to end on an untrained teacher and a few steps: what it returns, writes and refuses."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import retrofit
from distill.demo import run as demo
from distill.demo.recall import find_question, reload
from distill.demo.run import run_demo
from distill.demo.teacher import new_model
from distill.demo.text import NAMES, WORDS, documents, generator, tokenizer
from patches.errors import RetrofitError


def test_from_end_to_end(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    random_state = torch.get_rng_state()
    rows = run_demo(seed=2, output=tmp_path / "out", json_file=tmp_path / "rows.json")
    assert torch.equal(torch.get_rng_state(), random_state), "the caller's random state was touched"

    assert json.loads((tmp_path / "rows.json").read_text()) == rows
    assert [row["name"] for row in rows] == ["teacher", "window-only", "window-only, equal memory", "ahn-gdn"]
    keys = {"name", "far_recall", "kl", "kl_gap_closed", "nll", "kept_bytes", "seconds"}
    assert all(row.keys() == keys for row in rows)
    teacher, window_only, equal, fitted = rows
    assert (teacher["kl"], teacher["kl_gap_closed"], window_only["kl_gap_closed"]) == (0.0, 1.0, 0.0)
    # 2 heads of 32 x 32 floats, and 4 gates for each of 32 tokens: 17 tokens of 2 heads of 32 keys and values
    assert [row["kept_bytes"] for row in rows[1:]] == [0, 8704, 8704]
    assert 0 < equal["kl"] < window_only["kl"]
    assert fitted["kl"] != window_only["kl"]
    assert window_only["seconds"] == 0 < fitted["seconds"]

    # what was written is one and the same model, three times
    ids = documents(2, 100, generator(0, "test"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out/base")
    model = retrofit.load_adapter(base, tmp_path / "out/adapter").eval()
    export = AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    assert torch.equal(model(ids).logits, export(ids).logits)
    assert not torch.equal(model(ids).logits, base(ids).logits)
    assert (model.config.memory["window"], model.config.memory["sinks"]) == (32, 4)
    for name in ("base", "model"):
        words = AutoTokenizer.from_pretrained(tmp_path / "out" / name)
        assert type(words) is type(tokenizer())
        assert words(" ".join(WORDS))["input_ids"] == list(range(len(WORDS)))

    shown = " ".join(capsys.readouterr().out.split())
    assert "completes a held-out prompt" in shown


def test_same_seed_same_memory(quick: None) -> None:
    def fitted(seed: int) -> torch.Tensor:
        model, _ = demo.fit(new_model(0), "ahn-gdn", seed)
        return torch.cat([parameter.flatten() for _, parameter in model.memory_parameters()])

    assert torch.equal(fitted(0), fitted(0))
    assert not torch.equal(fitted(0), fitted(1))


@pytest.mark.parametrize(("memory", "says"), [("ahn-gnd", "did you mean 'ahn-gdn'"), ("none", "nothing to fit")])
def test_refuses_a_memory_before_training(tmp_path: Path, memory: str, says: str) -> None:
    with pytest.raises(RetrofitError, match=says):
        run_demo(memory=memory, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refuses_a_taken_output_before_training(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(RetrofitError, match="--overwrite"):
        run_demo(output=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_export_that_computes_something_else_is_noticed(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(folder: Path, ids: torch.Tensor, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(*ids.shape, len(WORDS)), ids[0]

    monkeypatch.setattr(demo, "reload", other)
    with pytest.raises(RetrofitError, match="does not compute"):
        run_demo(output=tmp_path / "out")


def test_a_broken_export_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match="does not load in a fresh process"):
        reload(tmp_path, documents(1, 9, generator(0, "test")), "the")


def test_the_question_is_the_first_with_its_answer_long_ago() -> None:
    words, ago = find_question(documents(20, 256, generator(0, "test")), 72)
    assert ago > 72
    assert words[-1] in NAMES
    assert words[len(words) - 1 - ago] == words[-1], "its name stands before the surname"
    assert words[-1] not in words[len(words) - ago : -1]
    with pytest.raises(IndexError):
        find_question(documents(1, 40, generator(0, "test")), 72)

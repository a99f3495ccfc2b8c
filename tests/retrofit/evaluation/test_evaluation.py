"""Whole evaluations on a tiny checkpoint: the rows, chunked reading, continuation, what is refused."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

import retrofit
from cli import app
from patches.errors import RetrofitError
from retrofit.evaluation import passkey
from retrofit.evaluation.contenders import EQUAL, Contender, contenders, identity, load_contenders, lossless, ready
from retrofit.evaluation.recall import _recalled
from retrofit.evaluation.run import run_evaluation
from retrofit.evaluation.settings import Settings
from retrofit.evaluation.store import ResultStore
from retrofit.evaluation.tables import tables
from retrofit.evaluation.text import by_distance, score_text
from tests.helpers import awake, tokens

MakeBase = Callable[..., PreTrainedModel]


@pytest.fixture
def adapter(byte_checkpoint: Path, tmp_path: Path) -> Path:
    """An adapter for the byte checkpoint whose memory shows, saved as a run saves it."""
    base = AutoModelForCausalLM.from_pretrained(byte_checkpoint)
    retrofit.save_adapter(awake(base, "ahn-gdn"), tmp_path / "first" / "adapter")
    return tmp_path / "first" / "adapter"


def test_the_rows_share_a_base(byte_checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    rows, _ = load_contenders(str(byte_checkpoint), [str(adapter)])
    assert [row.name for row in rows] == ["teacher", "window-only", EQUAL, "first"]
    assert [row.window for row in rows] == [None, 8, 25, 8]
    assert lossless(rows) == 10
    assert len({row.model.model.embed_tokens.weight.data_ptr() for row in rows}) == 1
    ids = tokens(1, 40)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(byte_checkpoint)(ids).logits
    with ready(rows):
        outputs = [row.model(ids).logits for row in rows]
    assert torch.equal(outputs[0], expected)
    assert not torch.equal(outputs[1], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])
    rows[2].model.save_pretrained(tmp_path / "exported")
    again, _ = load_contenders(str(byte_checkpoint), [str(adapter)], window=6, sinks=1)
    assert [row.model.config.memory["window"] for row in again] == [6, 6, 23, 6]
    with pytest.raises(RetrofitError, match="two rows would be called 'first'"):
        load_contenders(str(byte_checkpoint), [str(adapter), str(adapter)])
    with pytest.raises(RetrofitError, match="has no memory to evaluate"):
        load_contenders(str(byte_checkpoint))


@pytest.mark.parametrize("chunk", [7, 16, 64])
@pytest.mark.parametrize("kind", ["ahn-gdn", "kvm", "tova"])
def test_text_is_scored_alike_in_any_chunks(make_base: MakeBase, kind: str, chunk: int, tmp_path: Path) -> None:
    rows = contenders({kind: awake(make_base("Qwen2"), kind)})
    sequences = tokens(2, 60)
    store = ResultStore(tmp_path, {})
    score_text(rows, sequences, store, chunk=chunk)
    table = by_distance(store, rows, 60)
    scores = retrofit.evaluate({row.name: row.model for row in rows[1:]}, sequences, start=lossless(rows))
    edges = [0, 8, 16, 32]
    assert [entry["beyond"] for entry in table] == [*edges, None]
    for entry, end in zip(table, [*edges[1:], None, None], strict=True):
        part = slice(entry["beyond"] or 0, end)
        for row in rows:
            for what in ("kl", "nll"):
                expected = getattr(scores[row.name], what)[:, part].mean().item()
                assert entry[what][row.name] == pytest.approx(expected, abs=1e-5)


def test_recall_sees_what_a_model_predicts(make_base: MakeBase) -> None:
    model = make_base("Qwen2")
    ids = tokens(1, 30)[0]
    with torch.no_grad():
        guesses = model(ids[None]).logits[0].argmax(-1)
        ids[21] = model(ids[None, :21]).logits[0, -1].argmax()  # one of two right
        found = _recalled([Contender("one", model)], ids, torch.tensor([20, 28]), chunk=8)
        assert found == {"one": 0.5 + 0.5 * bool(guesses[28] == ids[29])}


def test_identity_is_bit_for_bit(make_base: MakeBase, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    model = awake(make_base("Qwen2", vocab_size=len(byte_tokenizer)), "joint")
    rows = contenders({"joint": model})
    same = {"window-only": True, EQUAL: True}
    assert identity(rows, byte_tokenizer) == same | {"joint": True}
    model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(model.model.layers[0].mlp.down_proj.weight * 1.001)
    assert identity(rows, byte_tokenizer) == same | {"joint": False}


@pytest.fixture
def settings(byte_checkpoint: Path, adapter: Path, tmp_path: Path) -> Settings:
    """A little of everything."""
    (tmp_path / "text.txt").write_text("All the world's a stage, and all the men and women merely players. " * 10)
    return Settings(
        str(byte_checkpoint),
        (str(adapter),),
        data=str(tmp_path / "text.txt"),
        eval_rows=3,
        lengths=(400,),
        depths=(0.0, 1.0),
        samples=2,
        bindings=(2,),
        chunk=64,
    )


def test_an_interrupted_evaluation_goes_on(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_evaluation(settings, tmp_path / "whole")
    assert {row["name"] for row in whole["rows"]} == {"teacher", "window-only", EQUAL, "first"}
    assert whole["identity"] == {"window-only": True, EQUAL: True, "first": True}
    assert whole["text"][-1]["kl"]["teacher"] == 0.0
    assert whole["text"][-1]["kl_gap_closed"]["window-only"] == 0.0
    assert [(entry["length"], entry["bindings"], entry["samples"]) for entry in whole["recall"]] == [(400, 2, 2)]
    assert [(entry["depth"], entry["samples"]) for entry in whole["passkey"]] == [(0.0, 2), (1.0, 2)]
    assert json.loads((tmp_path / "whole" / "eval.json").read_text()) == json.loads(json.dumps(whole))

    lines = (tmp_path / "whole" / "results.jsonl").read_text().splitlines()
    part = tmp_path / "part"
    part.mkdir()
    (part / "results.jsonl").write_text("\n".join(lines[:7]) + "\n" + lines[7][:15])  # killed while it wrote
    answered = []
    monkeypatch.setattr(passkey, "answer", lambda model, *_: answered.append(model) or "nothing")
    run_evaluation(settings, part)
    again = (part / "results.jsonl").read_text().splitlines()
    assert len(again) == len(lines)
    assert again[:7] == lines[:7]
    assert len(answered) == 4 * sum('"kind": "passkey"' in line for line in lines[7:])


def test_results_of_other_settings_are_not_mixed(settings: Settings, tmp_path: Path) -> None:
    ResultStore(tmp_path / "out", {"seed": 0, "model": "a"}).add("k", kind="x")
    with pytest.raises(RetrofitError, match=r"results of other settings \(seed\)"):
        ResultStore(tmp_path / "out", {"seed": 1, "model": "a"})
    assert "k" in ResultStore(tmp_path / "out", {"seed": 0, "model": "a"})
    assert "k" not in ResultStore(tmp_path / "out", {"seed": 1, "model": "a"}, overwrite=True)
    (tmp_path / "out" / "results.jsonl").write_text('{"settings": {}}\nnonsense\n{"key": "a"}\n')
    with pytest.raises(RetrofitError, match="line 2 is not a result"):
        ResultStore(tmp_path / "out", {})


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def test_the_command(byte_checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 20)
    out = tmp_path / "out"
    arguments = (byte_checkpoint, "--adapter", adapter, "--data", tmp_path / "text.txt", "--rows", 2, "-o", out)
    done = command(*arguments, "--probe", "identity", "--probe", "recall", "--length", 60, "--bindings", 3)
    assert done.exit_code == 0, done.output
    for title in ("bit-identical", "KL by distance", "keyed recall"):
        assert title in done.output
    summary = json.loads((out / "eval.json").read_text())
    assert summary["passkey"] is None
    assert all(math.isfinite(value) for value in summary["text"][-1]["kl"].values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--probe", "needle"), "probes: 'needle' is not one of"),
        (("--data", "nowhere.txt"), "there is no file or folder nowhere.txt"),
        (("--chat",), "has no chat template"),
        (("--probe", "recall", "--length", 60, "--bindings", 99), "99 bindings do not fit into 60 tokens"),
        (("--seq-len", 9999), "holds no text of 9999 tokens"),
        (("--seq-len", 8, "--probe", "identity"), "never leave a window of 10"),
        (("--seq-len", 40, "--probe", "recall", "--length", 60, "--bindings", 99), "99 bindings do not fit"),
        (("--seq-len", 40, "--tasks", "no-such-task"), "harness"),
    ],
)
def test_bad_input(
    byte_checkpoint: Path, adapter: Path, tmp_path: Path, arguments: tuple[object, ...], said: str
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 20)
    data = () if "--data" in arguments else ("--data", tmp_path / "text.txt")
    done = command(byte_checkpoint, "--adapter", adapter, *data, *arguments, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_results_that_are_none_are_not_overwritten(settings: Settings, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("results.jsonl", "eval.json"):
        (out / name).write_text('{"mine": 1}\n')
        with pytest.raises(RetrofitError, match=name):
            run_evaluation(settings, out, overwrite=True)
        assert (out / name).read_text() == '{"mine": 1}\n'
        (out / name).unlink()


def test_a_needle_of_two_lengths(settings: Settings, tmp_path: Path) -> None:
    """The harness makes the needle by itself, at any length; so many of each length are asked."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    asked = replace(settings, probes=(), tasks=("niah_single_1",), task_lengths=(700, 800), limit=1, seq_len=40)
    summary = run_evaluation(asked, tmp_path / "out")
    assert [(entry["task"], entry["metric"]) for entry in summary["harness"]] == [
        ("niah_single_1", "700"),
        ("niah_single_1", "800"),
    ]
    names = ("teacher", "window-only", EQUAL, "first")
    assert all(entry[row] in (0, 1) for entry in summary["harness"] for row in names)
    assert tables(summary)[-1][0] == "harness"

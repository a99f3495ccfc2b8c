"""docs/evaluation-benchmarks.md does what it says: its code runs, its tasks are there."""

import inspect
import json
import re

import pytest
from typer.testing import CliRunner

import retrofit
from cli import app
from retrofit.evaluation import harness
from tests.pages import blocks, commands, text_of

PAGE = text_of("docs/evaluation-benchmarks.md")
HARNESS, PERPLEXITY = blocks("docs/evaluation-benchmarks.md", "python")


@pytest.fixture
def names(make_base, byte_tokenizer, tmp_path, monkeypatch):
    """What the page's code takes for granted: a base, a model, a tokenizer, the data in the current folder."""
    monkeypatch.chdir(tmp_path)
    base = make_base("Qwen2", vocab_size=259)
    return {"base": base, "model": retrofit.patch(base, "ahn-gdn", 8, 2), "tokenizer": byte_tokenizer}


def test_the_harness_is_called_with_what_it_takes(names, monkeypatch):
    calls = []
    signature = inspect.signature(harness.run_harness)
    monkeypatch.setattr(harness, "run_harness", lambda *args, **kwargs: calls.append(signature.bind(*args, **kwargs)))
    exec(HARNESS, names)
    (call,) = calls
    assert list(call.arguments["models"]) == ["teacher", "window-only", "memory"]


def test_perplexity_is_printed(names, tmp_path, capsys):
    (tmp_path / "pg19" / "test").mkdir(parents=True)
    (tmp_path / "pg19" / "test" / "1.txt").write_text("To be, or not to be. " * 60)
    exec(PERPLEXITY, names)
    said = capsys.readouterr().out
    for policy in ("full", "window+4", "h2o", "tova"):
        assert re.search(rf"^\s*{re.escape(policy)}(\s+[\d.]+){{5}}\s*$", said, re.MULTILINE), said


def test_its_commands_ask_every_row(byte_checkpoint, tmp_path, monkeypatch):
    """The first command, whose prompts the harness makes; the others name tasks whose documents are fetched."""
    monkeypatch.chdir(tmp_path)
    first = commands("docs/evaluation-benchmarks.md")[0].words
    shorter = ["--task-length", "700", "--limit", "1", "--window", "8", "-o", "out"]
    words = [word for word in first if word not in ("--task-length", "4096", "8192")]
    done = CliRunner().invoke(app, ["eval", str(byte_checkpoint), *words[3:], *shorter])
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "out" / "eval.json").read_text())["harness"]
    assert {"teacher", "window-only"} < row.keys()


def test_its_tasks_are_there():
    manager = pytest.importorskip("lm_eval.tasks").TaskManager(include_path=harness.TASKS)
    table = PAGE[PAGE.index("| tasks | what they are |") : PAGE.index("The documents come from")]
    cells = [line.split("|")[1] for line in table.strip().splitlines()[2:]]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    named |= set(commands("docs/evaluation-benchmarks.md")[1].words[4].split(","))
    assert len(named) > 15
    assert named <= set(manager.all_tasks)

"""docs/evaluation-benchmarks.md does what it says: its code runs, its table of settings is the code's."""

import inspect
import json
import re

import pytest

import retrofit
from retrofit.evaluation import harness
from retrofit.evaluation.benchmarks import BENCHMARKS
from tests.pages import blocks, text_of

PAGE = text_of("docs/evaluation-benchmarks.md")
BENCHMARK, HARNESS, PERPLEXITY = blocks("docs/evaluation-benchmarks.md", "python")


@pytest.fixture
def names(make_base, byte_tokenizer, tmp_path, monkeypatch):
    """What the page's code takes for granted: a base, a model, a tokenizer, the data in the current folder."""
    monkeypatch.chdir(tmp_path)
    base = make_base("Qwen2", vocab_size=259)
    return {"base": base, "model": retrofit.patch(base, "ahn-gdn", 8, 2), "tokenizer": byte_tokenizer}


def test_a_benchmark_is_read(names, tmp_path, capsys):
    (tmp_path / "LongBench").mkdir()
    row = {"context": "c", "input": "who?", "answers": ["Ann"]}
    (tmp_path / "LongBench" / "hotpotqa.jsonl").write_text(json.dumps(row))
    exec(BENCHMARK, names)
    said = capsys.readouterr().out
    assert "window=8064, this model has 8" in said
    assert "who?\nAnswer: ('Ann',) 0.0" in said


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


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_the_settings_are_the_codes(name):
    benchmark = BENCHMARKS[name]
    (line,) = re.findall(rf"^\| `{name}` \| .*$", PAGE, re.MULTILINE)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    if name in ("longbench", "infinitebench"):
        assert cells[1] == ", ".join(benchmark.questions)
    if not name.endswith("-own"):
        assert cells[2] == f"{benchmark.window:,}, {benchmark.sinks}"
    assert cells[3] == f"{benchmark.max_length:,}"
    assert cells[4] == {"tail": "beginning", "middle": "middle"}[benchmark.truncate]
    assert {int(n) for n in re.findall(r"\d+", cells[5])} == {q.max_new_tokens for q in benchmark.questions.values()}

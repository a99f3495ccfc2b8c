"""What each verb prints and writes when all is well."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from cli import app
from retrofit.recipes import shipped_recipes
from tests.test_cli import refused, run


def test_recipes(tmp_path: Path) -> None:
    listed = run("recipes", "ls")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(shipped_recipes())
    assert run("recipes", "check").stdout == "".join(f"{name}: valid\n" for name in shipped_recipes())
    for name, path in shipped_recipes().items():
        assert run("recipes", "show", name).stdout == path.read_text()
        copy = tmp_path / f"{name}.yaml"
        assert run("recipes", "cp", name, copy).exit_code == 0
        assert copy.read_text() == path.read_text()
        copy.write_text("mine")
        refused(run("recipes", "cp", name, copy), "--overwrite")
        assert copy.read_text() == "mine"
        assert run("recipes", "cp", name, copy, "--overwrite").exit_code == 0
        assert run("recipes", "check", copy).exit_code == 0


def test_flags_override_the_recipe(tmp_path: Path, byte_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def record(recipe: object, **flags: bool) -> dict[str, list[dict[str, int]]]:
        asked.update(recipe=recipe, flags=flags)
        return {"rows": [{"kl": 1}]}

    monkeypatch.setattr("distill.run.distill", record)
    recipe = tmp_path / "run.yaml"
    recipe.write_text("memory: ahn-dn\nwindow: 8\nmax_steps: 7\noptions: {a: 1}\n")
    flags = ["--window", 9, "--learning-rate", "3e-3", "--weight-decay", "1e-2", "--layers", "[0,1]", "--resume"]
    result = run("distill", recipe, "--base", byte_checkpoint, *flags, "--json", tmp_path / "rows.json")
    assert result.exit_code == 0, result.output
    got = asked["recipe"]
    assert (got.base, got.memory, got.window, got.max_steps) == (str(byte_checkpoint), "ahn-dn", 9, 7)
    assert (got.learning_rate, got.weight_decay, got.layers, got.options) == (3e-3, 1e-2, [0, 1], {"a": 1})
    assert asked["flags"] == {"resume": True, "overwrite": False}
    assert json.loads((tmp_path / "rows.json").read_text()) == [{"kl": 1}]


def test_generation_is_repeatable_and_streamed(byte_checkpoint: Path) -> None:
    greedy = run("generate", byte_checkpoint, "--prompt", "the quick", "--max-new-tokens", 12)
    assert greedy.exit_code == 0, greedy.output
    assert greedy.stdout.strip()
    samples = [
        run("generate", byte_checkpoint, "--prompt", "the quick", "--temperature", 1, "--seed", seed).stdout
        for seed in (0, 0, 1)
    ]
    assert samples[0] == samples[1]
    assert len({greedy.stdout, *samples}) == 3


def test_chat(tmp_path: Path, byte_checkpoint: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    refused(run("generate", byte_checkpoint, "--chat"), "no chat template")
    model = shutil.copytree(byte_checkpoint, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    once = run("generate", model, "--chat", "--prompt", "the quick", "--max-new-tokens", 5)
    assert once.exit_code == 0, once.output
    plain = run("generate", model, "--prompt", "the quick", "--max-new-tokens", 5)
    assert once.stdout == plain.stdout, "the template adds nothing"
    arguments = ["generate", str(model), "--chat", "--max-new-tokens", "5"]
    typed = CliRunner().invoke(app, arguments, input="the quick\n")
    assert typed.stdout == once.stdout


def test_push_needs_something_to_push(tmp_path: Path) -> None:
    refused(run("push", tmp_path, "user/name"), "neither an adapter nor an exported model")


def test_what_the_doctor_finds(tmp_path: Path) -> None:
    result = run("doctor", "--json", tmp_path / "findings.json")
    findings = json.loads((tmp_path / "findings.json").read_text())
    assert result.exit_code == any(finding["verdict"] == "breaks" for finding in findings), result.output
    assert all(finding["name"] in result.stdout for finding in findings)


def test_the_doctor_says_when_something_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    from retrofit import doctor

    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("torch", "1.0", doctor.BAD, "too old: upgrade it")])
    result = run("doctor")
    assert result.exit_code == 1
    assert result.stdout.endswith("breaks: torch: too old: upgrade it\n")
    monkeypatch.setitem(sys.modules, "retrofit.doctor", None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "retrofit does not import" in result.stdout


def test_estimate_prints_its_rows_and_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    how = ["--memory", "kvm", "--option", "budget=power_law", "--peak-tflops", 989, "--bandwidth", 4800]
    result = run("estimate", "qwen2.5-14b-instruct", *how, "--json", file)
    assert result.exit_code == 0, result.output
    assert [row["name"] for row in json.loads(file.read_text())] == ["full", "window", "kvm"]
    assert "at the device's peaks" in result.stdout
    refused(run("estimate", "qwen2.5-14b", "--option", "memory=kvm"), "--option memory")


def test_report_writes_a_page_and_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n')
    result = run("report", tmp_path, "-o", tmp_path / "page.html")
    assert result.exit_code == 0
    assert "1 figures, each as PNG and SVG" in " ".join(result.stdout.split())
    for name in ("metrics.json is missing", "recipe.yaml is missing", "No evaluation", "No costs"):
        assert name in result.stderr
    assert "from 0.5 to 0.25" in (tmp_path / "page.html").read_text()
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"loss.png", "loss.svg"}

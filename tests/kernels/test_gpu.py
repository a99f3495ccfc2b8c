"""`make gpu` without a GPU: every section runs on small shapes, and a page's tables are replaced between its marks."""

import json
from pathlib import Path

import pytest

from patches.kernels import OPS
from patches.kinds import KINDS
from tests.helpers import ROOT
from tests.kernels import checks, gpu

PAGE = ROOT / "docs" / "gpu.md"


def test_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    assert gpu.main(["--output", str(tmp_path / "gpu.json"), "--page", str(copy)]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["dry run"] is True
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")  # its figures mean nothing
    assert "dry run on the CPU" in capsys.readouterr().out
    sections = found["sections"]
    assert list(sections) == list(gpu.SECTIONS)
    assert len(sections["ops"]) == 2 * 2 * len(OPS) + 2  # merge in float32 alone
    assert {row["name"] for row in sections["models"]} == set(KINDS)
    assert {row["name"] for row in sections["reading and decoding"]} == {"full attention", *KINDS}
    assert {row["right"] for name in ("ops", "models") for row in sections[name]} == {"right"}
    assert not [note for note in found["notes"] if not note.startswith("loss: Liger is not here")]


def test_a_section_that_fails_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(session: gpu.Session) -> None:
        raise ValueError("no such kernel")

    def wrong(session: gpu.Session) -> None:
        checks._judge(session, "models", "joint", gpu.torch.float32, "fla", 0.5)

    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    sections = {"ops": (broken, gpu.SECTIONS["ops"][1]), "models": (wrong, gpu.SECTIONS["models"][1])}
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    assert gpu.main(["--output", str(tmp_path / "gpu.json")]) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["notes"] == ["ops: stopped by ValueError: no such kernel"]
    assert found["sections"]["models"][0]["right"] == "WRONG"
    assert gpu.main(["--output", str(tmp_path / "late.json"), "--minutes", "0"]) == 0
    assert json.loads((tmp_path / "late.json").read_text())["sections"] == {}


def test_the_page_has_one_place_for_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(gpu.BEGIN) == text.count(gpu.END) == 1
    once = gpu.put(text, "| a |")
    assert "| a |" in once
    assert gpu.put(once, "| b |") == once.replace("| a |", "| b |")

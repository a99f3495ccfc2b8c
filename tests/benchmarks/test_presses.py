"""``make presses`` without kvpress: what was asked for is in the table, and what was scored is not scored again."""

import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.conftest import tiny_base
from tests.helpers import tokens

NAMES = ("StreamingLLM", "TOVA", "SnapKV", "ExpectedAttention", "Knorm", "KeyDiff")


@pytest.fixture
def presses(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script beside a kvpress that cuts nothing."""

    def made(share: float) -> Any:
        assert 0 < share < 1
        return lambda model: nullcontext()

    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace(**{f"{name}Press": made for name in NAMES}))
    monkeypatch.delitem(sys.modules, "benchmarks.presses", raising=False)
    script = importlib.import_module("benchmarks.presses")
    monkeypatch.setattr(script, "READ", 30)
    return script


def test_a_table_of_what_was_asked(presses: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_base("Qwen2").save_pretrained(tmp_path / "base")
    (tmp_path / "rows.json").write_text(json.dumps({"novel": tokens(2, 40).tolist()}))
    with pytest.raises(SystemExit, match="make real"):
        presses.main(tmp_path, rows=1, kept=[10])
    (tmp_path / "real.json").write_text(json.dumps({"settings": {"dtype": "float32"}}))
    presses.main(tmp_path, rows=1, kept=[10, 20])
    scored = json.loads((tmp_path / "presses.json").read_text())
    assert all(abs(value) < 1e-5 for one in scored.values() for value in one["novel"].values()), (
        "nothing was cut, so nothing is lost"
    )
    presses.main(tmp_path, rows=2, kept=[10])
    again = json.loads((tmp_path / "presses.json").read_text())
    assert again["TOVA, 20 rows"] == scored["TOVA, 20 rows"]
    assert len(again["TOVA, 10 rows"]["novel"]) == 2
    assert again["TOVA, 10 rows"]["novel"].items() >= scored["TOVA, 10 rows"]["novel"].items()
    table = (tmp_path / "presses.md").read_text()
    assert "TOVA, 10 rows" in table
    assert "TOVA, 20 rows" not in table, "of one row, where two were asked for"
    (tmp_path / "real.json").write_text(json.dumps({"settings": {"dtype": "bfloat16"}}))
    presses.main(tmp_path, rows=1, kept=[10])
    assert len(json.loads((tmp_path / "presses.json").read_text())["TOVA, 10 rows"]["novel"]) == 3, "in another dtype"

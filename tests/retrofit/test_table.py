"""The table on a narrow terminal, and its rows as JSON."""

import io
import json
import math
from pathlib import Path

from rich.console import Console

from retrofit.table import finite, print_table, write_rows

ROWS = [
    {"name": "teacher", "kl": 0.0, "bytes": None},
    {"name": "window-only, equal memory", "kl": 0.08765, "bytes": 16384},
    {"name": "broken", "kl": float("nan")},
]
COLUMNS = {"name": ("", ""), "kl": ("KL to teacher", ".4f"), "bytes": ("state bytes per layer", ",d")}


def test_figures_are_whole_on_a_narrow_terminal() -> None:
    out = io.StringIO()
    print_table("held-out rows", ROWS, COLUMNS, Console(file=out, width=50))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("held-out rows")
    assert any(line.split() == ["window-only,", "equal", "memory", "0.0877", "16,384"] for line in lines)
    assert any(line.split() == ["broken", "-", "-"] for line in lines)


def test_rows_are_json_with_null_for_nan(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.json", ROWS)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows[1] == ROWS[1]
    assert rows[2] == {"name": "broken", "kl": None}


def test_finite_looks_into_everything() -> None:
    assert finite({"a": [1.5, (math.inf, "x")], "b": {"c": math.nan, "d": True}}) == {
        "a": [1.5, [None, "x"]],
        "b": {"c": None, "d": True},
    }

"""Every kind in one table, on untrained teachers and a few steps."""

import json
from pathlib import Path

from benchmarks.every_kind import run_all
from patches.kinds import KINDS


def test_every_kind_in_one_table(quick: None, tmp_path: Path) -> None:
    rows = run_all(seed=4, output=tmp_path / "out")
    assert json.loads((tmp_path / "out/rows.json").read_text()) == rows
    others = [kind for kind in KINDS if kind not in ("ahn-gdn", "none")]
    names = ["teacher", "window-only", "window-only, equal memory", "ahn-gdn", *others]
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert row["seeds"] == [4, 5, 6]
        assert row["kl_min"] <= row["kl"] <= row["kl_max"]
    by_name = {row["name"]: row for row in rows}
    assert by_name["window-only"]["kl_min"] < by_name["window-only"]["kl_max"], "three seeds, three teachers"
    # a few per cent for normalisers, scores and the like
    assert {name for name in others if by_name[name]["kept_bytes"] > 1.12 * 8704} == set(), "more bytes than AHN's"
    table = (tmp_path / "out/table.md").read_text().splitlines()
    assert len(table) == 2 + len(rows)
    assert {line.count("|") for line in table} == {12}

"""The report: what is there is shown, what is missing is said, and nothing from a file is taken for markup."""

import json
import re
import struct
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from patches.errors import RetrofitError
from retrofit.report.collect import Run, collect, number
from retrofit.report.drawing import Styles, thinned
from retrofit.report.figures import pictures
from retrofit.report.page import page, report
from tests.retrofit.report.runs import NASTY, training, write_run

ALL = {"loss", "gap-closed", "kl-by-position", "text-kl-by-position"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A whole run."""
    return write_run(tmp_path / "run")


def drawn(run: Run) -> set[str]:
    """Names of the figures there are."""
    return {picture.name for picture in pictures(run)}


def test_a_whole_run(run: Path) -> None:
    written, made, missing = report(run)
    assert written == run / "report.html"
    assert {picture.name for picture in made} == ALL
    assert missing == []
    text = written.read_text()
    for words in (
        "0.0050",
        "95.0%",
        "retrofit distill joint",
        "memory: &#34;joint&#34;",
        "12,345",
        "2.99.9",
        "pass key",
        "niah_single_1",
    ):
        assert words in text, words
    assert text.count("<svg role") == len(ALL)
    assert text.index("<h2>Results") < text.index("<h2>Training") < text.index("<h2>Costs") < text.index("<h2>How it")


def test_its_figures_are_files_too_and_the_same_twice(run: Path) -> None:
    def files() -> dict[str, bytes]:
        report(run)
        return {path.name: path.read_bytes() for path in (run / "figures").iterdir()}

    first = files()
    assert set(first) == {f"{name}.{kind}" for name in ALL for kind in ("png", "svg")}
    for name, content in first.items():
        if name.endswith("png"):
            assert content.startswith(b"\x89PNG")
            assert struct.unpack(">I", content[16:20])[0] > 800  # pixels across
        else:
            ET.fromstring(content)
    assert files() == first


def test_the_page_asks_nothing_of_a_network_and_its_colours_follow_the_theme(run: Path) -> None:
    text = report(run)[0].read_text()
    links = set(re.findall(r'(?:src|href)="([^"]*)"', text))
    assert all(link.startswith(("#", "data:")) for link in links), links
    assert "<script" not in text
    assert "prefers-color-scheme: dark" in text
    for svg in re.findall(r"<svg role.*?</svg>", text, flags=re.DOTALL):
        assert '<g id="paper">' in svg  # its white is taken away


def test_what_files_say_is_never_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", NASTY)
    written, made, _ = report(run)
    text = written.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert {picture.name for picture in made} == ALL  # nor mathematics: a dollar sign is one
    for path in (run / "figures").glob("*.svg"):
        ET.fromstring(path.read_bytes())


def test_names_that_are_hard_to_draw(run: Path) -> None:
    path = run / "eval" / "eval.json"
    found = json.loads(path.read_text())
    for name in ("\ud800", r"$\frac$", "a\x00b\nc", "_hidden", "x" * 5000, "模型", ""):
        found["rows"].append({"name": name})
        for entry in found["text"]:
            entry["kl"][name] = 0.3
    path.write_text(json.dumps(found))
    written, made, _ = report(run)
    assert written.read_text().endswith("</html>\n")
    for svg in (run / "figures").glob("*.svg"):
        ET.fromstring(svg.read_bytes())
    (kl,) = [picture for picture in made if picture.name == "text-kl-by-position"]
    assert len(kl.figure.axes[0].get_legend().get_texts()) == 9


@pytest.mark.parametrize(
    ("absent", "gone", "said"),
    [
        ("metrics.json", set(), "metrics.json is missing: the run has not finished"),
        ("log.jsonl", {"loss", "gap-closed", "kl-by-position"}, "log.jsonl is missing"),
        ("recipe.yaml", set(), "recipe.yaml is missing"),
        ("eval/eval.json", {"text-kl-by-position"}, "No evaluation"),
        ("bench.json", set(), "No costs"),
    ],
)
def test_what_is_missing_is_said_and_the_rest_is_shown(absent: str, gone: set[str], said: str, run: Path) -> None:
    (run / absent).unlink()
    found = collect(run)
    assert drawn(found) == ALL - gone
    assert len(found.missing) == 1
    assert said in found.missing[0]
    assert said in page(found, [])


def test_the_curve_in_metrics_stands_in_for_a_lost_log(run: Path) -> None:
    (run / "log.jsonl").unlink()
    metrics, log = training()
    (run / "metrics.json").write_text(json.dumps(metrics | {"curve": log}))
    assert drawn(collect(run)) == ALL


def test_a_log_cut_off_in_its_last_line(run: Path) -> None:
    with (run / "log.jsonl").open("a") as file:
        file.write('{"loss": 0.0')
    assert drawn(collect(run)) == ALL


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "\x00", "[" * 100_000, '{"rows": 3, "recipe": [], "versions": "x"}'],
    ids=["empty", "cut", "list", "null", "zero", "deep", "wrong types"],
)
def test_a_broken_file_does_not_hide_the_others(content: str, run: Path) -> None:
    for name in ("metrics.json", "eval/eval.json", "bench.json"):
        (run / name).write_text(content)
    found = collect(run)
    assert drawn(found) >= {"loss", "gap-closed", "kl-by-position"}
    assert any("bench.json cannot be read" in sentence for sentence in found.missing)
    assert "</html>" in page(found, [])


def test_figures_that_are_none(run: Path) -> None:
    bad = [{"step": step, "loss": value} for step, value in enumerate(["x", None, True, 10**400, [], {}, 0.5])]
    text = "".join(json.dumps(entry) + "\n" for entry in bad) + '{"step": 8, "loss": NaN}\n{"step": NaN, "loss": 1}\n'
    (run / "log.jsonl").write_text(text)
    (loss, *_) = pictures(collect(run))
    assert loss.name == "loss"
    assert "0.5 to 0.5" in loss.alt
    assert number(float("inf")) is None


def test_a_table_that_cannot_be_made_is_said(run: Path) -> None:
    costs = json.loads((run / "bench.json").read_text())
    (run / "bench.json").write_text(json.dumps([{**costs[0], "prefill_seconds": "fast"}, *costs[1:]]))
    evaluated = json.loads((run / "eval" / "eval.json").read_text())
    (run / "eval" / "eval.json").write_text(json.dumps(evaluated | {"text": [{"beyond": None}]}))
    found = collect(run)
    text = page(found, [])
    assert "The table &#39;All lengths&#39; is missing" in text
    assert "The evaluation&#39;s tables are missing" in text
    assert "Held-out rows, after training" in text


def test_the_folder_of_an_evaluation(run: Path) -> None:
    written, made, missing = report(run / "eval")
    assert written == run / "eval" / "report.html"
    assert {picture.section for picture in made} == {"By position"}
    assert "No training" in missing[0]
    text = written.read_text()
    assert "Evaluation of some/model" in text
    assert "<td>yes</td>" in text  # bit-identical
    assert "<td>NO</td>" in text


def test_other_places(run: Path, tmp_path: Path) -> None:
    (run / "eval").rename(tmp_path / "elsewhere")
    (run / "bench.json").rename(tmp_path / "costs.json")
    written, made, _ = report(run, tmp_path / "new" / "first.html", tmp_path / "elsewhere", tmp_path / "costs.json")
    assert written.is_file()
    assert {picture.name for picture in made} == ALL


def test_what_was_asked_for_by_name_must_be_there(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match=r"eval.json is missing: no finished evaluation"):
        report(run, evaluation=tmp_path)
    (tmp_path / "rows.json").write_text('[{"pass": "forward"}]')
    with pytest.raises(RetrofitError, match=r"none of its rows has a name and a length"):
        report(run, bench=tmp_path / "rows.json")


def test_an_earlier_report_is_replaced_and_nothing_else(run: Path, tmp_path: Path) -> None:
    report(run)
    report(run)
    mine = tmp_path / "mine.html"
    mine.write_text("<html>mine</html>")
    with pytest.raises(RetrofitError, match="retrofit did not write it"):
        report(run, mine)
    with pytest.raises(RetrofitError, match=r"ends in \.html"):
        report(run, run / "metrics.json")
    assert mine.read_text() == "<html>mine</html>"


def test_everyone_keeps_his_colour(run: Path) -> None:
    styles = Styles(["joint", "teacher", "kvm"])
    lines = [styles.line(name) for name in ("teacher", "window-only", "window-only, equal memory", "joint", "kvm")]
    assert len({line["color"] for line in lines}) == 4
    assert len({(line["marker"], str(line["linestyle"])) for line in lines}) == 5  # without colours, too

    made = {picture.name: picture for picture in pictures(collect(run))}
    for name in ("gap-closed", "kl-by-position", "text-kl-by-position"):
        shown = {line.get_label(): line.get_color() for line in made[name].figure.axes[0].get_lines()}
        assert shown["joint"] == styles.line("joint")["color"], name
        assert shown["window-only"] == styles.line("window-only")["color"], name


def test_a_long_run_is_thinned_by_means() -> None:
    points, size = thinned([(float(step), float(step % 2)) for step in range(4000)])
    assert size == 10
    assert len(points) == 400
    assert points[0] == (4.5, 0.5)


def test_without_matplotlib(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("retrofit.report", "matplotlib"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RetrofitError, match=r"retrofit-lm\[report\]"):
        __import__("retrofit.report.page")

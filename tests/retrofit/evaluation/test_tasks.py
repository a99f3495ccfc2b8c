"""Our tasks for the harness, and the groups that ask its own as AHN did: each asks and scores local documents."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
pytest.importorskip("jieba", reason="jieba is not installed")

import datasets
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import _load_module_with_cache

from retrofit.evaluation.harness import TASKS

lveval: Any = _load_module_with_cache(TASKS / "lveval" / "metrics.py")

SETS = [path.stem for path in sorted((TASKS / "lveval").glob("[!_]*.yaml"))]
DOCUMENT = {
    "context": "THE {TEXT}",
    "input": "WHO?",
    "question": "WHO?",
    "answers": ["Ann Lee", "Annie"],
    "answer": ["Ann Lee"],
    "options": [],
}


@pytest.fixture(scope="module")
def manager() -> TaskManager:
    return TaskManager(include_path=TASKS)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets_cache: Path) -> list[Any]:
    """One document stands for every dataset of the Hub; what was asked for is kept."""
    file, asked, load = tmp_path / "documents.jsonl", [], datasets.load_dataset
    file.write_text(json.dumps(DOCUMENT) + "\n")

    def load_local(path: str, name: str | None = None, **how: Any) -> Any:
        asked.append((path, name, how.get("data_files")))
        found = load("json", data_files={"test": str(file)})
        return datasets.DatasetDict(dict.fromkeys(("test", "longbook_qa_en", "longbook_qa_chn"), found["test"]))

    monkeypatch.setattr(datasets, "load_dataset", load_local)
    return asked


def score(task: Any, answer: str) -> float:
    return float(task.process_results(task.test_docs()[0], [answer])["score"])


@pytest.mark.parametrize("name", SETS)
def test_a_set_of_lveval(name: str, manager: TaskManager, local: list[Any]) -> None:
    task = manager.load([f"lveval_{name}"])["tasks"][f"lveval_{name}"]
    assert local == [
        ("json", None, {"test": f"zip://**/{name}_128k.jsonl::hf://datasets/Infinigence/LVEval/{name}.zip"})
    ]
    doc = task.test_docs()[0]
    prompt = task.doc_to_text(doc)
    assert prompt.count("THE {TEXT}") == prompt.count("WHO?") == 1
    assert prompt.count("请现在基于") == (name == "lic_mixup")
    assert task.config.generation_kwargs["max_gen_toks"] == (16 if "factrecall" in name else 64)
    assert score(task, "Ann Lee") == pytest.approx(1)
    assert score(task, "Annie") == 0, "only the first answer counts"


def test_all_sets_have_one_name(manager: TaskManager, local: list[Any]) -> None:
    assert len(SETS) == 11
    assert sorted(manager.load(["lveval"])["tasks"]) == [f"lveval_{name}" for name in SETS]


def test_a_file_inside_an_archive_is_read(tmp_path: Path, datasets_cache: Path) -> None:
    """As LV-Eval publishes its sets: an archive with a file for each length, in a folder or not."""
    for folder in ("", "cmrc_mixup/"):
        path = tmp_path / f"{bool(folder)}.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{folder}cmrc_mixup_16k.jsonl", '{"wrong": "length"}\n')
            archive.writestr(f"{folder}cmrc_mixup_128k.jsonl", json.dumps(DOCUMENT) + "\n")
        found = datasets.load_dataset("json", data_files={"test": f"zip://**/cmrc_mixup_128k.jsonl::{path}"})
        assert found["test"]["input"][:] == ["WHO?"]


def test_longbench_as_ahn_ran_it(manager: TaskManager, local: list[Any]) -> None:
    tasks = manager.load(["longbench_ahn"])["tasks"]
    lengths = {name.removeprefix("longbench_"): task.config.generation_kwargs for name, task in tasks.items()}
    assert {name: how["max_gen_toks"] for name, how in lengths.items()} == {
        "dureader": 128,
        "hotpotqa": 32,
        "musique": 32,
        "narrativeqa": 128,
        "qmsum": 500,
        "triviaqa": 32,
    }
    assert all("\n\nQuestion" in how["until"] and "(Passage" in how["until"] for how in lengths.values())
    assert "问题：" in lengths["dureader"]["until"]
    assert all(score(task, "Ann Lee") == pytest.approx(1) for task in tasks.values())
    assert score(tasks["longbench_triviaqa"], " \nAnn Lee\nQuestion: next") == 1
    assert score(tasks["longbench_hotpotqa"], " \nAnn Lee\nQuestion: next") < 1


def test_infinitebench_as_ahn_ran_it(manager: TaskManager, local: list[Any]) -> None:
    tasks = manager.load(["infinitebench_ahn"])["tasks"]
    assert sorted(tasks) == ["infinitebench_longbook_qa_chn", "infinitebench_longbook_qa_en"]
    for task in tasks.values():
        doc = task.test_docs()[0]
        asked = task.config.description + task.doc_to_text(doc)
        assert asked == "Read the book below and answer a question.\n\nTHE {TEXT}\n\nQuestion: WHO?\n\nBe very concise."
        assert task.config.generation_kwargs["max_gen_toks"] == 256
        assert score(task, "Ann Lee") == pytest.approx(1)
        assert 0 < score(task, "Ann") < 1


def doc(*answers: str, keywords: str | None = None) -> dict[str, Any]:
    return {"answers": answers, "answer_keywords": keywords}


def keyword_f1(answer: str, document: dict[str, Any]) -> float:
    return float(lveval.score_keyword_f1(document, [answer])["score"])


def test_recall_counts_idle_words_below_and_not_above() -> None:
    # "battle of york": of is idle; battle found: 1 of 3
    assert lveval.recall_keywords(["battle", "of", "hastings"], ["battle", "of", "york"], lveval.IDLE) == 1 / 3


def test_an_answer_without_the_keywords_is_worth_nothing() -> None:
    judged = doc("he was born in the city of York", keywords="York")
    # 5 of 6 words right, but not the one that counts
    assert keyword_f1("he was born in the city of Leeds", judged) == 0
    # born york of "born york" (2 words); reference: he was born in city of york (7): P 1, R 2/7, F 4/9
    assert keyword_f1("Born: York", judged) == pytest.approx(4 / 9)


def test_the_threshold_is_a_fifth() -> None:
    keywords = "k1 k2 k3 k4 k5"
    # recall 1/5 passes; F1 of [k1] and [k1 x]: P 1, R 1/2, F 2/3
    assert keyword_f1("k1", doc("k1 x", keywords=keywords)) == pytest.approx(2 / 3)
    assert keyword_f1("k1", doc("k1 x", keywords=keywords + " k6")) == 0  # 1/6


def test_in_chinese_the_threshold_is_two_fifths_and_the_answer_stands_in_for_keywords(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lveval.jieba, "cut", str.split)
    five = "一 二 三 四 五"

    def score_zh(answer: str, document: dict[str, Any]) -> float:
        return float(lveval.score_keyword_f1_zh(document, [answer])["score"])

    # 2 of 5: F1 of 2 and 5 words: P 1, R 2/5, F 4/7
    assert score_zh("一 二", doc(five)) == pytest.approx(4 / 7)
    assert score_zh("一", doc(five)) == 0
    # with keywords of its own: 1 of 2; F1: P 1, R 1/5
    assert score_zh("一", doc(five, keywords="一 六")) == pytest.approx(1 / 3)
    # 的 is idle: 1 of 3 is below
    assert score_zh("一 的", doc("一 的 二")) == 0


def test_rouge_in_chinese_leaves_idle_words_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lveval.jieba, "cut", str.split)
    # 的 goes: 北京 大学 against 北京: P 1/2, R 1, F 2/3
    found = lveval.score_content_rouge_l_zh(doc("的 北京 。"), ["北京 的 大学"])
    assert found["score"] == pytest.approx(2 / 3, abs=1e-7)

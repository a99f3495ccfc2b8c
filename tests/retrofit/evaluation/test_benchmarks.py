"""Published benchmarks from folders in their own format: prompts, truncation, chat template, what is refused."""

import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from patches.errors import RetrofitError
from retrofit.evaluation import chinese
from retrofit.evaluation.benchmarks import BENCHMARKS, departures, load_benchmark
from retrofit.evaluation.definitions import truncated

TEMPLATE = "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.fixture
def chat_tokenizer(byte_tokenizer, monkeypatch):
    monkeypatch.setattr(byte_tokenizer, "chat_template", TEMPLATE)
    return byte_tokenizer


def write_rows(path: Path, *rows: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def longbench_row(context: str = "CONTEXT", question: str = "QUESTION", *answers: str) -> dict:
    return {
        "input": question,
        "context": context,
        "answers": list(answers) or ["ANSWER"],
        "length": 3,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": "0f3a",
    }


def test_longbench_rows_become_samples(tmp_path, byte_tokenizer):
    write_rows(
        tmp_path / "data" / "hotpotqa.jsonl", longbench_row("THE {TEXT}", "WHO?", "Ann", "Annie"), longbench_row()
    )
    (task,) = load_benchmark("longbench", str(tmp_path), byte_tokenizer, tasks=["hotpotqa"])
    first, second = task.samples
    assert first.prompt.startswith("Answer the question based on the given passages.")
    assert first.prompt.endswith("\n\nQuestion: WHO?\nAnswer:")
    assert "\nTHE {TEXT}\n" in first.prompt
    assert (first.id, second.id) == ("0", "1")
    assert (first.answers, first.max_new_tokens, first.meta) == (("Ann", "Annie"), 32, {"language": "en"})
    assert "\n\nQuestion" in first.stop
    assert task.metric("It was Annie", first) == pytest.approx(1 / 2)  # P 1/3, R 1
    assert [one.id for one in task.samples] == ["0", "1"], "a second reading gives the same"


def test_the_published_archive_is_read_as_it_is(tmp_path, byte_tokenizer):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("__MACOSX/data/._qmsum.jsonl", b"\0")
        archive.writestr("data/qmsum.jsonl", json.dumps(longbench_row()) + "\n\n")
    (task,) = load_benchmark("longbench", str(tmp_path), byte_tokenizer, tasks=["qmsum"])
    (sample,) = task.samples
    assert "Transcript:\nCONTEXT\n" in sample.prompt
    assert sample.max_new_tokens == 500
    (own,) = load_benchmark("longbench-own", str(tmp_path), byte_tokenizer, tasks=["qmsum"])
    assert next(iter(own.samples)).max_new_tokens == 512
    assert next(iter(own.samples)).stop == ()


def test_triviaqa_has_no_chat_template_and_one_line(tmp_path, chat_tokenizer):
    for name in ("triviaqa", "hotpotqa"):
        write_rows(tmp_path / f"{name}.jsonl", longbench_row("EXAMPLES", "Q", "Paris"))
    trivia, hotpot = load_benchmark("longbench", str(tmp_path), chat_tokenizer, tasks=["triviaqa", "hotpotqa"])
    (plain,), (asked,) = trivia.samples, hotpot.samples
    assert plain.prompt.endswith("examples.\n\nEXAMPLES\n\nQ")
    assert asked.prompt.startswith("<u>Answer")
    assert asked.prompt.endswith("</u><a>")
    assert trivia.metric(" \nParis\nQuestion: next", plain) == 1
    assert hotpot.metric(" \nParis\nQuestion: next", asked) == pytest.approx(1 / 2)  # P 1/3, R 1
    (own,) = load_benchmark("longbench-own", str(tmp_path), chat_tokenizer, tasks=["triviaqa"])
    assert own.metric("\nParis\nnext", plain) == 1
    assert own.metric(" \nParis", plain) == 0, "LongBench itself passes over line ends only"


def test_lveval_reads_the_128k_set_with_its_keywords(tmp_path, byte_tokenizer):
    row = {"input": "Q", "context": "C", "answers": ["in York"], "answer_keywords": "York", "confusing_facts": "F"}
    write_rows(tmp_path / "loogle_SD_mixup" / "loogle_SD_mixup_128k.jsonl", row)
    write_rows(tmp_path / "loogle_SD_mixup" / "loogle_SD_mixup_16k.jsonl", {"wrong": "length"})
    (task,) = load_benchmark("lveval", str(tmp_path), byte_tokenizer, tasks=["loogle_SD_mixup"])
    (sample,) = task.samples
    assert sample.meta["keywords"] == "York"
    assert sample.max_new_tokens == 64
    assert task.metric("in Leeds", sample) == 0
    assert task.metric("York", sample) == pytest.approx(2 / 3)


def test_infinitebench_asks_in_english_as_ahn_did_and_in_chinese_by_itself(tmp_path, byte_tokenizer, monkeypatch):
    monkeypatch.setattr(chinese, "cut", str.split)
    monkeypatch.setitem(sys.modules, "jieba", SimpleNamespace(setLogLevel=lambda _: None))
    chinese.jieba.cache_clear()
    row = {"id": 7, "context": "书", "input": "谁？", "answer": ["北京 大学"], "options": []}
    write_rows(tmp_path / "longbook_qa_chn.jsonl", row)
    (ahn,) = load_benchmark("infinitebench", str(tmp_path), byte_tokenizer, tasks=["longbook_qa_chn"])
    (own,) = load_benchmark("infinitebench-own", str(tmp_path), byte_tokenizer, tasks=["longbook_qa_chn"])
    (sample,), (theirs,) = ahn.samples, own.samples
    assert sample.prompt == "Read the book below and answer a question.\n\n书\n\nQuestion: 谁？\n\nBe very concise."
    assert theirs.prompt == "请根据以下书籍回答我的问题。\n\n书\n\n问题：谁？\n请尽量简短地回答。"
    assert (sample.max_new_tokens, theirs.max_new_tokens) == (256, 40)
    assert ahn.metric("北京", sample) == pytest.approx(2 / 3)  # words: P 1, R 1/2
    assert own.metric("北京", theirs) == pytest.approx(2 / 3)  # characters: 2 of 2 and 4
    assert own.metric("京 北", theirs) == pytest.approx(2 / 3), "characters, whatever their order"
    chinese.jieba.cache_clear()


def test_truncation_keeps_the_end_or_both_ends(byte_tokenizer):
    text = "abcdefghij"  # a token each
    assert truncated(byte_tokenizer, text, 10, "tail", 4) == text
    assert truncated(byte_tokenizer, text, 8, "tail", 3) == "fghij"
    assert truncated(byte_tokenizer, text, 7, "middle", 3) == "abchij"


def test_long_prompts_are_cut_before_the_template(tmp_path, chat_tokenizer, monkeypatch):
    monkeypatch.setitem(BENCHMARKS, "longbench", replace(BENCHMARKS["longbench"], max_length=100))
    write_rows(tmp_path / "hotpotqa.jsonl", longbench_row("x" * 200, "WHO?"))
    (task,) = load_benchmark("longbench", str(tmp_path), chat_tokenizer, tasks=["hotpotqa"])
    (sample,) = task.samples
    assert len(sample.prompt) == 100 - 32 + len("<u></u><a>")
    assert sample.prompt.endswith("Question: WHO?\nAnswer:</u><a>")


@pytest.mark.parametrize(
    ("name", "tasks", "says"),
    [
        ("longbrench", None, r"did you mean 'longbench.*'\?"),
        ("longbench", ["hotpot"], r"did you mean 'hotpotqa'\?"),
        ("longbench", ["hotpotqa"], "holds no hotpotqa.jsonl"),
    ],
)
def test_what_is_not_there_is_said(tmp_path, byte_tokenizer, name, tasks, says):
    with pytest.raises(RetrofitError, match=says):
        list(load_benchmark(name, str(tmp_path), byte_tokenizer, tasks=tasks)[0].samples)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"input": "q"}\n', "row 0: 'context' is null, not a string"),
        (b"[1]\n", "line 1 is a list: every line must be one object"),
        (b'{"input"\n', "line 1 is not JSON"),
        (b"\xff\xfe\n", "line 1 is not UTF-8"),
        (b'{"input": "q", "context": "c", "answers": [1]}\n', "row 0: an answer is a number, not a string"),
    ],
)
def test_damaged_rows_are_one_sentence(tmp_path, byte_tokenizer, content, says):
    (tmp_path / "hotpotqa.jsonl").write_bytes(content)
    with pytest.raises(RetrofitError, match=says):
        list(load_benchmark("longbench", str(tmp_path), byte_tokenizer, tasks=["hotpotqa"])[0].samples)


def test_a_damaged_archive_is_one_sentence(tmp_path, byte_tokenizer):
    (tmp_path / "data.zip").write_bytes(b"PK")
    (task,) = load_benchmark("longbench", str(tmp_path), byte_tokenizer, tasks=["hotpotqa"])
    with pytest.raises(RetrofitError, match="not a whole zip file"):
        list(task.samples)


def test_without_a_network_a_folder_is_asked_for(byte_tokenizer, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RetrofitError, match="give a local folder"):
        list(load_benchmark("longbench", "nobody/nothing", byte_tokenizer, tasks=["hotpotqa"])[0].samples)
    with pytest.raises(RetrofitError, match="no folder 'nowhere'"):
        list(load_benchmark("longbench", "nowhere", byte_tokenizer, tasks=["hotpotqa"])[0].samples)
    with pytest.raises(RetrofitError, match="tokenizer"):
        load_benchmark("longbench", "nowhere")


def test_departures_from_the_published_settings():
    settings = {"window": 8064, "sinks": 128}
    assert departures("longbench", SimpleNamespace(memory=settings, max_position_embeddings=32768)) == []
    window, sinks, length = departures(
        "longbench", SimpleNamespace(memory={"window": 512, "sinks": 4}, max_position_embeddings=4096)
    )
    assert "window=8064, this model has 512" in window
    assert "sinks=128, this model has 4" in sinks
    assert "4096 positions" in length
    assert departures("lveval", SimpleNamespace(max_position_embeddings=10**6)) == [], "a base has no window"

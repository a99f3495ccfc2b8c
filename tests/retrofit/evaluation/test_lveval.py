"""LV-Eval's metric, F1 behind keyword recall, against cases computed by hand."""

import pytest

from retrofit.evaluation import chinese, lveval
from retrofit.evaluation.samples import Sample


def sample(*answers: str, keywords: str | None = None) -> Sample:
    return Sample("0", "p", answers, meta={"keywords": keywords} if keywords else {})


@pytest.fixture
def spaced(monkeypatch):
    monkeypatch.setattr(chinese, "cut", str.split)


def test_recall_counts_idle_words_below_and_not_above():
    # "battle of york": of is idle; battle found: 1 of 3
    assert lveval.keyword_recall(["battle", "of", "hastings"], ["battle", "of", "york"], lveval.IDLE_WORDS) == 1 / 3


def test_an_answer_without_the_keywords_is_worth_nothing():
    judged = sample("he was born in the city of York", keywords="York")
    # 5 of 6 words right, but not the one that counts
    assert lveval.keyword_f1("he was born in the city of Leeds", judged) == 0
    # born york of "born york" (2 words); reference: he was born in city of york (7): P 1, R 2/7, F 4/9
    assert lveval.keyword_f1("Born: York", judged) == pytest.approx(4 / 9)


def test_the_threshold_is_a_fifth():
    keywords = "k1 k2 k3 k4 k5"
    # recall 1/5 passes; F1 of [k1] and [k1 x]: P 1, R 1/2, F 2/3
    assert lveval.keyword_f1("k1", sample("k1 x", keywords=keywords)) == pytest.approx(2 / 3)
    assert lveval.keyword_f1("k1", sample("k1 x", keywords=keywords + " k6")) == 0  # 1/6


def test_without_keywords_it_is_plain_f1_of_the_first_answer():
    assert lveval.keyword_f1("york", sample("leeds", "york")) == 0
    assert lveval.keyword_f1("york", sample("york")) == 1
    assert lveval.keyword_f1("york", sample()) == 0


@pytest.mark.usefixtures("spaced")
def test_in_chinese_the_threshold_is_two_fifths_and_the_answer_stands_in_for_keywords():
    five = "一 二 三 四 五"
    # 2 of 5: F1 of 2 and 5 words: P 1, R 2/5, F 4/7
    assert lveval.keyword_f1_zh("一 二", sample(five)) == pytest.approx(4 / 7)
    assert lveval.keyword_f1_zh("一", sample(five)) == 0
    # with keywords of its own: 1 of 2; F1: P 1, R 1/5
    assert lveval.keyword_f1_zh("一", sample(five, keywords="一 六")) == pytest.approx(1 / 3)
    # 的 is idle: 1 of 3 is below
    assert lveval.keyword_f1_zh("一 的", sample("一 的 二")) == 0


@pytest.mark.usefixtures("spaced")
def test_rouge_in_chinese_leaves_idle_words_out():
    # 的 goes: 北京 大学 against 北京: P 1/2, R 1, F 2/3
    assert lveval.content_rouge_l_zh("北京 的 大学", "的 北京 。") == pytest.approx(2 / 3, abs=1e-7)


def test_every_set_is_asked_with_context_and_question():
    assert len(lveval.AHN.questions) == 11
    for question in lveval.AHN.questions.values():
        asked = question.prompt.format(context="CONTEXT", input="INPUT")
        assert "CONTEXT" in asked
        assert "INPUT" in asked
    assert lveval.AHN.questions["lic_mixup"].prompt.count("请现在基于") == 1

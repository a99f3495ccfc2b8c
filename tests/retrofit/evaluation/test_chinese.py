"""Chinese scores against cases computed by hand, on words given here; with jieba's own words where it is installed."""

import sys

import pytest

from patches.errors import RetrofitError
from retrofit.evaluation import chinese


@pytest.fixture
def spaced(monkeypatch):
    """Words are what blanks part, as jieba gives them back: the blanks are tokens, too."""
    monkeypatch.setattr(chinese, "cut", lambda text: [part for word in text.split(" ") for part in (word, " ")][:-1])


def test_normalise_drops_marks_of_both_scripts_and_blanks():
    assert chinese.normalise(" 北京，ABC 大学！（1.5）") == "北京abc大学15"


@pytest.mark.usefixtures("spaced")
def test_word_f1_is_on_normalised_words():
    assert chinese.words("我 爱 北京 。 QA") == ["我", "爱", "北京", "qa"]
    # common: 北京 大学, of 3 and 2 words: P 2/3, R 1, F 4/5
    assert chinese.word_f1("在 北京 大学", "北京 大学。") == pytest.approx(4 / 5)


@pytest.mark.usefixtures("spaced")
def test_word_rouge_keeps_punctuation():
    # LCS: 北京 。 of 3 and 2 different words: P 2/3, R 1, F 4/5
    assert chinese.word_rouge_l("北京 大学 。", "北京 。") == pytest.approx(4 / 5, abs=1e-7)


def test_character_f1_is_on_characters():
    # 北京大学 and 北大: 2 common of 4 and 2: F 2 * 2 / 6
    assert chinese.character_f1("北京大学。", "北大") == pytest.approx(2 / 3)


def test_jieba_finds_words():
    pytest.importorskip("jieba", reason="jieba is not installed")
    assert chinese.words("我来到北京清华大学。") == ["我", "来到", "北京", "清华大学"]


def test_missing_jieba_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    chinese.jieba.cache_clear()
    with pytest.raises(RetrofitError, match="pip install jieba"):
        chinese.cut("北京")

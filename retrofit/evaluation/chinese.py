"""Scores of Chinese answers: as the English ones, on words that jieba finds, or on characters."""

import string
from functools import cache
from typing import Any

from patches.errors import RetrofitError

from .metrics import best, f1, rouge_l
from .samples import Metric

# the benchmarks' list: full-width and Chinese punctuation besides the ASCII marks
CHINESE_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃"
    "》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
PUNCTUATION = str.maketrans("", "", string.punctuation + CHINESE_MARKS)


@cache
def jieba() -> Any:
    """The package that finds words in Chinese text.

    Raises:
        RetrofitError: it is not installed.
    """
    try:
        import jieba as found
    except ImportError as error:
        raise RetrofitError(
            "Chinese answers are scored by words that jieba finds, and it is not installed: pip install jieba"
        ) from error
    found.setLogLevel("WARNING")
    return found


def cut(text: str) -> list[str]:
    """The words of a Chinese text, punctuation and blanks among them."""
    return list(jieba().cut(text, cut_all=False))


def normalise(text: str) -> str:
    """Lower case, without punctuation and blanks."""
    return "".join(text.lower().translate(PUNCTUATION).split())


def words(text: str) -> list[str]:
    """The words of a Chinese text, each normalised, empty ones left out."""
    return [word for word in map(normalise, cut(text)) if word]


def word_f1(prediction: str, reference: str) -> float:
    """F1 of the words of two texts (LongBench, LV-Eval)."""
    return f1(words(prediction), words(reference))


def character_f1(prediction: str, reference: str) -> float:
    """F1 of the characters of two texts (InfiniteBench)."""
    return f1(normalise(prediction), normalise(reference))


def word_rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L on the words of two texts, punctuation included (LongBench)."""
    return rouge_l(" ".join(cut(prediction)), " ".join(cut(reference)))


character_f1_zh: Metric = best(character_f1)
rouge_zh: Metric = best(word_rouge_l)

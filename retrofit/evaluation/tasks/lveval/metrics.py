"""LV-Eval's metrics (arXiv 2402.05136): F1 behind a threshold of keyword recall; only the first answer counts."""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import jieba
from lm_eval.tasks.longbench.metrics import f1_score, normalize_answer, normalize_zh_answer, rouge_score

Document = dict[str, Any]
Scores = dict[str, float]

# words that say nothing about an answer's being right
IDLE_ENGLISH = """
and to of in her was with for it from is that his he by she they or at because be on are their what as had were about
being this who but have has when which does
"""
IDLE_CHINESE = """
的 和 是 等 在 年 可以 为 与 ‰ 了 或 一种 月 c 至 日 有 进行 于 不 中 × 根据 小 由 亩 也 要 指 法 会 元 主要 以及
通过 首先 对 然后 号 以 所 后 丁 包括 无 将 用 能 形 方面 因素 位于 而 从 到 一定 用于 但 使用 让 具有 并 亿元 万元
上 类 基于 才 来 地 片 其他 个 或者 变得 时 给 你 使 条 受 已经 带 度
"""
IDLE, IDLE_ZH = frozenset(IDLE_ENGLISH.split()), frozenset(IDLE_CHINESE.split())
RECALL, RECALL_ZH = 0.2, 0.4  # of the keywords, below which an answer is worth nothing


def split_words(text: str) -> list[str]:
    """English words in lower case, without punctuation and articles."""
    return str(normalize_answer(text)).split()


def split_words_zh(text: str) -> list[str]:
    """The words that jieba finds in a Chinese text, each normalised, empty ones left out."""
    return [word for word in map(normalize_zh_answer, jieba.cut(text)) if word]


def recall_keywords(prediction: list[str], keywords: list[str], idle: Collection[str]) -> float:
    """Share of the keywords that the prediction holds, as bags of words; idle ones are never found.

    They stay in the denominator, as in LV-Eval's code: a keyword "battle of York" cannot score more than 2/3.
    """
    found = Counter(prediction) & Counter(keywords)
    return sum(count for word, count in found.items() if word not in idle) / len(keywords)


def score_keyword_f1(doc: Document, results: list[str]) -> Scores:
    """Word F1; 0 if the document has keywords and fewer than a fifth of them are in the answer.

    The publication also leaves idle words out of the F1; its code, which made the published figures, does not.
    """
    return _score_behind(results[0], doc, doc.get("answer_keywords"), split_words, IDLE, RECALL)


def score_keyword_f1_zh(doc: Document, results: list[str]) -> Scores:
    """As :func:`score_keyword_f1` in Chinese, from two fifths on; without keywords the answer's own words count."""
    keywords = doc.get("answer_keywords") or doc["answers"][0]
    return _score_behind(results[0], doc, keywords, split_words_zh, IDLE_ZH, RECALL_ZH)


def score_word_f1(doc: Document, results: list[str]) -> Scores:
    """F1 of the words."""
    return _score_behind(results[0], doc, None, split_words, IDLE, RECALL)


def score_word_f1_zh(doc: Document, results: list[str]) -> Scores:
    """F1 of the Chinese words."""
    return _score_behind(results[0], doc, None, split_words_zh, IDLE_ZH, RECALL_ZH)


def score_content_rouge_l_zh(doc: Document, results: list[str]) -> Scores:
    """ROUGE-L of the normalised Chinese words, idle ones left out."""
    return {"score": rouge_score(_join_content(results[0]), _join_content(doc["answers"][0]))}


def _score_behind(
    prediction: str,
    doc: Document,
    keywords: str | None,
    split: Callable[[str], list[str]],
    idle: Collection[str],
    threshold: float,
) -> Scores:
    predicted, wanted = split(prediction), split(keywords or "")
    if wanted and recall_keywords(predicted, wanted, idle) < threshold:
        return {"score": 0.0}
    return {"score": float(f1_score(predicted, split(doc["answers"][0])))}


def _join_content(text: str) -> str:
    # cut twice, as there: a word found in its sentence may fall apart by itself
    found = map(normalize_zh_answer, jieba.cut(" ".join(jieba.cut(text))))
    return " ".join(word for word in found if word not in IDLE_ZH)

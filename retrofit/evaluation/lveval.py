"""LV-Eval (arXiv 2402.05136): eleven sets at 128k words, and its metric, F1 behind a threshold of keyword recall.

Only the first reference counts, as in its repository. AHN (arXiv 2510.07318) changed neither prompts nor metrics.
"""

from collections import Counter
from collections.abc import Callable, Collection

from . import chinese
from .definitions import Benchmark, Question
from .metrics import f1, first, rouge_l, word_f1, words
from .samples import Metric, Sample

# words that say nothing about an answer's being right
IDLE_EN = """
and to of in her was with for it from is that his he by she they or at because be on are their what as had were about
being this who but have has when which does
"""
IDLE_ZH = """
的 和 是 等 在 年 可以 为 与 ‰ 了 或 一种 月 c 至 日 有 进行 于 不 中 × 根据 小 由 亩 也 要 指 法 会 元 主要 以及
通过 首先 对 然后 号 以 所 后 丁 包括 无 将 用 能 形 方面 因素 位于 而 从 到 一定 用于 但 使用 让 具有 并 亿元 万元
上 类 基于 才 来 地 片 其他 个 或者 变得 时 给 你 使 条 受 已经 带 度
"""
IDLE_WORDS, IDLE_WORDS_ZH = frozenset(IDLE_EN.split()), frozenset(IDLE_ZH.split())
RECALL, RECALL_ZH = 0.2, 0.4  # of the keywords, below which an answer is worth nothing


def keyword_recall(prediction: list[str], keywords: list[str], idle: Collection[str]) -> float:
    """Share of the keywords that the prediction holds, as bags of words; idle ones are never found.

    They stay in the denominator, as in LV-Eval's code: a keyword "battle of York" cannot score more than 2/3.
    """
    found = Counter(prediction) & Counter(keywords)
    return sum(count for word, count in found.items() if word not in idle) / len(keywords)


def keyword_f1(prediction: str, sample: Sample) -> float:
    """Word F1 against the first answer; 0 if the sample has keywords and fewer than a fifth of them are in it.

    The publication also leaves idle words out of the F1; its code, which made the published figures, does not.
    """
    return _behind_keywords(prediction, sample, sample.meta.get("keywords"), words, IDLE_WORDS, RECALL)


def keyword_f1_zh(prediction: str, sample: Sample) -> float:
    """As :func:`keyword_f1` in Chinese, from two fifths on; a sample without keywords has its first answer's words."""
    keywords = sample.meta.get("keywords") or (sample.answers[0] if sample.answers else None)
    return _behind_keywords(prediction, sample, keywords, chinese.words, IDLE_WORDS_ZH, RECALL_ZH)


def _behind_keywords(
    prediction: str,
    sample: Sample,
    keywords: str | None,
    split: Callable[[str], list[str]],
    idle: Collection[str],
    threshold: float,
) -> float:
    if not sample.answers:
        return 0.0
    predicted, wanted = split(prediction), split(keywords or "")
    if wanted and keyword_recall(predicted, wanted, idle) < threshold:
        return 0.0
    return f1(predicted, split(sample.answers[0]))


def content_rouge_l_zh(prediction: str, reference: str) -> float:
    """ROUGE-L of the normalised words of two Chinese texts, idle ones left out."""
    return rouge_l(_content(prediction), _content(reference))


def _content(text: str) -> str:
    # cut twice, as there: a word found in its sentence may fall apart by itself
    found = map(chinese.normalise, chinese.cut(" ".join(chinese.cut(text))))
    return " ".join(word for word in found if word not in IDLE_WORDS_ZH)


ONE_PASSAGE = (
    "Please answer the following question based on the given passages. Questions and answers are only relevant to one "
    "passage. Only give me the answer and do not output any other explanation and evidence.\n\n"
    "Article: {context}\n\n"
    "Please answer the following question based on the above passages. Questions and answers are only relevant to one "
    "passage. Only give me the answer and do not output any other explanation and evidence.\n\n"
    "Question: {input}\nAnswer:"
)
SOME_PASSAGES = (
    "Answer the question based on the given passages. Questions and answers are only relevant to some passages. Only "
    "give me the answer and do not output any other explanation and evidence.\n\n"
    "Article: {context}\n\n"
    "Please answer the following question based on the above passages. Questions and answers are only relevant to some "
    "passages. Only give me the answer and do not output any other explanation and evidence.\n\n"
    "Question: {input}\nAnswer:"
)
ARTICLE = (
    "Please answer the following questions based on the given article.\n\nArticle: {context}\n\n"
    "Please answer the following questions based on the above article.\n\nQuestion: {input}\nAnswer:"
)
ONE_ARTICLE_ZH = (
    "请阅读以下文章并用中文回答问题，问题和答案只与其中一篇文章有关。只需要直接给出问题的答案，不要输出其他任何解释和证据。\n\n"
    "文章：{context}\n\n"
    "请基于上面的文章回答下面的问题，问题和答案只与其中一篇文章有关。只需要直接给出问题的答案，不要输出其他任何解释和证据。\n\n"
    "问题：{input}\n回答："
)
ARTICLE_ZH = (
    "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n现在请基于上述文章回答下面的问题。\n\n问题：{input}\n回答："
)
MIXED_ZH = (
    "请根据下面给定的文章回答问题，问题和答案只与其中一篇文章有关。\n\n文章：{context}\n\n"
    "现在请基于上述文章回答下面的问题，问题和答案只与其中一篇文章有关。\n\n问题：{input}\n回答："
)


def _question(prompt: str, metric: Metric, language: str = "en", max_new_tokens: int = 64) -> Question:
    return Question(prompt, max_new_tokens, metric, language)


AHN = Benchmark(
    name="lveval",
    questions={
        "hotpotwikiqa_mixup": _question(SOME_PASSAGES, keyword_f1),
        "loogle_SD_mixup": _question(ONE_PASSAGE, keyword_f1),
        "loogle_CR_mixup": _question(ONE_PASSAGE, keyword_f1),
        "loogle_MIR_mixup": _question(ONE_PASSAGE, keyword_f1),
        "multifieldqa_en_mixup": _question(ONE_PASSAGE, keyword_f1),
        "multifieldqa_zh_mixup": _question(ONE_ARTICLE_ZH, keyword_f1_zh, "zh"),
        "factrecall_en": _question(ARTICLE, first(word_f1), max_new_tokens=16),
        "factrecall_zh": _question(ARTICLE_ZH, first(chinese.word_f1), "zh", max_new_tokens=16),
        "cmrc_mixup": _question(MIXED_ZH, keyword_f1_zh, "zh"),
        # the same but for the order of two words
        "lic_mixup": _question(MIXED_ZH.replace("现在请基于", "请现在基于"), keyword_f1_zh, "zh"),
        "dureader_mixup": _question(MIXED_ZH, first(content_rouge_l_zh), "zh"),
    },
    repo="Infinigence/LVEval",
    file="{task}_128k.jsonl",
    archive="{task}.zip",
    window=32640,
    sinks=128,
    max_length=256000,
    truncate="middle",
)

"""What AHN's evaluation (arXiv 2510.07318) scores otherwise than the benchmarks' own code."""

from typing import Any

from lm_eval.tasks.longbench.metrics import get_qa_f1_with_score, get_rouge_score, get_rouge_zh_score

Document = dict[str, Any]
Scores = dict[str, float]


def score_first_line(doc: Document, results: list[str]) -> Scores:
    """Word F1 of the answer's first line: a prompt of examples is gone on with (triviaqa)."""
    return dict(get_qa_f1_with_score(doc, [results[0].lstrip().split("\n")[0]]))


def score_rouge(doc: Document, results: list[str]) -> Scores:
    """ROUGE-L against the best of InfiniteBench's answers."""
    return {"score": get_rouge_score({"answers": doc["answer"]}, results)["rouge_score"]}


def score_rouge_zh(doc: Document, results: list[str]) -> Scores:
    """As :func:`score_rouge`, on Chinese words."""
    return {"score": get_rouge_zh_score({"answers": doc["answer"]}, results)["rouge_zh_score"]}

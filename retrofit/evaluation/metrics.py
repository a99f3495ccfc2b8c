"""How a predicted answer is scored: word F1, ROUGE-L and matches, each as the benchmarks that use it compute it."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from .samples import Metric, Sample

# score (0 to 1) of a prediction against one reference
Score = Callable[[str, str], float]

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
CONTROL = re.compile(r"[\x00-\x1f]")


def best(score: Score) -> Metric:
    """The highest score over all accepted answers; 0 if there are none."""

    def metric(prediction: str, sample: Sample) -> float:
        return max((score(prediction, answer) for answer in sample.answers), default=0.0)

    return metric


def first(score: Score) -> Metric:
    """The score against the first accepted answer only; 0 if there is none."""

    def metric(prediction: str, sample: Sample) -> float:
        return score(prediction, sample.answers[0]) if sample.answers else 0.0

    return metric


def words(text: str) -> list[str]:
    """Words in lower case, without ASCII punctuation and the articles (SQuAD's normalisation).

    Punctuation goes first, so ``"a.m."`` is the word ``"am"``, not an article.
    """
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """F1 of two bags of tokens: a token counts as often as it is in both."""
    same = (Counter(prediction) & Counter(reference)).total()
    return 2 * same / (len(prediction) + len(reference)) if same else 0.0


def word_f1(prediction: str, reference: str) -> float:
    """F1 of the words of two texts."""
    return f1(words(prediction), words(reference))


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L, F measure, as LongBench has it: that of the package ``rouge`` 1.0, which differs from the paper's.

    Sentences end at a full stop. Of every pair of sentences a longest common subsequence is taken; all these words
    together, each once, are the overlap, set against the number of *different* words on either side.
    """
    predicted, expected = _sentences(prediction), _sentences(reference)
    if not predicted or not expected:
        return 0.0
    overlap: set[str] = set()
    for sentence in expected:
        for other in predicted:
            overlap.update(_common_subsequence(sentence, other))
    recall = len(overlap) / len({word for sentence in expected for word in sentence})
    precision = len(overlap) / len({word for sentence in predicted for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    # a sentence of blanks is one empty word there, not none
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """One longest common subsequence. Of several, the one that gives up words of ``b`` first, counted from the end."""
    length = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, left in enumerate(a, start=1):
        for j, right in enumerate(b, start=1):
            length[i][j] = length[i - 1][j - 1] + 1 if left == right else max(length[i - 1][j], length[i][j - 1])
    found = []
    i, j = len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            found.append(a[i - 1])
            i, j = i - 1, j - 1
        elif length[i - 1][j] > length[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def string_match_all(prediction: str, sample: Sample) -> float:
    """Share of the answers that the prediction contains, upper and lower case alike (RULER, all tasks but QA)."""
    found = [answer.lower() in _printable(prediction) for answer in sample.answers]
    return sum(found) / len(found) if found else 0.0


def string_match_part(prediction: str, sample: Sample) -> float:
    """Whether the prediction contains any of the answers, upper and lower case alike (RULER's QA tasks)."""
    return float(any(answer.lower() in _printable(prediction) for answer in sample.answers))


def _printable(prediction: str) -> str:
    return CONTROL.sub("\n", prediction.strip()).strip().lower()


# LongBench's English tasks
qa_f1: Metric = best(word_f1)
rouge: Metric = best(rouge_l)

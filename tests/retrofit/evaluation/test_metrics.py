"""Scores against cases computed by hand; the computation stands beside each."""

import random

import pytest

from retrofit.evaluation.metrics import best, f1, first, qa_f1, rouge_l, string_match_all, string_match_part, words
from retrofit.evaluation.samples import Sample


def sample(*answers: str) -> Sample:
    return Sample("0", "prompt", answers)


def test_words_are_lower_case_without_punctuation_and_articles():
    assert words("The  U.S. Army's a-team, an\nelite!") == ["us", "armys", "ateam", "elite"]
    # punctuation goes before articles: "a.m." is no article
    assert words("at a.m. theatre") == ["at", "am", "theatre"]


def test_f1_counts_a_repeated_token_as_often_as_both_have_it():
    # common: x twice (the reference has two): 2; precision 2/4, recall 2/3; F1 = 2 * 1/2 * 2/3 / (7/6) = 4/7
    assert f1(["x", "x", "x", "y"], ["x", "x", "z"]) == pytest.approx(4 / 7)
    assert f1(["x"], ["z"]) == 0
    assert f1([], []) == 0


def test_qa_f1_takes_the_best_reference():
    # "eiffel tower in paris" and "eiffel tower": precision 2/4, recall 2/2, F1 2/3; "paris": 1/4, 1, 2/5
    assert qa_f1("The Eiffel Tower in Paris.", sample("Paris", "the Eiffel tower")) == pytest.approx(2 / 3)
    assert qa_f1("", sample("Paris")) == 0
    assert qa_f1("Paris", sample()) == 0


def test_first_looks_at_the_first_reference_only():
    score = {"good": 1.0, "bad": 0.25}
    judged = sample("bad", "good")
    assert first(lambda _, answer: score[answer])("", judged) == 0.25
    assert best(lambda _, answer: score[answer])("", judged) == 1.0
    assert first(lambda _, answer: score[answer])("", sample()) == 0


def test_rouge_l_of_one_sentence():
    # LCS of "the cat sat on the mat" and "the cat lay on a mat": the cat on mat, 4 different words
    # different words: 5 of the prediction (the twice), 6 of the reference; P 4/5, R 4/6, F = 2 * 8/15 / (22/15) = 8/11
    assert rouge_l("the cat sat on the mat", "the cat lay on a mat") == pytest.approx(8 / 11, abs=1e-7)


def test_rouge_l_joins_the_subsequences_of_all_sentence_pairs():
    # reference w1 w2 w3 w4 w5; with "w1 w2 w6 w7 w8" it shares w1 w2, with "w1 w3 w8 w9 w5" w1 w3 w5: 4 words together
    # different words: 8 predicted (w1 w2 w6 w7 w8 w3 w9 w5), 5 expected; P 4/8, R 4/5, F = 2 * 0.4 / 1.3 = 8/13
    assert rouge_l("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5") == pytest.approx(8 / 13, abs=1e-7)


def test_rouge_l_of_two_equally_long_subsequences_takes_the_packages():
    # of "x y" and "y x" both x and y are one; the package takes y, so with the sentence "y" the overlap is y alone
    # different words: 2 and 2; P 1/2, R 1/2
    assert rouge_l("y x. y", "x y") == pytest.approx(1 / 2, abs=1e-7)


def test_rouge_l_minds_case_and_punctuation_other_than_the_full_stop():
    assert rouge_l("Cat,", "cat") == 0
    assert rouge_l("cat.", "cat") == pytest.approx(1)
    assert rouge_l("", "cat") == rouge_l("...", "cat") == rouge_l("cat", "") == 0


def test_rouge_l_is_that_of_the_package_the_benchmarks_call():
    package = pytest.importorskip("rouge", reason="the package rouge is not installed").Rouge(metrics=["rouge-l"])
    draw = random.Random(0)
    for _ in range(300):
        texts = [" ".join(draw.choices(["a", "b", "c", "d.", ".", "e", " "], k=draw.randint(1, 14))) for _ in range(2)]
        try:
            theirs = package.get_scores(*texts, avg=True)["rouge-l"]["f"]
        except ValueError:  # no sentence: the benchmarks take that for 0
            theirs = 0.0
        assert rouge_l(*texts) == pytest.approx(theirs, abs=1e-9), texts


def test_string_matches_are_by_substring_whatever_the_case():
    asked = sample("Alpha", "beta", "gamma")
    assert string_match_all("ALPHA and\x07 Beta", asked) == pytest.approx(2 / 3)
    assert string_match_part("xx gammaxx", asked) == 1
    assert string_match_part("delta", asked) == 0
    assert string_match_all("anything", sample()) == 0
    # what is not printable parts the words, as in RULER
    assert string_match_all("al\x01pha", sample("alpha")) == 0

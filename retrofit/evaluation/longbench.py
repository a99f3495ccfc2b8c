"""LongBench (arXiv 2308.14508): the six tasks of more than 8k words on average, as AHN (arXiv 2510.07318) ran them.

A prompt is part of a benchmark's definition: these are the ones of its repository, slips of the pen included.
"""

from dataclasses import replace

from .chinese import rouge_zh
from .definitions import Benchmark, Question
from .metrics import qa_f1, rouge
from .samples import Metric, Sample

PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
STORY = (
    "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
    "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
    "Story: {context}\n\n"
    "Now, answer the question based on the story asconcisely as you can, using a single phrase if possible. Do not "
    "provide any explanation.\n\nQuestion: {input}\n\nAnswer:"
)
MEETING = (
    "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one or "
    "more sentences.\n\nTranscript:\n{context}\n\n"
    "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
    "Query: {input}\nAnswer:"
)
TRIVIA = (
    "Answer the question based on the given passage. Only give me the answer and do not output any other words. The "
    "following are some examples.\n\n{context}\n\n{input}"
)
DUREADER = (
    "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答："
)

# where AHN's evaluation cuts an answer before it scores it; LongBench's own does not
AHN_STOP = (".assistant", "\n\nQuestion", "</s>", "(Document", "\n\nAnswer", "(Passage")


def first_line(metric: Metric, blank: str | None) -> Metric:
    """``metric`` of the prediction's first line, after characters of ``blank`` (None: all white space) at its start."""

    def of_first_line(prediction: str, sample: Sample) -> float:
        return metric(prediction.lstrip(blank).split("\n")[0], sample)

    return of_first_line


AHN = Benchmark(
    name="longbench",
    questions={
        "dureader": Question(DUREADER, 128, rouge_zh, "zh", stop=(*AHN_STOP, "问题：")),
        "hotpotqa": Question(PASSAGES, 32, qa_f1, stop=AHN_STOP),
        "musique": Question(PASSAGES, 32, qa_f1, stop=AHN_STOP),
        "narrativeqa": Question(STORY, 128, qa_f1, stop=AHN_STOP),
        "qmsum": Question(MEETING, 500, rouge, stop=AHN_STOP),
        # examples to go on from: no chat template, and what follows the first line is the model's next example
        "triviaqa": Question(TRIVIA, 32, first_line(qa_f1, None), chat=False, stop=AHN_STOP),
    },
    repo="zai-org/LongBench",
    file="{task}.jsonl",
    archive="data.zip",
    window=8064,
    sinks=128,
    max_length=32000,
    truncate="tail",
)


def _own(questions: dict[str, Question]) -> dict[str, Question]:
    """The questions as LongBench's own scripts ask and score them."""
    own = {task: replace(question, stop=()) for task, question in questions.items()}
    own["qmsum"] = replace(own["qmsum"], max_new_tokens=512)
    own["triviaqa"] = replace(own["triviaqa"], metric=first_line(qa_f1, "\n"))
    return own


OWN = replace(
    AHN,
    name="longbench-own",
    questions=_own(AHN.questions),
    truncate="middle",
)

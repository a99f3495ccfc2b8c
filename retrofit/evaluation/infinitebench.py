"""InfiniteBench (arXiv 2402.13718): questions on whole books, En.QA and Zh.QA, as AHN (arXiv 2510.07318) ran them."""

from dataclasses import replace

from .chinese import character_f1_zh, rouge_zh
from .definitions import Benchmark, Question
from .longbench import AHN_STOP
from .metrics import qa_f1, rouge

BOOK = "Read the book below and answer a question.\n\n{context}\n\nQuestion: {input}\n\nBe very concise."
BOOK_ZH = "请根据以下书籍回答我的问题。\n\n{context}\n\n问题：{input}\n请尽量简短地回答。"

AHN = Benchmark(
    name="infinitebench",
    questions={
        "longbook_qa_eng": Question(BOOK, 256, rouge, stop=AHN_STOP),
        # AHN's script asks the Chinese questions in English, too
        "longbook_qa_chn": Question(BOOK, 256, rouge_zh, "zh", stop=AHN_STOP),
    },
    repo="xinrongzhang2022/InfiniteBench",
    file="{task}.jsonl",
    archive=None,
    window=32640,
    sinks=128,
    max_length=128000,
    truncate="tail",
)

OWN = replace(
    AHN,
    name="infinitebench-own",
    questions={
        "longbook_qa_eng": Question(BOOK, 40, qa_f1),
        "longbook_qa_chn": Question(BOOK_ZH, 40, character_f1_zh, "zh"),
    },
    max_length=127000,  # its scripts leave 1,000 tokens of 128,000 to the chat template
    truncate="middle",
)

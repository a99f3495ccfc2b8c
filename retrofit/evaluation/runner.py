"""Tasks put to every row: prompts read in chunks, answers judged, every result on disk at once."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from retrofit.evaluation.contenders import Contender, ready
from retrofit.evaluation.feeding import CHUNK, answer
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
        store: where results go: ``kind="answer"``, task, sample, row, prediction, score and the sample's ``meta``.
        chunk: tokens per forward pass while a prompt is read.
        on_answer: called with the task's name after each answer.
    """
    with ready(rows):
        for task in tasks:
            for sample in task.samples:
                ids = None
                for row in rows:
                    key = f"{task.name}/{sample.id}/{row.name}"
                    if key not in store:
                        if ids is None:
                            ids = read_prompt(tokenizer, sample).to(row.model.device)
                        said = answer(
                            row.model,
                            tokenizer,
                            ids,
                            max_new_tokens=sample.max_new_tokens,
                            stop=sample.stop,
                            chunk=chunk,
                        )
                        store.add(
                            key,
                            kind="answer",
                            task=task.name,
                            row=row.name,
                            score=task.metric(said, sample),
                            prediction=said,
                            tokens=ids.shape[1],
                            meta=sample.meta,
                        )
                    if on_answer is not None:
                        on_answer(task.name)


def read_prompt(tokenizer: Any, sample: Sample) -> Any:
    """(1, T) ids of a sample's prompt."""
    return tokenizer(sample.prompt, return_tensors="pt", verbose=False)["input_ids"]


def means(
    store: ResultStore, rows: Sequence[str], tasks: Sequence[str], by: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Mean scores of ``tasks``, per value of the ``meta`` entries named in ``by``: one dictionary each, a key per row.

    Groups that not every row has finished are left out.
    """
    groups: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for line in store.results(kind="answer"):
        if line["task"] not in tasks:
            continue
        group = (line["task"], *(line["meta"].get(name) for name in by))
        groups.setdefault(group, {}).setdefault(line["row"], []).append(line["score"])
    found = []
    for group, scores in groups.items():
        counts = {len(scores.get(row, [])) for row in rows}
        if len(counts) == 1 and counts != {0}:
            named = dict(zip(("task", *by), group, strict=True))
            found.append({**named, "samples": counts.pop(), **{row: fmean(scores[row]) for row in rows}})
    return found

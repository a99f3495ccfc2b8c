"""The published benchmarks by name, and what a model must be to be compared with their published figures."""

from collections.abc import Iterable
from typing import Any

from patches.errors import RetrofitError, one_of

from . import infinitebench, longbench, lveval
from .chinese import jieba
from .definitions import Benchmark, Rows
from .samples import Task

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (longbench.AHN, longbench.OWN, lveval.AHN, infinitebench.AHN, infinitebench.OWN)
}


def load_benchmark(
    name: str,
    source: str | None = None,
    tokenizer: Any = None,
    *,
    tasks: Iterable[str] | None = None,
    limit: int | None = None,
) -> list[Task]:
    """The tasks of a published benchmark, ready to be asked; rows are read while they are.

    Args:
        name: one of :data:`BENCHMARKS`. ``longbench``, ``lveval`` and ``infinitebench`` are as AHN ran them; with
            ``-own`` as their authors do.
        source: a local folder that holds the benchmark's files (JSONL, or the zip files as published) at any depth,
            or a dataset id of the Hub; None means the benchmark's own repository there.
        tokenizer: of the model that will be asked: it cuts the prompts and brings the chat template.
        tasks: some of the benchmark's tasks, in this order; None means all.
        limit: so many samples of each at most.

    Raises:
        RetrofitError: an unknown benchmark or task, no tokenizer, or Chinese tasks without ``jieba``. While the samples
            are read: files that are missing or damaged.
    """
    benchmark = find_benchmark(name)
    chosen = list(benchmark.questions) if tasks is None else list(tasks)
    for task in chosen:
        one_of(f"task of {name}", task, *benchmark.questions)
    if tokenizer is None:
        raise RetrofitError(f"{name} needs the model's tokenizer: its prompts are cut to {benchmark.max_length} tokens")
    if any(benchmark.questions[task].language == "zh" for task in chosen):
        jieba()  # better now than when the first answer is scored
    rows = {task: Rows(benchmark, task, source or benchmark.repo, tokenizer, limit) for task in chosen}
    return [Task(task, rows[task], benchmark.questions[task].metric) for task in chosen]


def find_benchmark(name: str) -> Benchmark:
    """The benchmark of that name.

    Raises:
        RetrofitError: there is none.
    """
    one_of("benchmark", name, *BENCHMARKS)
    return BENCHMARKS[name]


def departures(name: str, config: Any) -> list[str]:
    """What keeps a model's scores from being compared with the published ones: a sentence each, none if nothing does.

    Args:
        name: one of :data:`BENCHMARKS`.
        config: the configuration of a base, or of a patched model.
    """
    benchmark = find_benchmark(name)
    memory = getattr(config, "memory", None) or {}
    found = [
        f"{name}'s published figures were taken with {key}={getattr(benchmark, key)}, this model has {memory[key]}"
        for key in ("window", "sinks")
        if key in memory and memory[key] != getattr(benchmark, key)
    ]
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < benchmark.max_length:
        found.append(
            f"{name}'s prompts have up to {benchmark.max_length} tokens, this model was made for {longest} positions"
        )
    return found

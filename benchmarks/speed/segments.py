"""A training step on rows of growing length, a segment at a time: its peak memory and time.

What `retrofit distill --dry-run` predicts stands beside the memory.
"""

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import retrofit
from benchmarks.speed import cases
from benchmarks.speed.step import make_trainer
from distill.objective import Objective
from distill.preflight import find_trainable
from distill.simulate import step_bytes
from patches.config import MemoryConfig
from retrofit.bench.machine import peak_bytes
from retrofit.bench.models import RandomModels, prompt
from retrofit.bench.timing import interleaved, mib, spread

WHOLE, SEGMENTS = "whole row", "segments"
COLUMNS = {
    "length": ("T", ",d"),
    "name": ("", ""),
    "seconds": ("seconds", ".1f"),
    "peak_mib": ("peak extra MiB", ",.0f"),
    "predicted_mib": ("predicted", ",.0f"),
}


class Case(cases.Segments, RandomModels):
    """A random Qwen2 with one memory, and rows of one length after the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        find_trainable(self.memory)

    def lengths(self) -> Iterator[int]:
        """T, 2 T, ... up to the longest."""
        length = self.length
        while length <= (self.longest or self.length):
            yield length
            length *= 2


def run(case: Case, repeats: int = 1) -> list[dict[str, Any]]:
    """One row per length and form: median seconds, peak memory beyond the weights, and what is predicted of it."""
    rows = []
    for length in case.lengths():
        for name, segment in {WHOLE: None, SEGMENTS: case.segment}.items():
            if segment is None and not case.whole:
                continue
            seconds = interleaved({name: prepare(case, length, segment)}, repeats, warm_up=False)[name]
            peak = mib(peak_bytes(case.place(), prepare, case, length, segment))
            predicted = mib(predict(case, length, segment))
            rows.append(
                {"length": length, "name": name, "peak_mib": peak, "predicted_mib": predicted}
                | spread("seconds", seconds)
            )
    return rows


def prepare(case: Case, length: int, segment: int | None) -> Callable[[], None]:
    """A model with its trainer; the function takes forward and backward pass of one row."""
    model = retrofit.patch(case.base(length), case.memory, case.window, case.sinks)
    for _, parameter in model.memory_parameters():
        parameter.grad = parameter.new_zeros(parameter.shape)  # counted with the optimizer
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, case, folder, segment=segment)
    ids = prompt(model, length)

    def step() -> None:
        trainer.training_step(model, {"input_ids": ids, "labels": ids})

    return step


def predict(case: Case, length: int, segment: int | None) -> int:
    """Bytes beyond the weights, as `--dry-run` computes them."""
    memory = MemoryConfig(case.memory, case.window, case.sinks)
    config = case.base(length).config
    return step_bytes(config, memory, 1, length, case.torch_dtype(), False, Objective(segment=segment))

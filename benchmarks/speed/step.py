"""One distillation step beside the sum of its parts, beside two models, and at twice the length.

What a step costs beyond the work it cannot avoid, what a second copy of the base would have cost, and whether the
student's cost grows with the length alone.
"""

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import timer  # waits for the GPU before it reads the clock

import retrofit
from benchmarks.speed import cases
from distill.config import DistillConfig
from distill.loss import chunked_kl
from distill.objective import teaching
from distill.preflight import find_trainable
from distill.trainer import DistillTrainer
from retrofit.bench.machine import peak_bytes
from retrofit.bench.models import RandomModels, prompt
from retrofit.bench.timing import interleaved, mib, ratios, spread, spread_columns
from retrofit.evaluation.scores import hidden_states

ONE, TWO, PARTS = "step", "two-model step", "parts, summed"
TEACHER, STUDENT, LOSS, BACKWARD = "teacher forward", "student forward", "loss", "backward"
LONGER = "student, 2 T"
COLUMNS = {
    "name": ("", ""),
    **spread_columns("seconds", "seconds", ".3f"),
    "ratio": ("ratio", ".2f"),
    "to": ("of", ""),
    "peak_mib": ("peak MiB", ",.0f"),
}


def teacher_states(model: Any, tokens: dict[str, Tensor]) -> Tensor:
    """(B, T, E) hidden states of the base with full attention."""
    with teaching(model):
        return hidden_states(model, tokens)


class Case(cases.Step, RandomModels):
    """A random Qwen2 with one memory, and one row of ``length`` tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        find_trainable(self.memory)

    def model(self, positions: int) -> Any:
        """The patched model for so many positions, its memory in float32 as it is trained."""
        return retrofit.patch(self.base(positions), self.memory, self.window, self.sinks)


def run(case: Case, repeats: int = 3) -> list[dict[str, Any]]:
    """Seconds of the arms in interleaved rounds, and the peak memory of a step in both forms, weights included.

    Returns:
        Rows with ``seconds`` (median; ``_low``, ``_high``), ``ratio`` and what it is a ratio ``to`` (None for the
        parts), ``peak_mib`` (the two whole steps; None where the system does not tell).
    """
    model = case.model(2 * case.length)
    parts = Parts(model, case, case.length)
    longer = Parts(model, case, 2 * case.length)
    with tempfile.TemporaryDirectory() as folder:
        one, two = _whole(model, case, folder), _whole(model, case, folder, teacher=copy.deepcopy(model))
        seconds = interleaved({ONE: one, TWO: two, PARTS: parts.run, LONGER: longer.run}, repeats)
    timed = {ONE: seconds[ONE], TWO: seconds[TWO], PARTS: [sum(each.values()) for each in parts.rounds[-repeats:]]}
    timed |= {name: [each[name] for each in parts.rounds[-repeats:]] for name in (TEACHER, STUDENT, LOSS, BACKWARD)}
    both = (STUDENT, BACKWARD)
    timed[LONGER] = [sum(each[name] for name in both) for each in longer.rounds[-repeats:]]
    student = [sum(each[name] for name in both) for each in parts.rounds[-repeats:]]
    compared = {ONE: (PARTS, timed[PARTS]), TWO: (ONE, timed[ONE]), LONGER: ("student, T", student)}
    peaks = {name: peak_bytes(case.place(), _prepare, case, name == TWO) for name in (ONE, TWO)}
    rows = []
    for name, values in timed.items():
        other, base = compared.get(name, (None, None))
        ratio = spread("ratio", ratios(values, base))["ratio"] if base else None
        peak = mib(peaks.get(name))
        rows.append({"name": name, **spread("seconds", values), "ratio": ratio, "to": other, "peak_mib": peak})
    return rows


class Parts:
    """The work a step cannot avoid, each piece timed alone: two forward passes, the loss, the backward pass."""

    def __init__(self, model: Any, case: Case, length: int) -> None:
        self.model, self.batch = model, _batch(model, length)
        self.lossless = case.window + case.sinks
        self.rounds: list[dict[str, float]] = []

    def run(self) -> None:
        """One round: seconds of each part are appended to ``rounds``."""
        seconds: dict[str, float] = {}
        tokens = {"input_ids": self.batch["input_ids"]}
        head = self.model.get_output_embeddings()
        teacher = _timed(seconds, TEACHER, lambda: teacher_states(self.model, tokens))
        student = _timed(seconds, STUDENT, lambda: hidden_states(self.model, tokens))
        past = slice(self.lossless, -1)
        loss = _timed(
            seconds, LOSS, lambda: chunked_kl(student[0, past], teacher[0, past], head.weight, head.bias).mean()
        )
        _timed(seconds, BACKWARD, loss.backward)
        self.model.zero_grad()
        self.rounds.append(seconds)


def _timed(seconds: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
    began = timer()
    result = work()
    seconds[name] = timer() - began
    return result


def _batch(model: Any, length: int) -> dict[str, Tensor]:
    ids = prompt(model, length)
    return {"input_ids": ids, "labels": ids}


def make_trainer(model: Any, case: RandomModels, folder: str, **settings: Any) -> DistillTrainer:
    """A trainer that is ready for one step and writes nothing."""
    how: dict[str, Any] = {"report_to": "none", "max_steps": 1, "use_cpu": case.device == "cpu", **settings}
    trainer = DistillTrainer(model, DistillConfig(folder, **how))
    trainer.create_optimizer_and_scheduler(1)
    return trainer


def _whole(model: Any, case: Case, folder: str, teacher: Any = None) -> Callable[[], None]:
    """A step as the trainer takes it, optimizer included; with ``teacher``, its states come from that model."""
    trainer = make_trainer(model, case, folder)
    batch = _batch(model, case.length)
    count = torch.tensor(case.length - case.window - case.sinks - 1, device=case.place())

    def step() -> None:
        if teacher is None:
            trainer.training_step(model, batch, count)
        else:
            _two_model_step(model, teacher, batch, case.window + case.sinks)
        assert trainer.optimizer is not None
        trainer.optimizer.step()
        model.zero_grad()

    return step


def _two_model_step(model: Any, teacher: Any, batch: dict[str, Tensor], lossless: int) -> None:
    """As tools with a second teacher model do it; with our loss, so that only the second copy differs."""
    tokens, past = {"input_ids": batch["input_ids"]}, slice(lossless, -1)
    head = model.get_output_embeddings()
    states = hidden_states(model, tokens)[0, past]
    chunked_kl(states, teacher_states(teacher, tokens)[0, past], head.weight, head.bias).mean().backward()


def _prepare(case: Case, second: bool) -> Callable[[], None]:
    """For the measured process: a function that builds everything and takes one step."""

    def build_and_step() -> None:
        model = case.model(case.length)
        with tempfile.TemporaryDirectory() as folder:
            _whole(model, case, folder, teacher=copy.deepcopy(model) if second else None)()

    return build_and_step

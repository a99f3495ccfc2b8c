"""A question with known answers, whatever asks it: a probe made on the spot, or a row of a published benchmark."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One prompt and how its answer is judged.

    Attributes:
        id: unique within its task; a run that is continued skips what it has answered.
        prompt: the text a model reads, chat template applied if there is one.
        answers: the accepted answers (any, or all of them, as the metric has it).
        max_new_tokens: the answer's length at most.
        choices: if there are any, nothing is generated: the likeliest of them, per character, is the prediction.
        stop: strings that end an answer, themselves left out.
        meta: what to group scores by besides the task: ``length`` (tokens asked for), ``depth`` (0 to 1), ``language``;
            and ``chance``, the score of a blind guess.
    """

    id: str
    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)


# score (0 to 1) of a prediction for a sample
Metric = Callable[[str, Sample], float]


@dataclass(frozen=True)
class Task:
    """Samples, and the metric that judges them.

    Attributes:
        name: ``"niah_single_1"`` for one; scores are averaged by task.
        samples: an iterable that gives the same samples in the same order each time.
        metric: of one prediction.
    """

    name: str
    samples: Iterable[Sample]
    metric: Metric

"""`retrofit bench loss`: the chunked KL beside its naive form, forward and backward, in time and peak memory."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.loss import chunked_kl, naive_kl
from patches.errors import RetrofitError
from retrofit.bench.timing import TIME_AND_MEMORY, interleaved, mib, peak_extra_bytes, quotient, ratios, spread

FORMS = {"naive": naive_kl, "chunked": chunked_kl}
COLUMNS = TIME_AND_MEMORY


@dataclass(frozen=True)
class Case:
    """P scored positions of width E in front of a head of V tokens, all of one dtype."""

    positions: int = 2048
    width: int = 2048
    vocabulary: int = 151_936
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise RetrofitError(f"dtype={self.dtype!r}: measure float32 or bfloat16")


def run(case: Case, repeats: int = 3) -> list[dict[str, Any]]:
    """Seconds and peak extra memory of loss and gradient in both forms, and their ratios.

    Returns:
        Rows ``naive`` and ``chunked`` with ``seconds`` (median; ``_low``, ``_high``) and ``extra_mib`` (None where the
        system does not tell), then ``chunked / naive`` with the ratios of both.
    """
    arms = {name: prepare(case, name) for name in FORMS}
    naive, chunked = (arm() for arm in arms.values())
    difference = ((naive - chunked).norm() / naive.norm()).item()
    if not difference < (1e-4 if case.dtype == "float32" else 0.01):
        raise RetrofitError(f"the two gradients differ by {difference:.1e}: these timings would compare other things")
    seconds = interleaved(arms, repeats)
    arms.clear()  # the measured processes need the memory
    held = {name: peak_extra_bytes(prepare, case, name) for name in FORMS}
    rows: list[dict[str, Any]] = [
        {"name": name, **spread("seconds", seconds[name]), "extra_mib": mib(held[name])} for name in FORMS
    ]
    ratio = spread("seconds", ratios(seconds["chunked"], seconds["naive"]))
    return [*rows, {"name": "chunked / naive", **ratio, "extra_mib": quotient(held["chunked"], held["naive"])}]


def prepare(case: Case, form: str) -> Callable[[], Tensor]:
    """Inputs, and one form on them: the gradient (P, E) at the student's states out."""
    states, head = _inputs(case)
    loss = FORMS[form]

    def arm() -> Tensor:
        student = states[0].detach().requires_grad_()
        loss(student, states[1], head).sum().backward()
        assert student.grad is not None
        return student.grad

    return arm


@functools.cache  # one head for both forms: it is the largest tensor here
def _inputs(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)
    states = torch.randn(2, case.positions, case.width, generator=generator).to(dtype)
    head = torch.randn(case.vocabulary, case.width, generator=generator, dtype=torch.float32).mul_(case.width**-0.5)
    return states, head.to(dtype)

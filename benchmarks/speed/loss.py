"""The chunked KL beside its naive form, forward and backward, in time and peak memory."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed import cases
from benchmarks.speed.two_forms import TIME_AND_MEMORY, side_by_side
from distill.loss import chunked_kl, naive_kl
from retrofit.bench.machine import Where

FORMS = {"naive": naive_kl, "chunked": chunked_kl}
COLUMNS = TIME_AND_MEMORY


class Case(cases.Loss, Where):
    """P scored positions of width E in front of a head of V tokens, all of one dtype."""


def run(case: Case, repeats: int = 3) -> list[dict[str, Any]]:
    """Seconds and peak extra memory of loss and gradient in both forms, and their ratios: see :func:`side_by_side`."""
    return side_by_side(prepare, case, ("naive", "chunked"), ("chunked", "naive"), "chunked / naive", repeats)


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
    dtype, device = case.torch_dtype(), case.place()
    states = torch.randn(2, case.positions, case.width, generator=generator).to(device, dtype)
    head = torch.randn(case.vocabulary, case.width, generator=generator, dtype=torch.float32).mul_(case.width**-0.5)
    return states, head.to(device, dtype)

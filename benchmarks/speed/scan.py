"""The chunked gated delta rule beside its token loop, forward and forward + backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed import cases
from benchmarks.speed.two_forms import check_equal
from patches.scan import gated_delta_rule_chunks, gated_delta_rule_steps
from retrofit.bench.machine import Where
from retrofit.bench.timing import interleaved, ratios, spread, spread_columns

FORMS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "token loop": gated_delta_rule_steps,
    "chunked": gated_delta_rule_chunks,
}

COLUMNS = {"name": ("", ""), "pass": ("", ""), **spread_columns("seconds", "seconds", ".4f")}


class Case(cases.Scan, Where):
    """One layer's recurrence: T tokens, H heads, a D x D state per head. A dtype is the inputs'; states are float32."""


def run(case: Case, repeats: int = 5) -> list[dict[str, Any]]:
    """Seconds of both forms, and their ratios.

    Returns:
        For each ``pass`` (``forward``, ``forward + backward``): rows ``token loop`` and ``chunked`` with ``seconds``
        (median; ``_low``, ``_high``), then the row ``loop / chunked`` with the ratios.

    Raises:
        RetrofitError: the two forms compute different things.
    """
    inputs = _inputs(case)
    check_equal([form(*(x.float() for x in inputs))[0] for form in FORMS.values()], 1e-4)
    rows: list[dict[str, Any]] = []
    for name, backward in (("forward", False), ("forward + backward", True)):
        seconds = interleaved({arm: partial(_run, form, inputs, backward) for arm, form in FORMS.items()}, repeats)
        seconds["loop / chunked"] = ratios(*seconds.values())
        rows += [{"name": arm, "pass": name, **spread("seconds", values)} for arm, values in seconds.items()]
    return rows


def _inputs(case: Case) -> list[Tensor]:
    """q, k (unit length), v, beta and log decay, as a trained memory sees them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, case.heads, case.length, case.head_dim, generator=generator).unbind()
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    beta, decay = torch.rand(2, 1, case.heads, case.length, generator=generator).unbind()
    return [x.to(case.place(), case.torch_dtype()).requires_grad_() for x in (q, k, v, beta, -0.1 * decay)]


def _run(form: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        out, state = form(*(x.float() for x in inputs), scale=inputs[0].shape[-1] ** -0.5)
        if backward:
            torch.autograd.grad(out.sum() + state.sum(), inputs)

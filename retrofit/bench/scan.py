"""`retrofit bench scan`: the chunked gated delta rule beside its token loop, forward and forward + backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patches.errors import RetrofitError
from patches.scan import gated_delta_rule_chunks, gated_delta_rule_steps
from retrofit.bench.timing import interleaved, ratios, spread

FORMS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "token loop": gated_delta_rule_steps,
    "chunked": gated_delta_rule_chunks,
}

COLUMNS = {
    "name": ("", ""),
    "pass": ("", ""),
    "seconds": ("seconds", ".4f"),
    "seconds_low": ("quartile", ".4f"),
    "seconds_high": ("quartile", ".4f"),
}


@dataclass(frozen=True)
class Case:
    """One layer's recurrence: T tokens, H heads, a D x D state per head."""

    length: int = 2048
    heads: int = 4
    head_dim: int = 64


def run(case: Case, repeats: int = 5) -> list[dict[str, Any]]:
    """Seconds of both forms, and their ratios.

    Returns:
        For each ``pass`` (``forward``, ``forward + backward``): rows ``token loop`` and ``chunked`` with ``seconds``
        (median; ``_low``, ``_high``), then the row ``loop / chunked`` with the ratios.
    """
    inputs = _inputs(case)
    _check_equal(*(form(*inputs)[0] for form in FORMS.values()))
    rows: list[dict[str, Any]] = []
    for name, make in PASSES.items():
        seconds = interleaved({arm: make(form, inputs) for arm, form in FORMS.items()}, repeats)
        rows += [{"name": arm, "pass": name, **spread("seconds", seconds[arm])} for arm in FORMS]
        ratio = spread("seconds", ratios(seconds["token loop"], seconds["chunked"]))
        rows.append({"name": "loop / chunked", "pass": name, **ratio})
    return rows


def _inputs(case: Case) -> list[Tensor]:
    """q, k (unit length), v, beta and log decay, as a trained memory sees them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, case.heads, case.length, case.head_dim, generator=generator).unbind()
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    beta, decay = torch.rand(2, 1, case.heads, case.length, generator=generator).unbind()
    return [x.contiguous().requires_grad_() for x in (q, k, v, beta, -0.1 * decay)]


def _forward(form: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor]) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            form(*inputs, scale=inputs[0].shape[-1] ** -0.5)

    return run


def _forward_backward(form: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor]) -> Callable[[], None]:
    def run() -> None:
        out, state = form(*inputs, scale=inputs[0].shape[-1] ** -0.5)
        torch.autograd.grad(out.sum() + state.sum(), inputs)

    return run


def _check_equal(loop: Tensor, chunked: Tensor) -> None:
    difference = (loop - chunked).abs().max().item()
    if not difference < 1e-3:
        raise RetrofitError(f"the two forms differ by {difference:.1e}: these timings would compare different things")


PASSES = {"forward": _forward, "forward + backward": _forward_backward}

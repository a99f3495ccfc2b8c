"""Random arguments of the recurrences for any sharing of keys and states, and who serves them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from patches import kernels


def recurrence(
    op: str,
    tokens: int,
    *,
    heads: tuple[int, int, int] = (2, 2, 2),
    dims: tuple[int, int] = (8, 6),
    strongest: float = 1.0,
    dtype: torch.dtype = torch.float64,
    without: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Arguments of ``op`` for two rows, by name.

    Args:
        op: ``"gated_delta_rule"`` or ``"linear_attention"``.
        heads: of queries, states, and keys and values.
        dims: of keys and values.
        strongest: log decays go from 0 to minus this.
        dtype: of queries, keys and values; gates and state are float32, or float64 with float64.
        without: which of ``log_decay`` and ``state`` to leave out.
    """
    generator = torch.Generator().manual_seed(tokens)
    H, states, kv = heads
    K, V = dims

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator, dtype=torch.float64)

    gate = torch.promote_types(dtype, torch.float32)
    q, k, v = normal(H, tokens, K), normalize(normal(kv, tokens, K), dim=-1), normal(kv, tokens, V)
    beta, decay = torch.rand(2, 2, states, tokens, generator=generator, dtype=torch.float64)
    arguments = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    if op == "gated_delta_rule":
        arguments["beta"] = beta.to(gate)
    arguments |= {"log_decay": (-strongest * decay).to(gate), "state": normal(states, K, V).to(gate)}
    return {name: x for name, x in arguments.items() if name not in without}


def results(run: Any, arguments: dict[str, Tensor], gradient: bool = True, **how: Any) -> dict[str, Tensor]:
    """Readings and last state of ``run``, and the gradient of a weighted sum of both for each argument."""
    leaves = {name: x.clone().requires_grad_(gradient) for name, x in arguments.items()}
    out, state = run(**leaves, **how)
    found = {"out": out.detach(), "last": state.detach()}
    if gradient:
        weights = torch.linspace(-1, 1, 8 * out.shape[-1], dtype=state.dtype, device=out.device)
        sum((x * weights[: x.shape[-1]]).sum() for x in (out, state)).backward()
        found |= {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return found


def distance(ours: Tensor, exact: Tensor) -> float:
    """Largest difference, as a share of the largest number."""
    ours, exact = ours.detach().cpu().double(), exact.detach().cpu().double()
    return float((ours - exact).abs().max() / exact.abs().max().clamp_min(1e-6))


@contextmanager
def forced(*backends: str) -> Iterator[None]:
    """Inside the block these backends serve what they can, torch the rest; with none the table chooses."""
    before, chosen = os.environ.get(kernels.VARIABLE), dict(kernels._chosen)
    os.environ[kernels.VARIABLE] = ",".join(backends)
    kernels._chosen.clear()
    try:
        yield
    finally:
        os.environ.pop(kernels.VARIABLE)
        if before is not None:
            os.environ[kernels.VARIABLE] = before
        kernels._chosen.clear()
        kernels._chosen.update(chosen)

"""Whether what the table of kernels chooses here is right: each op beside its torch form, each memory beside itself."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import retrofit
from patches import kernels
from patches.kinds import KINDS
from retrofit.bench.models import random_base

# how far a kernel may be from the torch form in float64, as a share of the largest number
BOUNDS = {torch.float32: 2e-3, torch.bfloat16: 3e-2}


@dataclass
class Session:
    """One run: where it is, how large its shapes are, when it must end, and what it has found.

    Attributes:
        sections: rows by section; ``notes``: what was left out or failed, and why.
    """

    device: str
    small: bool
    until: float
    sections: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self, name: str, measure: Callable[["Session"], Any]) -> None:
        """One section; another section must not be lost because this one fails."""
        print(f"{name} ...", flush=True)
        self.sections[name] = []
        try:
            measure(self)
        except Exception as error:
            traceback.print_exc()
            self.notes.append(f"{name}: stopped by {type(error).__name__}: {str(error).splitlines()[0][:200]}")

    def add(self, section: str, /, **row: Any) -> None:
        self.sections[section].append(row)

    def late(self, what: str) -> bool:
        """Whether time is up; ``what`` is then left out."""
        if time.monotonic() < self.until:
            return False
        self.notes.append(f"{what}: left out, the time was up")
        return True


def check_ops(session: Session) -> None:
    """Each row of the table that runs here, forward and backward, beside the torch form in float64 on the CPU."""
    for dtype in BOUNDS:
        for op in kernels.OPS:
            for gradient in (False, True):
                backend = kernels.find(op, session.device, dtype, gradient)[0].backend
                arguments, how = _arguments(op, session.small)
                exact = _results(op, arguments, how, "cpu", torch.float64, gradient)
                found = _results(op, arguments, how, session.device, dtype, gradient)
                worst = max(_distance(a, b) for a, b in zip(found, exact, strict=True))
                _judge(session, "ops", f"{op}{', backward' if gradient else ''}", dtype, backend, worst)
    for gradient in (False, True):
        backend = kernels.find("merge", session.device, torch.float32, gradient)[0].backend
        exact = _merged("cpu", torch.float64, gradient)
        found = _merged(session.device, torch.float32, gradient)
        worst = max(_distance(a, b) for a, b in zip(found, exact, strict=True))
        _judge(session, "ops", f"merge{', backward' if gradient else ''}", torch.float32, backend, worst)


def _arguments(op: str, small: bool) -> tuple[list[Tensor], dict[str, Any]]:
    """Random tensors for ``op``: sizes that no tile divides, queries that share a state, decays."""
    generator = torch.Generator().manual_seed(0)
    tokens, dim = (70, 16) if small else (517, 64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = normal(2, tokens, 4, dim), normal(2, tokens, 2, dim), normal(2, tokens, 2, dim)
    if op == "decode_attention":
        return [x.transpose(1, 2) for x in (q[:, :1], k, v)], {"scale": dim**-0.5, "lse": True}
    if op == "window_attention":
        window = tokens // 4
        ahead = normal(2, window, 2, dim)
        rows = [q, torch.cat([ahead, k], 1), torch.cat([ahead, v], 1), k[:, :3], v[:, :3]]
        return rows, {"window": window, "start": 0, "scale": dim**-0.5, "lse": True}
    beta, decay = torch.rand(2, 2, tokens, 2, generator=generator)
    rows = [x.transpose(1, 2) for x in (q, torch.nn.functional.normalize(k, dim=-1), v)]
    rows += [beta] if op == "gated_delta_rule" else []
    return [*rows, -0.1 * decay, normal(2, 2, dim, dim)], {"scale": dim**-0.5}


def _results(
    op: str, arguments: list[Tensor], how: dict[str, Any], device: str, dtype: torch.dtype, gradient: bool
) -> list[Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    narrow = len(arguments) if op.endswith("_attention") and "lse" in how else 3  # gates and states are float32
    leaves = [x.to(device, dtype if i < narrow else wide).requires_grad_(gradient) for i, x in enumerate(arguments)]
    out, other = getattr(kernels, op)(*leaves, **how)
    if not gradient:
        return [out, other]
    weights = torch.linspace(-1, 1, out.shape[-1] * 8, dtype=wide, device=device)
    weighted = ((x.to(wide) * weights[: x.shape[-1]]).sum() for x in (out, other))
    return list(torch.autograd.grad(sum(weighted, start=weights.sum()), leaves))


def _merged(device: str, dtype: torch.dtype, gradient: bool) -> list[Tensor]:
    """What joins ``kvm``'s rows, at sizes that no tile divides and with two rows that tie, and its gradients."""
    generator = torch.Generator().manual_seed(0)
    rows, probe, written = (torch.randn(2, 2, n, w, generator=generator) for n, w in ((70, 132), (50, 64), (50, 132)))
    rows[:, :, 60, :64] = 3 * rows[:, :, 5, :64]
    probe[:, :, 7] = rows[:, :, 60, :64]
    probe = torch.nn.functional.normalize(probe, dim=-1)
    leaves = [x.to(device, dtype).requires_grad_(gradient) for x in (rows, written)]
    head = torch.arange(4, device=device).view(2, 2, 1)
    out = kernels.choose("merge", *leaves)(leaves[0], probe.to(device, dtype), leaves[1], head)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)] if gradient else [out]


def check_kinds(session: Session) -> None:
    """Each kind by the table's own choice and by the torch forms: logits, and gradients of what is trained."""
    for dtype in BOUNDS:
        for kind in KINDS:
            if session.late(f"models, {kind}"):
                return
            model = _awake(retrofit.patch(random_base(256, 4, 2, 256).to(dtype), kind, 16, 2)).to(session.device)
            ids = torch.arange(150, device=session.device).view(2, 75) % 97
            found = {}
            for backends in ((), ("torch",)):
                with kernels.forced(*backends):
                    model.zero_grad()
                    logits = model(ids).logits.float()
                    found[backends] = [logits.detach()]
                    if model.model.memories()[0].trainable:
                        logits.square().mean().backward()
                        found[backends] += [p.grad.clone() for _, p in model.memory_parameters() if p.grad is not None]
            worst = max(_distance(a, b) for a, b in zip(*found.values(), strict=True))
            _judge(session, "models", kind, dtype, "as chosen", worst)


def _awake(model: Any) -> Any:
    """A fresh memory adds nothing, which would hide any mistake."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in model.memory_parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def _distance(ours: Tensor, exact: Tensor) -> float:
    ours, exact = ours.detach().cpu().double(), exact.detach().cpu().double()
    return float((ours - exact).abs().max() / exact.abs().max().clamp_min(1e-6))


def _judge(session: Session, section: str, name: str, dtype: torch.dtype, backend: str, worst: float) -> None:
    bound = BOUNDS[dtype]
    row = {"name": name, "dtype": str(dtype)[6:], "backend": backend, "error": worst, "bound": bound}
    session.add(section, **row, right="right" if worst <= bound else "WRONG")

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
from tests.helpers import awaken
from tests.kernels.arguments import distance, forced, recurrence, results

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
            arguments, how = _arguments(op, session.small)
            for gradient in (False, True):
                backend = kernels.find(op, session.device, dtype, gradient)[0].backend
                exact = _results(op, arguments, how, "cpu", torch.float64, gradient)
                found = _results(op, arguments, how, session.device, dtype, gradient)
                worst = max(distance(found[name], x) for name, x in exact.items())
                _judge(session, "ops", f"{op}{', backward' if gradient else ''}", dtype, backend, worst)
    for gradient in (False, True):
        backend = kernels.find("merge", session.device, torch.float32, gradient)[0].backend
        exact = _merged("cpu", torch.float64, gradient)
        found = _merged(session.device, torch.float32, gradient)
        worst = max(distance(a, b) for a, b in zip(found, exact, strict=True))
        _judge(session, "ops", f"merge{', backward' if gradient else ''}", torch.float32, backend, worst)


def _arguments(op: str, small: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Random tensors for ``op``: sizes that no tile divides, queries that share a state, decays."""
    tokens, dim = (70, 16) if small else (517, 64)
    rows, scale = recurrence(op, tokens, heads=(4, 2, 2), dims=(dim, dim), strongest=0.1), {"scale": dim**-0.5}
    if op == "decode_attention":
        return {"q": rows["q"][:, :, :1], "k": rows["k"], "v": rows["v"]}, scale | {"lse": True}
    if op == "window_attention":
        window = tokens // 4
        rows = {"q": rows["q"][:, :, window:], "k": rows["k"], "v": rows["v"]}
        sinks = {"sink_k": rows["k"][:, :, :3], "sink_v": rows["v"][:, :, :3]}
        return rows | sinks, scale | {"window": window, "start": 0, "lse": True}
    return rows, scale


def _results(
    op: str, arguments: dict[str, Tensor], how: dict[str, Any], device: str, dtype: torch.dtype, gradient: bool
) -> dict[str, Tensor]:
    wide = torch.promote_types(dtype, torch.float32)  # gates and states are
    moved = {n: x.to(device, wide if n in ("beta", "log_decay", "state") else dtype) for n, x in arguments.items()}
    return results(getattr(kernels, op), moved, gradient, **how)


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
            model = awaken(retrofit.patch(random_base(256, 4, 2, 256).to(dtype), kind, 16, 2), push=0.03).to(
                session.device
            )
            ids = torch.arange(150, device=session.device).view(2, 75) % 97
            found = {}
            for backends in ((), ("torch",)):
                with forced(*backends):
                    model.zero_grad()
                    logits = model(ids).logits.float()
                    found[backends] = [logits.detach()]
                    if model.model.memories()[0].trainable:
                        logits.square().mean().backward()
                        found[backends] += [p.grad.clone() for _, p in model.memory_parameters() if p.grad is not None]
            worst = max(distance(a, b) for a, b in zip(*found.values(), strict=True))
            _judge(session, "models", kind, dtype, "as chosen", worst)


def _judge(session: Session, section: str, name: str, dtype: torch.dtype, backend: str, worst: float) -> None:
    bound = BOUNDS[dtype]
    row = {"name": name, "dtype": str(dtype)[6:], "backend": backend, "error": worst, "bound": bound}
    session.add(section, **row, right="right" if worst <= bound else "WRONG")

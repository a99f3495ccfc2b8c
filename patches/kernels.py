"""One table of kernels: for an op, a device, a dtype and whether a gradient is wanted, the function that does it.

Memories call the four ops below (and ``kvm`` the row for ``"merge"``) and know no backend. All tensors are
``(B, H, T, D)``, in which transformers keeps caches, gates ``(B, H, T)``, each in its own dtype; a backend that wants
another layout turns them itself. The PyTorch implementations in scan.py and window.py are the reference, and serve
wherever nothing else does.

``RETROFIT_KERNELS`` forces the choice: names of backends with commas between them; what none of them serves runs on
torch. Left unset, the first row of ``TABLE`` that fits and can be imported is taken.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from .errors import RetrofitError, nearest
from .fla_ops import load_form
from .kvm_merge import load_merge, merge
from .scan import run_recurrence, write_in_place
from .window import decode_attention as blocked_decode
from .window import window_attention as blocked_window
from .window_cuda import load_decode, load_window

logger = logging.get_logger(__name__)

VARIABLE = "RETROFIT_KERNELS"
HALVES = (torch.bfloat16, torch.float16)
SINGLES = (torch.float32, *HALVES)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    *,
    scale: float,
    normalise: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, token by token: decay, correct what the key recalls, write, read.

    ``S <- a S;  S <- S + beta k (v - k S)^T;  o = scale q S``; the query of a step sees the token written in it.

    Args:
        q: queries ``(B, H, T, D_k)``; query head ``h`` reads state ``h // (H / H_s)``.
        k, v: keys ``(B, H_kv, T, D_k)`` and values ``(B, H_kv, T, D_v)``; ``H_kv`` divides ``H_s``, ``H_s`` divides H.
        beta: writing strength ``(B, H_s, T)``, one for each state; 0 writes nothing.
        log_decay: log of the decay ``a``, ``(B, H_s, T)``, at most 0; None means no decay.
        state: the state before the first token ``(B, H_s, D_k, D_v)``; None means zero.
        scale: factor of the readings.
        normalise: give queries and keys unit length first; without it, keys must not be longer than that.
        in_place: whether ``state`` may be overwritten. A single token then takes the shortest way, in PyTorch's own
            operations on any device: a compiler can join them, and CUDA graphs find the state where it was.

    Returns:
        The readings ``(B, H, T, D_v)`` and the state after the last token, both in float32 or wider.
    """
    if in_place and _suits_in_place(q, state, k, v, beta, log_decay):
        return write_in_place(q, k, v, beta, log_decay, state, scale=scale, normalise=normalise)
    run = choose("gated_delta_rule", q, k, v, beta, log_decay, state)
    return run(q, k, v, beta, log_decay, state, scale=scale, normalise=normalise)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    *,
    scale: float,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decayed linear attention, token by token: ``S <- a S + k v^T;  o = scale q S``.

    Args and returns: as :func:`gated_delta_rule`; a writing strength goes into ``k`` or ``v`` beforehand. There is a
    state for each head of ``log_decay``, or of ``k`` and ``v``, whichever has more.
    """
    if in_place and _suits_in_place(q, state, k, v, log_decay):
        return write_in_place(q, k, v, None, log_decay, state, scale=scale)
    run = choose("linear_attention", q, k, v, log_decay, state)
    return run(q, k, v, None, log_decay, state, scale=scale)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    *,
    window: int,
    start: int,
    scale: float,
    dropout: float = 0.0,
    lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention of each query over its window and the sinks that have left it.

    Query ``t`` sees token ``j`` of the window iff ``0 <= t - j < W``, and sink ``i`` iff ``i <= t - W``.

    Args:
        q: queries of the tokens ``start .. start + n - 1``, ``(B, H, n, D)``.
        k, v: keys and values of the tokens ``start - W .. start + n - 1``, ``(B, H_kv, W + n, D)``; what lies before
            token 0 may hold any finite number.
        sink_k, sink_v: tokens 0 to S - 1, ``(B, H_kv, S, D)``.
        window: W; ``scale``: factor of the logits; ``dropout``: probability, as in the base's attention.
        lse: whether the log-sum-exp of each query's logits is wanted; its gradient counts too.

    Returns:
        ``(B, H, n, D)`` in the dtype of ``q``, and ``(B, H, n)`` in float32 or wider, or None.
    """
    run = choose("window_attention", q, k, v, sink_k, sink_v)
    choose("decode_attention", q, k, v)  # torch.compile cannot resolve kernels: do it before decoding starts
    return run(q, k, v, sink_k, sink_v, window=window, start=start, scale=scale, dropout=dropout, lse=lse)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0, lse: bool = False, causal: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Queries on keys all of which they see: a token on a full cache, ``q`` (B, H, n, D), ``k``, ``v`` (B, H_kv, m, D).

    Args:
        causal: the queries are those of the last n keys, and see no later ones.

    Returns:
        ``(B, H, n, D)``, and with ``lse`` the log-sum-exp ``(B, H, n)`` of its logits, else None.
    """
    how = {"scale": scale, "dropout": dropout, "lse": lse, "causal": causal}
    return choose("decode_attention", q, k, v)(q, k, v, **how)


def _suits_in_place(q: Tensor, state: Tensor | None, *others: Tensor | None) -> bool:
    """Whether this is one token on a state that there is, and no graph is recorded."""
    return state is not None and q.shape[2] == 1 and not _differentiates(q, state, *others)


# ---- the table ----


@dataclass(frozen=True)
class Kernel:
    """A row of the table."""

    op: str  # one of the functions above
    backend: str  # the name it goes by in RETROFIT_KERNELS
    load: Callable[[str, bool], Callable[..., Any]]  # of device and gradient; ImportError says why it cannot be had
    devices: tuple[str, ...] = ()  # types; empty means all
    dtypes: tuple[torch.dtype, ...] = ()  # of the inputs; empty means all
    gradients: bool = True  # whether it serves where one is wanted


OPS = ("gated_delta_rule", "linear_attention", "window_attention", "decode_attention")
TABLE: list[Kernel] = [
    Kernel("gated_delta_rule", "fla", partial(load_form, "gated_delta_rule"), ("cuda",), SINGLES),
    Kernel("linear_attention", "fla", partial(load_form, "simple_gla"), ("cuda",), SINGLES),
    Kernel("window_attention", "flex", load_window, ("cuda",), SINGLES),
    Kernel("decode_attention", "flash", load_decode, ("cuda",), HALVES, gradients=False),
    Kernel("merge", "triton", load_merge, ("cuda",), (torch.float32,)),
    Kernel("merge", "torch", lambda device, gradient: merge),
    Kernel("gated_delta_rule", "torch", lambda device, gradient: run_recurrence),
    Kernel("linear_attention", "torch", lambda device, gradient: run_recurrence),
    Kernel("window_attention", "torch", lambda device, gradient: blocked_window),
    Kernel("decode_attention", "torch", lambda device, gradient: blocked_decode),
]

_chosen: dict[tuple[str, str, torch.dtype, bool], Callable[..., Any]] = {}


def choose(op: str, *inputs: Tensor | None) -> Callable[..., Any]:
    """The function for ``op`` on these inputs; the first one decides device and dtype."""
    first = inputs[0]
    assert first is not None
    key = (op, first.device.type, first.dtype, _differentiates(*inputs))
    if key not in _chosen:
        row, run, missing = find(*key)
        if torch.compiler.is_compiling():  # what a trace writes down here would make the next call trace again
            return run
        _chosen[key] = run
        dtype, wanted = str(first.dtype).removeprefix("torch."), "with" if key[3] else "without"
        logger.info(f"{op} on {first.device.type} in {dtype}, {wanted} a gradient: {row.backend}")
        for reason in missing:
            logger.warning_once(f"{op} runs on {row.backend}, not on {reason}")
    return _chosen[key]


def _differentiates(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def find(op: str, device: str, dtype: torch.dtype, gradient: bool) -> tuple[Kernel, Callable[..., Any], list[str]]:
    """The row for this op, its function, and each backend before it that could not be had, with the reason.

    Raises:
        RetrofitError: ``RETROFIT_KERNELS`` names a backend that there is not, or that does not run here.
    """
    forced = forced_backends()
    missing: list[str] = []  # a compiler cannot trace list[str]()
    for row in TABLE:
        if row.op != op or (row.dtypes and dtype not in row.dtypes) or (gradient and not row.gradients):
            continue
        if forced:
            if row.backend not in forced and row.backend != "torch":
                continue
        elif row.devices and device not in row.devices:
            continue
        try:
            return row, row.load(device, gradient), missing
        except ImportError as error:
            if row.backend in forced:
                raise RetrofitError(
                    f"{VARIABLE}={','.join(forced)}: {error}; or unset {VARIABLE}, and torch's own form runs"
                ) from error
            missing.append(f"{row.backend}: {error}")
    raise AssertionError(f"no kernel for {op}")  # torch serves everything


def forced_backends() -> list[str]:
    """The backends that ``RETROFIT_KERNELS`` names; none when it is unset.

    Raises:
        RetrofitError: there is no such backend.
    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    known = list(dict.fromkeys(row.backend for row in TABLE))
    for name in names:
        if name not in known:
            raise RetrofitError(f"{VARIABLE}={name!r}{nearest(name, known)}: use {', '.join(known)}, or unset it")
    return names

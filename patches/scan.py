"""The recurrences that matrix memories share: the readable form, and the chunked form that is used.

All tensors are ``(B, H, T, D)``, gates are ``(B, H, T)``, a state is ``(B, H, D_k, D_v)`` and stays in float32 or
better. Several queries may read one state: keys, values, gates and states then have ``H_s`` heads, a divisor of the
queries' H, and query head ``h`` reads state ``h // (H / H_s)``. Nothing is repeated for that.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .modules import unit
from .precision import cast

CHUNK = 32  # tokens per chunk: the fastest of 16, 32, 64 and 128 for heads of 64 on a CPU
STEPWISE = 8  # up to this many tokens the loop beats setting up a chunk
GPU_CHUNK = 64  # as flash-linear-attention's; this and the next are not measured, but few launches are what counts
GPU_SEGMENT = 2**16  # bounds what 28 heads of 128 need to about 8 GiB
SEGMENT = 4096  # tokens at a time: beyond 32 MiB the C library asks the system for every temporary anew, page by page


def run_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    *,
    scale: float = 1.0,
    normalise: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, or without ``beta`` decayed linear attention, in whichever form is faster for this length.

    Arguments and results as in kernels.py.
    """
    q, k, v, beta, log_decay = _widen(q, k, v, beta, log_decay)
    if normalise:
        q, k = unit(q), unit(k)
    states = max(x.shape[1] for x in (k, v, beta, log_decay) if x is not None)
    k, v = per_state(k, states), per_state(v, states)
    log_decay = None if log_decay is None else per_state(log_decay, states)
    few = q.shape[2] <= STEPWISE
    inputs: tuple[Tensor | None, ...] = (q, k, v, beta, log_decay)
    form: Callable[..., tuple[Tensor, Tensor]] = gated_delta_rule_steps if few else gated_delta_rule_chunks
    if beta is None and not few:
        inputs, form = (q, k, v, log_decay), linear_attention_chunks
    segment = SEGMENT if q.device.type == "cpu" else GPU_SEGMENT
    readings = []
    for first in range(0, max(q.shape[2], 1), segment):
        part = [None if x is None else x[:, :, first : first + segment] for x in inputs]
        out, state = form(*part, state, scale)
        readings.append(out)
    assert state is not None
    return (readings[0] if len(readings) == 1 else torch.cat(readings, 2)), state


def gated_delta_rule_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, token by token: decay, correct what the key recalls, write, read.

    ``S <- a S;  S <- S + beta k (v - k S)^T;  o = scale q S`` (AHN, arXiv 2510.07318, eq. 5; DeltaNet is ``a = 1``).
    The query of a step sees the token written in that step. Arguments and results as in kernels.py, all in one dtype
    and with keys and values of each state; keys of length at most 1 keep it stable.
    Without ``beta`` nothing is corrected, and this is decayed linear attention (as in Mamba2, arXiv 2405.21060):
    ``S <- a S + k v^T``.
    """
    B, H, T, D = k.shape
    if T == 0:
        return v.new_zeros(*q.shape[:3], v.shape[-1]), k.new_zeros(B, H, D, v.shape[-1]) if state is None else state
    state = k.new_zeros(B * H, D, v.shape[-1]) if state is None else state.flatten(0, 1)
    gates = (beta, None if log_decay is None else log_decay.exp())
    rows = (
        q.reshape(B * H, q.shape[1] // H, T, D).unbind(2),
        k.reshape(B * H, T, D, 1).unbind(1),
        v.reshape(B * H, T, 1, v.shape[-1]).unbind(1),
        *([None] * T if gate is None else gate.reshape(B * H, T, 1, 1).unbind(1) for gate in gates),
    )
    readings = []
    for query, key, value, strength, fade in zip(*rows, strict=True):
        state = state if fade is None else state * fade
        if strength is not None:
            value = strength * (value - torch.bmm(key.transpose(1, 2), state))
        state = torch.addcmul(state, key, value)
        readings.append(torch.bmm(query, state))
    out = torch.stack(readings, 2) if len(readings) > 1 else readings[0].unsqueeze(2)
    out = out.reshape(*q.shape[:3], -1)
    return (out if scale == 1 else out * scale), state.unflatten(0, (B, H))


def gated_delta_rule_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    scale: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule in chunks: the same numbers as :func:`gated_delta_rule_steps`, in matrix products.

    Inside a chunk the corrections solve a unit triangular system (the WY form of DeltaNet, arXiv 2406.06484, with the
    decays of Gated DeltaNet, arXiv 2412.06464), so that what the chunk writes is ``values - keys S`` with ``values``
    and ``keys`` known beforehand for all chunks; two small products per chunk carry the state from one to the next.
    """
    B, H, T, D = k.shape
    queries = q.shape[1] // H  # that read one state
    if state is None:
        state = k.new_zeros(B, H, D, v.shape[-1])
    if T == 0:
        return v.new_zeros(*q.shape[:3], v.shape[-1]), state
    chunk = min(chunk or (CHUNK if k.device.type == "cpu" else GPU_CHUNK), T)
    if log_decay is None:
        log_decay = torch.zeros_like(beta)
    k, v, beta, log_decay = (_split_chunks(x, chunk) for x in (k, v, beta, log_decay))  # (B, H, N, C, ...)
    q = _split_chunks(q, chunk).unflatten(1, (H, queries)).transpose(2, 3)  # (B, H, N, G, C, D_k)
    since, decay = _compute_decays(log_decay)
    keys_down = k.transpose(-1, -2)
    # keys with keys, and queries with keys: (.., C + G C, C)
    alike = _stack_below(k, q) @ keys_down

    system = alike[..., :chunk, :] * (decay * beta.unsqueeze(-1))  # its diagonal is not read: unitriangular
    one = torch.eye(chunk, dtype=q.dtype, device=q.device).expand_as(system)
    # inverting the small system and multiplying is twice as fast as solving for the wide right-hand side
    solve = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
    values, keys = (solve @ (torch.cat([v, k * since], -1) * beta.unsqueeze(-1))).split([v.shape[-1], D], -1)

    keys_end = keys_down * decay[..., -1:, :]  # (.., D_k, C): what is left of each key when the chunk ends
    readers = _stack_below(-keys, q * since.unsqueeze(3))  # (.., C + G C, D_k): all that meets the state before a chunk
    state = state.flatten(0, 1)
    from_before, written = [], []
    per_chunk = (x.flatten(0, 1).unbind(1) for x in (readers, values, keys_end, since[..., -1:, :]))
    for reader, value, key_end, fade in zip(*per_chunk, strict=True):
        read = torch.bmm(reader, state)
        write = value + read[:, :chunk]
        state = torch.baddbmm(fade * state, key_end, write)
        from_before.append(read[:, chunk:])
        written.append(write)
    near = _weigh_by_decay(alike[..., chunk:, :], decay, queries).flatten(0, 1)
    out = torch.stack(from_before, 1) + near @ torch.stack(written, 1)  # (B H, N, G C, D_v)
    return _restore_order(out.unflatten(0, (B, H)), queries, T, scale), state.unflatten(0, (B, H))


def write_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Any,
    *,
    scale: float,
    normalise: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token without a gradient, by the gated delta rule or, where ``beta`` is None, as linear attention has it.

    Arguments and results as in kernels.py; ``state`` is overwritten.
    """
    (B, H, _, D), states = q.shape, state.shape[1]
    if normalise:
        q, k = unit(cast(torch.cat([q, k], 1), state.dtype)).split([H, k.shape[1]], 1)
    q, k, v = (cast(x, state.dtype) for x in (q, k, v))
    q = q if states == H else q.reshape(B, states, -1, D)
    k, v = per_state(k, states), per_state(v, states)
    if log_decay is not None:
        state.mul_(log_decay.exp().unsqueeze(-1))
    if beta is not None:
        v = (v - k @ state).mul_(beta.unsqueeze(-1))
    state.addcmul_(k.mT, v)
    read = q @ state
    read = read if scale == 1 else read.mul_(scale)
    return read if states == H else read.view(B, H, 1, -1), state


def linear_attention_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    scale: float = 1.0,
    chunk: int = 2 * CHUNK,
) -> tuple[Tensor, Tensor]:
    """Decayed linear attention in chunks: the same numbers as :func:`gated_delta_rule_steps` without ``beta``."""
    B, H, T, D = k.shape
    queries = q.shape[1] // H
    if state is None:
        state = k.new_zeros(B, H, D, v.shape[-1])
    if T == 0:
        return v.new_zeros(*q.shape[:3], v.shape[-1]), state
    chunk = min(chunk, T)
    if log_decay is None:
        log_decay = k.new_zeros(B, H, T)
    k, v, log_decay = (_split_chunks(x, chunk) for x in (k, v, log_decay))
    q = _split_chunks(q, chunk).unflatten(1, (H, queries)).transpose(2, 3)  # (B, H, N, G, C, D_k)
    since, decay = _compute_decays(log_decay)
    added = (k.transpose(-1, -2) * decay[..., -1:, :]) @ v  # (B, H, N, D_k, D_v)
    before = []
    for add, fade in zip(added.unbind(2), since[..., -1:, :].unbind(2), strict=True):
        before.append(state)
        state = fade * state + add
    near = _weigh_by_decay(q.flatten(3, 4) @ k.transpose(-1, -2), decay, queries)
    out = (q * since.unsqueeze(3)).flatten(3, 4) @ torch.stack(before, 2) + near @ v
    return _restore_order(out, queries, T, scale), state


def per_state(x: Tensor, states: int) -> Tensor:
    """``x`` (B, H_kv, ...) of each state ``(B, states, ...)``."""
    return x if x.shape[1] == states else x.repeat_interleave(states // x.shape[1], 1)


def _widen(*tensors: Any) -> list[Any]:
    """All in the widest of their dtypes, at least float32."""
    widest = torch.float32
    for x in tensors:
        widest = widest if x is None else torch.promote_types(widest, x.dtype)
    return [None if x is None else cast(x, widest) for x in tensors]


def _stack_below(one: Tensor, several: Tensor) -> Tensor:
    """``(.., C, D)`` and ``(.., G, C, D)`` below each other: ``(.., C + G C, D)``."""
    return torch.cat([one.unsqueeze(-3), several], -3).flatten(-3, -2)


def _weigh_by_decay(alike: Tensor, decay: Tensor, queries: int) -> Tensor:
    """Likenesses ``(.., G C, C)`` of a chunk's queries and keys, each with the decay ``(.., C, C)`` between the two."""
    return (alike.unflatten(-2, (queries, -1)) * decay.unsqueeze(-3)).flatten(-3, -2)


def _restore_order(out: Tensor, queries: int, length: int, scale: float) -> Tensor:
    """``(B, H_s, N, G C, D) -> (B, H_s G, length, D)``, times ``scale``."""
    out = out.unflatten(3, (queries, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :length]
    return out if scale == 1 else out * scale


def _split_chunks(x: Tensor, chunk: int) -> Tensor:
    """``(B, H, T, ...) -> (B, H, N, C, ...)``, filled up with zeros: tokens without gates leave the state as it is."""
    extra = -x.shape[2] % chunk
    if extra:
        x = pad(x, (0, 0) * (x.dim() - 3) + (0, extra))
    return x.unflatten(2, (-1, chunk))


def _compute_decays(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Log decays ``(.., C)`` -> decays since the chunk began, own included ``(.., C, 1)``, from j to i ``(.., C, C)``.

    The sums are taken in float64: a decay near 1 that follows strong ones is a small difference of large numbers.
    """
    total = log_decay.double().cumsum(-1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(log_decay.dtype)
    lower = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).tril()
    # masked before the exponential: above the diagonal the differences are positive and could overflow
    return total.to(log_decay.dtype).exp().unsqueeze(-1), between.masked_fill(~lower, float("-inf")).exp()

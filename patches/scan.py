"""The recurrences that matrix memories share: the readable form, and the chunked form that is used.

All tensors are ``(B, H, T, D)``, gates are ``(B, H, T)``, a state is ``(B, H, D_k, D_v)`` and stays in float32 or better.
"""

import torch
from torch import Tensor

CHUNK = 64  # tokens per chunk; 32 and 64 are the fastest here, 16 and 128 are slower
STEPWISE = 8  # up to this many tokens the loop beats setting up a chunk


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule by whichever form is faster for this length. Same contract as :func:`gated_delta_rule_steps`."""
    form = gated_delta_rule_steps if q.shape[2] <= STEPWISE else gated_delta_rule_chunks
    return form(q, k, v, beta, log_decay, state, scale)


def gated_delta_rule_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, token by token: decay, correct what the key recalls, write, read.

    ``S <- a S;  S <- S + beta k (v - k S)^T;  o = scale q S`` (AHN, arXiv 2510.07318, eq. 5; DeltaNet is ``a = 1``).
    The query of a step sees the token written in that step.

    Args:
        q: queries ``(B, H, T, D_k)``.
        k: keys ``(B, H, T, D_k)``, of length at most 1 for a stable state.
        v: values ``(B, H, T, D_v)``.
        beta: writing strength ``(B, H, T)``; 0 writes nothing.
        log_decay: log of the decay ``a``, ``(B, H, T)``, at most 0; None means no decay.
        state: the state before the first token ``(B, H, D_k, D_v)``; None means zero.
        scale: factor of the reading.

    Returns:
        The readings ``(B, H, T, D_v)`` and the state after the last token.
    """
    if state is None:
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    readings = []
    for t in range(q.shape[2]):
        if log_decay is not None:
            state = state * log_decay[:, :, t, None, None].exp()
        key = k[:, :, t, :, None]  # (B, H, D_k, 1)
        error = v[:, :, t] - (key * state).sum(-2)  # (B, H, D_v)
        state = state + key * (beta[:, :, t, None] * error).unsqueeze(-2)
        readings.append((q[:, :, t, :, None] * state).sum(-2))
    out = torch.stack(readings, 2) if readings else torch.zeros_like(v)
    return out * scale, state


def gated_delta_rule_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    scale: float = 1.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule in chunks: the same numbers as :func:`gated_delta_rule_steps`, in matrix products.

    Inside a chunk the corrections solve a unit triangular system (the WY form of DeltaNet, arXiv 2406.06484, with the decays of
    Gated DeltaNet, arXiv 2412.06464). From chunk to chunk the state follows ``S <- M S + B`` with M, B known beforehand for all
    chunks, so the only sequential work is one small product per chunk; all readings are computed together afterwards.
    """
    B, H, T, D = q.shape
    if state is None:
        state = q.new_zeros(B, H, D, v.shape[-1])
    if T == 0:
        return torch.zeros_like(v), state
    chunk = min(chunk, T)
    extra = -T % chunk
    if log_decay is None:
        log_decay = torch.zeros_like(beta)
    if extra:  # tokens with beta = 0 and no decay leave the state as it is
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, extra)) for x in (q, k, v))
        beta, log_decay = (torch.nn.functional.pad(x, (0, extra)) for x in (beta, log_decay))
    q, k, v, beta, log_decay = (x.unflatten(2, (-1, chunk)) for x in (q, k, v, beta, log_decay))  # (B, H, N, C, ...)

    total = log_decay.cumsum(-1)  # (B, H, N, C): log of the decay since the chunk began, the token's own included
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    # masked before the exponential: above the diagonal the differences are positive and could overflow
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()  # (.., C, C)

    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.transpose(-1, -2)) * decay  # its diagonal is not read: unitriangular below
    grown = total.exp().unsqueeze(-1)  # (.., C, 1)
    right = torch.cat([v * beta.unsqueeze(-1), k_beta * grown], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], D], -1)  # what each token writes is  values - keys S

    end = total[..., -1:, None].exp()  # (.., 1, 1)
    k_end = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)  # (.., D_k, C)
    step = torch.diag_embed(end.squeeze(-1).expand(*end.shape[:-2], D)) - k_end @ keys  # M, (.., D_k, D_k)
    offset = k_end @ values  # B, (.., D_k, D_v)
    states = []
    for m, b in zip(step.flatten(0, 1).unbind(1), offset.flatten(0, 1).unbind(1), strict=True):
        states.append(state)
        state = torch.baddbmm(b, m, state.flatten(0, 1)).unflatten(0, (B, H))
    before = torch.stack(states, 2)  # (B, H, N, D_k, D_v): the state each chunk starts from

    written = values - keys @ before
    out = (q * grown) @ before + ((q @ k.transpose(-1, -2)) * decay) @ written
    return out.flatten(2, 3)[:, :, :T] * scale, state

"""Recurrences of papers, token by token, as one reads them there; what runs is held to them."""

import torch
from torch import Tensor


def tensor_cache(
    rule: str, q: Tensor, k: Tensor, v: Tensor, strength: Tensor, log_decay: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The paper's recurrences, token by token (eq. 4 to 6): write the token, then let the query read.

    - ``outer``: ``A <- lambda A + eta k v^T``
    - ``delta``: ``A <- lambda A + eta k (v - k A)^T``, the error against the state before its decay
    - ``wedge``: ``A <- lambda A + eta (k v^T - v k^T)``

    Args:
        rule: its name.
        q: queries ``(R, G, m, D)``, G of them read each state.
        k, v: keys and values ``(R, 1, m, D)``.
        strength: eta ``(R, 1, m)``; 0 writes nothing.
        log_decay: log of lambda ``(R, 1, m)``; 0 where nothing is written.
        state: A before the first token ``(R, 1, D, D)``, keys by values; None means zero.

    Returns:
        The readings ``q A`` ``(R, G, m, D)`` and the last state.
    """
    A = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state
    readings = []
    for t in range(k.shape[2]):
        key, value = k[:, :, t, :, None], v[:, :, t, None, :]
        if rule == "delta":
            value = value - (key * A).sum(-2, keepdim=True)
        write = key * value
        if rule == "wedge":
            write = write - write.transpose(-1, -2)
        A = log_decay[:, :, t, None, None].exp() * A + strength[:, :, t, None, None] * write
        readings.append((q[:, :, t, :, None] * A).sum(-2))
    return torch.stack(readings, 2), A


def infini(
    write: str, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None, mass: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The paper's equations 4 to 6, token by token: write, then let the query read.

    - ``linear``: ``M <- M + k v^T;  z <- z + k``
    - ``delta``: ``M <- M + k (v - k M / (k . z))^T;  z <- z + k``

    Args:
        write: ``"linear"`` or ``"delta"``.
        q: features of queries ``(R, G, m, D)``, G of them read each state.
        k: features of keys ``(R, 1, m, D)``; zeros write nothing.
        v: values ``(R, 1, m, D)``.
        state, mass: M ``(R, 1, D, D)`` and z ``(R, 1, D)`` before the first token; None means zero.

    Returns:
        ``q M`` ``(R, G, m, D)`` and ``q . z`` ``(R, G, m)``, whose quotient is the reading, and the last M and z.
    """
    M = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state
    z = torch.zeros_like(k[:, :, 0]) if mass is None else mass
    readings, masses = [], []
    for t in range(k.shape[2]):
        key, value = k[:, :, t], v[:, :, t]
        if write == "delta":
            known = (key * z).sum(-1, keepdim=True)
            value = value - (key.unsqueeze(-1) * M).sum(-2) / torch.where(known > 0, known, 1)
        M, z = M + key.unsqueeze(-1) * value.unsqueeze(-2), z + key
        readings.append((q[:, :, t, :, None] * M).sum(-2))
        masses.append((q[:, :, t] * z).sum(-1))
    return torch.stack(readings, 2), torch.stack(masses, 2), M, z

"""Infini-attention (arXiv 2404.07143): a normalised outer-product memory, blended into each head by a learned gate.

Deviations from the paper: it works on segments and writes every token, we write token by token what leaves the window
(``population="all"`` writes every one); its gate never quite closes, we multiply it by a factor that starts at zero, so
that a fresh model is exactly the window-only one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import elu
from transformers import initialization as init

from .errors import one_of
from .kernels import gated_delta_rule, linear_attention
from .memory import Joined, Kept, Pairs, PopulationOptions, Step, UngatedMemory
from .precision import wide


def write_and_read(
    write: str, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None, mass: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The paper's equations 4 to 6: token after token is written, then its query reads.

    - ``linear``: ``M <- M + k v^T;  z <- z + k``
    - ``delta``: ``M <- M + k (v - k M / (k . z))^T;  z <- z + k``

    Args:
        write: ``"linear"`` or ``"delta"``.
        q: features of queries ``(R, G, m, D)``, G of them read each state.
        k: features of keys ``(R, 1, m, D)``; zeros write nothing.
        v: values ``(R, 1, m, D)``.
        state, mass: M ``(R, 1, D, D)`` and z ``(R, 1, D)`` before the first token; None means zero. A single token
            overwrites M.

    Returns:
        ``q M`` ``(R, G, m, D)`` and ``q . z`` ``(R, G, m)``, whose quotient is the reading, and the last M and z.
    """
    sums = k.cumsum(2) if mass is None else k.cumsum(2) + mass.unsqueeze(2)  # z after each token
    if write == "linear":
        read, last = linear_attention(q, k, v, None, state, scale=1.0, in_place=True)
    else:
        before = torch.cat([torch.zeros_like(k[:, :, :1]) if mass is None else mass.unsqueeze(2), sums[:, :, :-1]], 2)
        known = (k * before).sum(-1)
        known = torch.where(known > 0, known, 1)
        # v - k M / known is (known v - k M) / known: the delta rule with strength 1 / known
        v, strength = v * known.unsqueeze(-1), 1 / known
        read, last = gated_delta_rule(q, k, v, strength, None, state, scale=1.0, in_place=True)
    return read, (q * sums).sum(-1), last, sums[:, :, -1].clone()


@dataclass(frozen=True)
class InfiniOptions(PopulationOptions):
    """The paper's two writes, and where keys and queries stand.

    Attributes:
        write: ``"linear"``, or ``"delta"``: only what the memory does not know of the value yet.
        positions: ``"rotated"``: keys and queries as the window uses them; ``"none"``: turned back to position 0, as
            the paper's memory has them.
    """

    write: str = "linear"
    positions: str = "rotated"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("write", self.write, "linear", "delta")
        one_of("positions", self.positions, "rotated", "none")


class InfiniAttention(UngatedMemory):
    """``local + f sigmoid(b) (q M / (q . z) - local)`` in each head, with features ``ELU + 1`` of queries and keys."""

    kind = "infini"
    Options = InfiniOptions

    def __init__(self, config: Any, window: int, sinks: int, options: Any):
        super().__init__(config, window, sinks, options)
        self.beta = nn.Parameter(torch.empty(self.heads))  # the paper's gate, a logit
        self.factor = nn.Parameter(torch.empty(self.heads))

    def reset_parameters(self) -> None:
        init.zeros_(self.beta)
        init.zeros_(self.factor)  # a fresh memory adds exactly nothing, and still has a gradient

    def state_tensors(self, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Kept]:
        shape = (self.kv_heads, self.head_dim)
        return {"matrix": Kept((*shape, self.head_dim), wide(dtype)), "mass": Kept(shape, wide(dtype))}

    @property
    def products(self) -> float:
        return super().products + (self.options.write == "delta")

    def exchange(self, step: Step, pairs: Pairs, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Readings are ``(B, H, m, D + 1)``: ``q M``, and ``q . z`` behind it."""
        q, k, v = (x.to(wide(x.dtype)) for x in (pairs.q, pairs.k, pairs.v))
        if self.options.positions == "none":
            q, k = step.now.rotate_back(q, pairs.start + pairs.lag), step.now.rotate_back(k, pairs.start)
        else:  # features see more than distances
            q, k = step.now.from_first_token(q), step.now.from_first_token(k)
        q, k = elu(q) + 1, elu(k) + 1
        batch = len(k)
        q = q.unflatten(1, (self.kv_heads, -1)).flatten(0, 1)  # (B * H_kv, G, m, D)
        k, v = (x.flatten(0, 1).unsqueeze(1) for x in (k, v))
        before = (state[name].flatten(0, 1).unsqueeze(1) if state else None for name in ("matrix", "mass"))
        read, found, matrix, mass = write_and_read(self.options.write, q, k, v, *before)
        new = {"matrix": matrix.squeeze(1).unflatten(0, (batch, -1)), "mass": mass.squeeze(1).unflatten(0, (batch, -1))}
        return torch.cat([read, found.unsqueeze(-1)], -1).unflatten(0, (batch, -1)).flatten(1, 2), new

    def join(self, near: Tensor, read: Tensor) -> Joined:
        read, found = read[..., :-1], read[..., -1:]
        known = found > 0  # nothing was written yet where it is not
        gate = (self.factor * self.beta.sigmoid()).to(read.dtype)[:, None, None] * known  # (B, H, n, 1)
        here = near.to(read.dtype)
        return (here + gate * (read / torch.where(known, found, 1) - here)).to(near.dtype), None

"""Tensor Cache (arXiv 2605.22884): an outer-product matrix per key/value head, joined behind the output projection.

The read goes through a projection and a gate of its own: ``out = W_O(window) + sigmoid(g) W_tc(read)``. Deviations from
the paper and its code are in docs/memories/tensor-cache.md.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .errors import RetrofitError, one_of
from .kernels import gated_delta_rule, linear_attention
from .memory import Joined, Kept, Pairs, PopulationOptions, Step, UngatedMemory
from .modules import LargeLinear
from .options import above_zero, true_or_false, whole_number
from .precision import wide

UNIT_EPS = 1e-5  # beside the length of a key or query that is normalised, as in the authors' code
LOGITS = 10.0  # lambda and eta stay between sigmoid(-10) and sigmoid(10)
GATE = -2.0  # initial logit of the gate of a layer
TIMESCALES = {"fast": (0.995, 0.05), "slow": (0.9995, 0.01)}  # initial decay and writing strength


def write_and_read(
    rule: str, q: Tensor, k: Tensor, v: Tensor, strength: Tensor, log_decay: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The paper's recurrences (eq. 4 to 6): token after token is written, then its query reads ``q A``.

    - ``outer``: ``A <- lambda A + eta k v^T``
    - ``delta``: ``A <- lambda A + eta k (v - k A)^T``, the error against the state before its decay
    - ``wedge``: ``A <- lambda A + eta (k v^T - v k^T)``

    Args:
        rule: one of these.
        q: ``(R, G, m, D)``, G of them read each state.
        k, v: ``(R, 1, m, D)``.
        strength: eta ``(R, 1, m)``, 0 writes nothing.
        log_decay: log of lambda ``(R, 1, m)``, 0 where nothing is written.
        state: A before the first token ``(R, 1, D, D)``, keys by values, or None; a single token overwrites it.

    Returns:
        The readings ``(R, G, m, D)`` and the last state; for ``wedge`` that of the outer products.
    """
    if rule == "delta":
        # the gated delta rule measures the error after the decay: the same with eta / lambda and lambda v
        decay = log_decay.exp()
        v, strength = v * decay.unsqueeze(-1), strength / decay
        return gated_delta_rule(q, k, v, strength, log_decay, state, scale=1.0, in_place=True)
    strength = strength.unsqueeze(-1)
    # decay is a number, so the wedge's state is that of the outer products less its transpose; the former is kept
    mirrored = state.mT.clone() if rule == "wedge" and state is not None else None
    read, outer = linear_attention(q, k, v * strength, log_decay, state, scale=1.0, in_place=True)
    if rule == "wedge":
        read = read - linear_attention(q, v, k * strength, log_decay, mirrored, scale=1.0, in_place=True)[0]
    return read, outer


@dataclass(frozen=True)
class TensorCacheOptions(PopulationOptions):
    """The paper's knobs.

    Attributes:
        rule: ``"outer"``, ``"delta"`` or ``"wedge"`` (the last gave the paper a negative result).
        normalize_keys: give written keys unit length; pretrained keys are long. ``delta`` requires it.
        normalize_queries: give reading queries unit length.
        value_scale: factor of written values.
        z_norm: divide each read by what its query finds of the keys alone, where that is more than 1.
        slots: matrices per head; a token is written to the one whose slot key is nearest to its key.
        top_k: how many of the slots a query reads, weighted by a softmax over their keys.
        temperature: of that softmax and of the routing.
        two_timescale: a second, slower state with the same writes, read with a learned weight.
    """

    rule: str = "outer"
    normalize_keys: bool = True
    normalize_queries: bool = False
    value_scale: float = 1.0
    z_norm: bool = False
    slots: int = 1
    top_k: int = 1
    temperature: float = 1.0
    two_timescale: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("rule", self.rule, "outer", "delta", "wedge")
        for name in ("normalize_keys", "normalize_queries", "z_norm", "two_timescale"):
            true_or_false(name, getattr(self, name))
        for name in ("value_scale", "temperature"):
            above_zero(name, getattr(self, name))
        for name in ("slots", "top_k"):
            whole_number(name, getattr(self, name))
        if self.top_k > self.slots:
            raise RetrofitError(f"top_k={self.top_k} slots cannot be read of slots={self.slots}: choose top_k <= slots")
        if self.rule == "delta" and not self.normalize_keys:
            raise RetrofitError(
                "rule='delta' diverges once eta |k|^2 exceeds 1 + lambda, as the keys of pretrained models make it: "
                "use it with normalize_keys=true"
            )


class Timescale(nn.Module):
    """One decayed store: lambda and eta of each key/value head, as logits."""

    def __init__(self, kv_heads: int, options: TensorCacheOptions):
        super().__init__()
        self.options = options
        self.theta_lambda = nn.Parameter(torch.empty(kv_heads))
        self.theta_eta = nn.Parameter(torch.empty(kv_heads))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, before: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Write and read all slots.

        Args:
            q: ``(B, H_kv, slots, G, m, D)``.
            k, v: ``(B, H_kv, slots, 1, m, D)``.
            chosen: which slot each token goes to ``(B, H_kv, slots, 1, m)``, 0 or 1; the others neither decay nor grow.
            before: what the call before returned, or nothing.

        Returns:
            The readings ``(B, H_kv, slots, G, m, D)``; the ``matrix`` ``(B, H_kv * slots, D, D)`` and, with ``z_norm``,
            the decayed sum of keys, ``mass`` ``(B, H_kv * slots, D, 1)``.
        """
        rows = q.shape[:3]
        per_head = (1, -1, 1, 1, 1)
        theta_lambda, theta_eta = (x.to(k.dtype).clamp(-LOGITS, LOGITS) for x in (self.theta_lambda, self.theta_eta))
        log_decay = nn.functional.logsigmoid(theta_lambda).view(per_head) * chosen
        strength = theta_eta.sigmoid().view(per_head) * chosen
        q, k, v, log_decay, strength = (x.flatten(0, 2) for x in (q, k, v, log_decay, strength))
        # each slot of a head is a row of the batch with one state
        flat = {name: x.flatten(0, 1).unsqueeze(1) for name, x in before.items()}
        read, matrix = write_and_read(self.options.rule, q, k, v, strength, log_decay, flat.get("matrix"))
        after = {"matrix": matrix}
        if self.options.z_norm:
            found, after["mass"] = linear_attention(
                q, k, strength.unsqueeze(-1), log_decay, flat.get("mass"), scale=1.0, in_place=True
            )
            read = read / found.abs().clamp_min(1)
        return read.unflatten(0, rows), {name: x.reshape(rows[0], -1, *x.shape[2:]) for name, x in after.items()}


class TensorCache(UngatedMemory):
    """The second-level cache of a layer: one or two :class:`Timescale`, a scalar gate, a projection, maybe a router."""

    kind = "tensor-cache"
    Options = TensorCacheOptions

    def __init__(self, config: Any, window: int, sinks: int, options: Any):
        super().__init__(config, window, sinks, options)
        self.fast = Timescale(self.kv_heads, options)
        if options.two_timescale:
            self.slow = Timescale(self.kv_heads, options)
            self.alpha = nn.Parameter(torch.empty(self.kv_heads))
        if options.slots > 1:
            self.slot_keys = nn.Parameter(torch.empty(self.kv_heads, options.slots, self.head_dim))
        self.gate = nn.Parameter(torch.empty(1))
        self.W_tc = LargeLinear(self.heads * self.head_dim, self.hidden_size, bias=False)

    def reset_parameters(self) -> None:
        for name, (decay, strength) in TIMESCALES.items():
            if hasattr(self, name):
                timescale = getattr(self, name)
                init.constant_(timescale.theta_lambda, math.log(decay / (1 - decay)))
                init.constant_(timescale.theta_eta, math.log(strength / (1 - strength)))
        if self.options.two_timescale:
            init.zeros_(self.alpha)  # half of the slow read
        if self.options.slots > 1:
            init.normal_(self.slot_keys, std=0.02)
        init.constant_(self.gate, GATE)
        init.zeros_(self.W_tc.weight)  # a fresh memory adds exactly nothing, and still has a gradient

    def state_tensors(self, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Kept]:
        rows, D = self.kv_heads * self.options.slots, self.head_dim
        each = {"matrix": (rows, D, D), "mass": (rows, D, 1)} if self.options.z_norm else {"matrix": (rows, D, D)}
        names = ("fast", "slow") if self.options.two_timescale else ("fast",)
        return {f"{name}.{part}": Kept(shape, wide(dtype)) for name in names for part, shape in each.items()}

    @property
    def products(self) -> float:
        reads = super().products - 1
        return 1 + reads * (1 + (self.options.rule == "wedge")) + (self.options.rule == "delta")

    def exchange(self, step: Step, pairs: Pairs, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        options = self.options
        q, k, v = (x.to(wide(x.dtype)) for x in (pairs.q, pairs.k, pairs.v))
        if options.rule == "wedge" or options.slots > 1:  # the others see nothing but distances
            q, k = step.now.from_first_token(q), step.now.from_first_token(k)
        q = q.unflatten(1, (self.kv_heads, -1))  # (B, H_kv, G, m, D)
        q = unit(q) if options.normalize_queries else q
        k = unit(k) if options.normalize_keys else k
        chosen, weights = self._route_tokens(q, k)
        slots = (-1, -1, options.slots, -1, -1, -1)
        rows = (
            q.unsqueeze(2).expand(slots),
            *(x[:, :, None, None].expand(slots) for x in (k, v * options.value_scale)),
        )

        read = torch.zeros_like(q)
        new: dict[str, Tensor] = {}  # a compiler cannot trace dict[str, Tensor]()
        for name in ("fast", "slow")[: 1 + options.two_timescale]:
            before = {part: state[f"{name}.{part}"] for part in ("matrix", "mass") if f"{name}.{part}" in state}
            found, after = getattr(self, name)(*rows, chosen, before)
            new |= {f"{name}.{part}": x for part, x in after.items()}
            found = found.squeeze(2) if weights is None else (found * weights.unsqueeze(-1)).sum(2)
            read = read + (found if name == "fast" else found * self.alpha.to(read.dtype).sigmoid().view(-1, 1, 1, 1))
        return read.flatten(1, 2), new

    def _route_tokens(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where keys (B, H_kv, m, D) go, ``(B, H_kv, slots, 1, m)`` of 0 and 1, and what queries take of each slot.

        The choice of the slot is hard, its gradient that of the softmax (straight-through). The weights are
        ``(B, H_kv, slots, G, m)``; None with a single slot.
        """
        if self.options.slots == 1:
            return k.new_ones(*k.shape[:2], 1, 1, k.shape[2]), None
        slot_keys = unit(self.slot_keys.to(k.dtype))
        scale = 1 / (math.sqrt(self.head_dim) * self.options.temperature)
        likely = (torch.einsum("bhmd,hsd->bhsm", unit(k), slot_keys) * scale).softmax(2)
        hard = torch.zeros_like(likely).scatter(2, likely.argmax(2, keepdim=True), 1.0)
        chosen = hard + (likely - likely.detach())
        top = (torch.einsum("bhgmd,hsd->bhsgm", unit(q), slot_keys) * scale).topk(self.options.top_k, 2)
        weights = q.new_zeros(*q.shape[:2], self.options.slots, *q.shape[2:4])
        return chosen.unsqueeze(3), weights.scatter(2, top.indices, top.values.softmax(2))

    def join(self, near: Tensor, read: Tensor) -> Joined:
        added = self.W_tc(read.transpose(1, 2).flatten(2))
        return near, (added * self.gate.to(added.dtype).sigmoid()).to(near.dtype)


def unit(x: Tensor) -> Tensor:
    """``x`` scaled to length 1 along its last dimension as the authors do it, which is not as AHN's do."""
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + UNIT_EPS)

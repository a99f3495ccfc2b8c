"""Joint: one memory with two branches that enter the window's softmax by their mass.

Half of the state is decayed linear attention with positive features, whose normaliser (its *mass*) is comparable with
the window's; the other half is a gated delta rule, which keeps apart what the first half blurs. Ours; see
docs/memories/joint.md for the equations and what each part is worth.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import one_hot, pad
from transformers import initialization as init

from .errors import RetrofitError, one_of
from .kernels import gated_delta_rule, linear_attention
from .memory import Evicted, Joined, Kept, Step, WindowMemory
from .modules import HeadLinear, WideLinear
from .options import Options, true_or_false, whole_number
from .precision import cast, wide
from .rotary import rotate
from .scan import per_state
from .sequence import Pass

MASS_EPS = 1e-3  # beside the mass when the linear branch is read
NO_MASS = 1e-30  # the log of a smaller mass is not told apart: it weighs nothing against any window
FORGETTING = 3e-3  # decay per token, about, at the start
MOST_FEATURES = 256  # of a key in flash-linear-attention's kernels
DELTA_LEAD = -3.0  # of the delta branch's logit over the linear one's, at a start that is calculated
OPENING = 10.0  # steepness of the gate that starts at zero; with 1 a short training ends before it is open


@dataclass(frozen=True)
class JointOptions(Options):
    """Options of ``joint``.

    Attributes:
        branches: ``"both"``, or ``"linear"``: all of the state to the linear branch, for ordinary text.
        shared_state: whether the query heads of a key head read one state, through maps of their own. Without it each
            has a state of its own.
        features: F, of each branch: a state's bytes are proportional to it. None: as many as keep one state within the
            D^2 numbers of one of AHN's.
    """

    before: ClassVar[dict[str, Any]] = {"shared_state": False}

    branches: str = "both"
    shared_state: bool = True
    features: int | None = None

    def __post_init__(self) -> None:
        one_of("branches", self.branches, "both", "linear")
        true_or_false("shared_state", self.shared_state)
        if self.features is not None:
            whole_number("features", self.features)
            if self.features > MOST_FEATURES:
                raise RetrofitError(f"features={self.features}: give at most {MOST_FEATURES}, kernels take no more")


class Branch(nn.Module):
    """What both branches have: feature maps, write gates, a bias in the softmax and a matrix after the read.

    What writes is there once for each of the H_s states, what reads once for each of the H query heads.
    """

    def __init__(self, hidden: int, heads: int, states: int, dim: int, features: int):
        super().__init__()
        self.q_map = nn.Parameter(torch.empty(heads, dim, features))
        self.k_map = nn.Parameter(torch.empty(states, dim, features))
        self.write = WideLinear(hidden, states)
        self.forget = WideLinear(hidden, states)
        self.logit = WideLinear(hidden, heads)
        self.read_proj = HeadLinear(heads, dim)

    def reset_parameters(self, logit: float) -> None:
        """``logit``: what is added to the logit in the shared softmax at the start."""
        # one frame of orthonormal directions for queries and keys: alike before training, alike after the map
        states, dim, features = self.k_map.shape
        parts = [torch.randn(states, dim, min(dim, features - done)) for done in range(0, features, dim)]
        frame = torch.cat([torch.linalg.qr(part.float()).Q for part in parts], -1)
        init.copy_(self.q_map, frame.repeat_interleave(len(self.q_map) // len(frame), 0))
        init.copy_(self.k_map, frame)
        rate = math.log(math.expm1(FORGETTING))  # the inverse softplus
        for linear, bias in ((self.write, 0.0), (self.forget, rate), (self.logit, logit)):
            init.normal_(linear.weight, std=0.02)
            init.constant_(linear.bias, bias)
        init.zeros_(self.read_proj.weight)

    def mapped(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """``q`` (B, H, m, D) and ``k`` (B, H_kv, m, D) in this branch's features: ``(B, H or H_s, m, F)``."""
        k = per_state(k, len(self.k_map))
        return q @ cast(self.q_map, q.dtype), k @ cast(self.k_map, k.dtype)

    def value(self, read: Tensor) -> Tensor:
        """``read`` (B, H, m, D) as a candidate output: ``(I + W) read``."""
        return read + self.read_proj(read)


def tokens_first(x: Tensor) -> Tensor:
    """A number for each head and token ``(B, H, m, 1)`` as ``(B, m, H)``."""
    return x.view(len(x), 1, -1) if x.shape[2] == 1 else x.squeeze(-1).mT


class LinearBranch(Branch):
    """``S <- a S + beta phi(k) [v, 1]^T``, read as a mean: ``phi(q) S_v / (phi(q) S_1 + eps)``, the mass below it."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor], state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write and read.

        Args:
            q: queries without positions ``(B, H, m, D)``.
            k: written keys, likewise ``(B, H_kv, m, D)``.
            v: written values and a one ``(B, H_kv, m, D + 1)``.
            gates: writing strength and log decay ``(B, H_s, m)``.
            state: the state before ``(B, H_s, F, D + 1)``, or None.

        Returns:
            What is read ``(B, H, m, D)``, the log of its mass ``(B, m, H)``, the new state ``(B, H_s, F, D + 1)``.
        """
        q, k = (x.softmax(-1) for x in self.mapped(q, k))
        beta, log_decay = gates
        k = k * beta.unsqueeze(-1)
        sums, state = linear_attention(q, k, v, log_decay, state, scale=1.0, in_place=True)
        read, mass = sums.split([v.shape[-1] - 1, 1], -1)
        return self.value(read / (mass + MASS_EPS)), tokens_first(mass.clamp_min(NO_MASS).log()), state


class DeltaBranch(Branch):
    """The gated delta rule; its column of ones recalls whether a key is known at all (the *familiarity*)."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor], state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`LinearBranch.forward`, with the familiarity ``(B, m, H)`` in place of the log mass."""
        q, k = self.mapped(q, k)
        beta, log_decay = gates
        sums, state = gated_delta_rule(q, k, v, beta, log_decay, state, scale=1.0, normalise=True, in_place=True)
        read, known = sums.split([v.shape[-1] - 1, 1], -1)
        return self.value(read), tokens_first(known), state


class JointMemory(WindowMemory):
    """Window and memory share one softmax: their weights come from the window's log-sum-exp and the memory's mass."""

    kind = "joint"
    trainable = calibrates = True
    joins_window = needs_plain_queries = True
    Options = JointOptions

    def __init__(self, config: Any, window: int, sinks: int, options: JointOptions):
        super().__init__(config, window, sinks, options)
        if self.head_dim < 4:
            raise RetrofitError(
                f"memory 'joint' needs a head size of 4 or more, this base has {self.head_dim}: use 'ahn-gdn'"
            )
        self.both = options.branches == "both"
        self.features = options.features or self.usual_features()
        self.states = self.kv_heads if options.shared_state else self.heads  # H_s
        shape = (self.hidden_size, self.heads, self.states, self.head_dim, self.features)
        self.linear = LinearBranch(*shape)
        self.delta = DeltaBranch(*shape) if self.both else None
        self.opening = nn.Parameter(torch.empty(self.heads))  # s
        self.window_weight = nn.Parameter(torch.empty(self.heads))  # w
        if self.both:
            self.familiarity = nn.Parameter(torch.empty(self.heads))  # r
        self._known: dict[str, Any] = {}  # of texts, while they are read

    def usual_features(self) -> int:
        """F where nothing is said."""
        # with the column of ones a feature less keeps a state within AHN's D^2: 2 (D/2 - 1) (D + 1) < D^2
        return self.head_dim // 2 - 1 if self.both else self.head_dim - 1

    def reset_parameters(self) -> None:
        self.linear.reset_parameters(logit=0.0)
        init.zeros_(self.opening)
        init.ones_(self.window_weight)
        if self.delta is not None:
            self.delta.reset_parameters(logit=-1.0)
            init.zeros_(self.familiarity)

    # ---- calibration: a start that is calculated ----

    @torch.no_grad()
    def observe(self, step: Step, again: bool) -> None:
        """Look at a text: at what keys and queries are like, and ``again``, when maps are made, at what they give.

        Of a text shorter than two windows the first half counts as gone.
        """
        window = min(self.window, (step.now.new - self.sinks) // 2)
        if window < 1:
            return
        if again:
            observe_mass(self._known, self, step, window)
        else:
            observe_heads(self._known, step, window, self.sinks)

    @torch.no_grad()
    def settle(self, costs: Tensor) -> None:
        """Calculate from what was observed since the last time: the linear branch's maps, or logits and openings.

        Raises:
            RetrofitError: no text was longer than the sinks.
        """
        known, self._known = self._known, {}
        if not known:
            raise RetrofitError(f"no text is longer than {self.sinks + 1} tokens: calibrate on longer ones")
        if "k" in known:
            group = self.heads // self.states
            for state in range(self.states):
                heads = slice(state * group, (state + 1) * group)
                q_map, k_map = feature_maps(known, heads, state * self.kv_heads // self.states, self.features)
                self.linear.q_map[heads] = q_map.to(self.linear.q_map.dtype)
                self.linear.k_map[state] = k_map.to(self.linear.k_map.dtype)
            return
        weight, bias, openness = logits_and_openness(known)
        self.opening.copy_(openness.atanh() / OPENING)
        for branch, lead in ((self.linear, 0.0), (self.delta, DELTA_LEAD)):
            if branch is not None:
                branch.logit.weight.copy_(weight)
                branch.logit.bias.copy_(bias + lead)

    def state_tensors(self, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Kept]:
        kept = Kept((self.states, self.features, self.head_dim + 1), wide(dtype))
        return {"linear": kept, "delta": kept} if self.both else {"linear": kept}

    def write_gates(self, x: Tensor) -> Tensor:
        """Writing strengths in (0, 1), then log decays below 0, by branch and state ``(B, n, 2 or 4 H_s)``, float32."""
        branches = [self.linear] if self.delta is None else [self.linear, self.delta]
        projected = torch.cat([branch.write(x) for branch in branches] + [branch.forget(x) for branch in branches], -1)
        write, forget = projected.chunk(2, -1)
        return torch.cat([write.sigmoid(), -F.softplus(forget)], -1)

    def state_flops(self, evicted: int) -> int:
        # each branch: a write, a read by every query of the group; the delta rule corrects by a read of its key
        products = (1 + self.both) * (self.states + self.heads) + self.both * self.states
        return 2 * self.features * (self.head_dim + 1) * products * evicted

    def recall(self, step: Step, near: Tensor, lse: Tensor | None, gone: Evicted) -> Joined:
        assert gone.gates is not None
        assert lse is not None
        first, dtype = gone.first, gone.gates.dtype
        out = near[:, :, first:] if first else near
        lse = lse[:, :, first:] if first else lse
        log_mass, logits, candidates = self._read_branches(step, gone)
        # the log of the linear branch's mass is common to all branch logits: subtracted once, from the window's
        window_logit = cast(self.window_weight, dtype) * cast(lse, dtype).mT - log_mass
        weights = torch.stack([window_logit, *logits], -1).softmax(-1)  # (B, m, H, 1 + branches)
        # 0 at first: the window keeps all
        weights = (weights * (OPENING * cast(self.opening, dtype)).tanh().unsqueeze(-1)).transpose(1, 2)
        window = cast(out, dtype)
        _, weight, *others = weights.split(1, -1)
        out = torch.lerp(window, candidates[0], weight)
        for weight, candidate in zip(others, candidates[1:], strict=True):
            out = torch.addcmul(out, weight, candidate - window)
        out = cast(out, near.dtype)
        return (torch.cat([near[:, :, :first], out], 2) if first else out), None

    def _read_branches(self, step: Step, gone: Evicted) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Write and read: the log mass, each branch's logit above it ``(B, m, H)``, and its output ``(B, H, m, D)``."""
        assert gone.gates is not None
        state, dtype, gates = step.layer.state, gone.gates.dtype, gone.gates.split(self.states, 1)
        x, _ = step.readers(gone.first)
        # before rotation: features of rotated keys would depend on where a text begins, not on distances alone
        q, k = step.plain_queries(gone.first, dtype), gone.plain_keys(step.now, dtype)
        v = pad(cast(gone.v, dtype), (0, 1), value=1.0)
        read, log_mass, state["linear"] = self.linear(q, k, v, gates[:: 1 + self.both], state.get("linear"))
        logits, candidates = [self.linear.logit(x)], [read]
        if self.delta is not None:
            read, known, state["delta"] = self.delta(q, k, v, gates[1::2], state.get("delta"))
            logits.append(torch.addcmul(self.delta.logit(x), cast(self.familiarity, known.dtype), known))
            candidates.append(read)
        return log_mass, logits, candidates


# ---- an initialisation that is calculated from texts: docs/memories/joint.md ----
#
# On average over the distances beyond the window, a query q meets a key k as ``q . E k``. The keys of a text are put
# into F clusters. A query's feature is the attention that it would pay to a cluster's centre, a key's feature is the
# cluster in which it lies: so the branch reads what full attention would if each key lay at its centre. A regression
# on the attention's input gives the mass that is then missing, and each head opens as far as that helps.

KEYS, QUERIES = 4096, 256  # of a text that are looked at, evenly spread over it
MOST_KEYS, MOST_QUERIES = 32768, 2048  # of all texts together
POWER = 0.5  # of the expected weight, with which a key counts in its cluster
WIDTH = 0.2  # of the border between two clusters, in logits
ROUNDS = 15  # of k-means
RIDGE = 0.3  # of the regression, times the inputs' sum of squares
LEAST_OPEN, MOST_OPEN = 0.02, 0.9
LEAST = 1e-6  # a shorter value counts as one of this length
SLICE = 64  # queries whose attention is written out at a time
Known = dict[str, Any]  # of one layer


def mean_turn(now: Pass, first: int, last: int, dim: int, dtype: torch.dtype) -> Tensor:
    """E (D, D): keys (n, D) times it are met by queries ``first`` to ``last - 1`` positions later, on average."""
    cos, sin = (x.to(dtype) for x in now.mean_tables(first, last - first))
    units = torch.eye(dim, dtype=dtype, device=now.device)[None, None]
    units = rotate(units, *(x.to(dtype) for x in now.tables_at_zero()))
    return rotate(units, cos, -sin)[0, 0]


def observe_heads(known: Known, step: Step, window: int, sinks: int) -> None:
    """Add a text's keys, lengths of values and queries, none of them rotated, to what is ``known``."""
    if sum(k.shape[1] for k in known.get("k", [])) >= MOST_KEYS:
        return
    every = -(-step.k.shape[2] // KEYS)
    dtype = wide(step.k.dtype)
    # a sink draws more attention than all others together, and never leaves
    k, v = (x[:, :, sinks::every].transpose(0, 1).flatten(1, 2).to(dtype) for x in (step.k, step.v))
    known.setdefault("k", []).append(k)
    known.setdefault("length", []).append(v.norm(dim=-1).clamp_min(LEAST))
    q = step.q.transpose(0, 1).flatten(1, 2).double() * step.scale  # (H, tokens, D)
    for name, sums in (("n", q.shape[1]), ("q", q.sum(1)), ("qq", q.mT @ q)):
        known[name] = known.get(name, 0) + sums
    longest = max(step.now.new, known.get("longest", 0))
    turn = mean_turn(step.now, window, max(window + 1, longest - sinks), k.shape[-1], dtype)
    known |= {"longest": longest, "turn": turn, "scale": step.scale}


def feature_maps(known: Known, heads: slice, kv_head: int, features: int) -> tuple[Tensor, Tensor]:
    """The maps of one state: of its query ``heads`` (D, F), the same for all of them, and of its keys (D, F)."""
    k, length = (torch.cat(known[name], 1)[kv_head] for name in ("k", "length"))
    mean, square = (known[name][heads] / known["n"] for name in ("q", "qq"))
    covariance = square - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    mean, spread = mean.to(k.dtype), _take_root(covariance).to(k.dtype)
    metric = _take_root(square.mean(0)).to(k.dtype)
    met = k @ known["turn"]
    # the log of the weight that a key is expected to get from each query head, as in patches/expected.py
    expected = (met @ mean.unsqueeze(-1)).squeeze(-1) + (met @ spread).square().sum(-1) / 2
    expected = expected.logsumexp(0)
    weight = (POWER * (expected - expected.max())).exp() * length
    place = met @ metric  # two keys are as far apart as the logits that queries give them, by root mean square
    centres = _find_centres(place, weight, features)
    # the nearest centre has the largest p.c - c.c / 2, of which a product with k gives the second part about, too
    half = centres.square().sum(-1) / 2
    from_mean = (centres - centres.mean(0)).mT
    k_map = known["turn"] @ metric @ from_mean - _find_constant(k).unsqueeze(-1) * (half - half.mean())
    k_map = k_map / WIDTH**2
    part = (k @ k_map).softmax(-1) * weight.unsqueeze(-1)  # what lies in which cluster, as the map tells
    centres = (part.mT @ met) / part.sum(0).clamp_min(torch.finfo(k.dtype).tiny).unsqueeze(-1)
    return known["scale"] * (centres - centres.mean(0)).mT, k_map


def observe_mass(known: Known, memory: Any, step: Step, window: int) -> None:
    """Add some queries of a text: what the linear branch of ``memory`` reads for them, and what full attention does."""
    sinks, count = memory.sinks, step.k.shape[2] - memory.sinks - window
    if sum(len(x) for x in known.get("x", [])) >= MOST_QUERIES:
        return
    first, dtype = sinks + window, wide(step.k.dtype)
    q, k, v = (x.to(dtype) for x in (step.q, step.k, step.v))
    gone = slice(sinks, sinks + count)
    gates = memory.write_gates(step.x).mT[:, :, gone].split(memory.states, 1)[:: 1 + memory.both]
    far, mass, _ = memory.linear(q[:, :, first:], k[:, :, gone], pad(v[:, :, gone], (0, 1), value=1.0), gates, None)
    far = far.transpose(1, 2)  # tokens before heads: some tokens are looked at, one after the other
    turn = step.now.tables(0, step.now.new, dtype)
    q, k = rotate(q, *turn).unflatten(1, (memory.kv_heads, -1)), rotate(k, *turn)
    j = torch.arange(k.shape[2], device=k.device)
    for t in torch.arange(first, first + count, -(-count // QUERIES), device=k.device).split(SLICE):
        group = (q.shape[2], len(t))
        logits = (q[:, :, :, t].flatten(2, 3) @ k.mT).unflatten(2, group) * step.scale  # (B, H_kv, G, t, T)
        later = j > t[:, None]
        beyond = (j >= sinks) & (j <= t[:, None] - window)
        masses = [logits.masked_fill(hidden, -math.inf).logsumexp(-1) for hidden in (~beyond, beyond | later)]
        outs = [
            (logits.masked_fill(hidden, -math.inf).softmax(-1).flatten(2, 3) @ v).unflatten(2, group)
            for hidden in (later, beyond | later)
        ]
        beyond_mass, near_mass = (x.flatten(1, 2).mT for x in masses)  # (B, t, H)
        full, near = (x.flatten(1, 2).transpose(1, 2) for x in outs)  # (B, t, H, D)
        own_mass, own = mass[:, t - first], far[:, t - first] - near
        for name, value in (
            ("x", step.x[:, t].to(dtype)),
            ("missing", beyond_mass - own_mass),
            ("excess", own_mass - near_mass),
            ("gain", (own * (full - near)).sum(-1)),
            ("size", own.square().sum(-1)),
        ):
            known.setdefault(name, []).append(value.flatten(0, 1))


def logits_and_openness(known: Known) -> tuple[Tensor, Tensor, Tensor]:
    """Weights ``(H, E)`` and biases ``(H,)`` of the linear branch's logit, and how far each head opens ``(H,)``.

    The first two give the mass that is missing, from the input. With that mass, and as if there were no delta branch, a
    head's output ``near + s z (far - near)`` is nearest to full attention's at s.
    """
    x, missing, excess, gain, size = (
        torch.cat(known[name]).double() for name in ("x", "missing", "excess", "gain", "size")
    )
    middle, mean = x.mean(0), missing.mean(0)
    x = x - middle
    ridge = RIDGE * x.square().sum() / x.shape[1] + torch.finfo(x.dtype).tiny
    kernel = x @ x.mT + ridge * torch.eye(len(x), dtype=x.dtype, device=x.device)
    weight = x.mT @ torch.linalg.solve(kernel, missing - mean)
    share = (excess + mean + x @ weight).sigmoid()
    best = (share * gain).sum(0) / (share.square() * size).sum(0).clamp_min(torch.finfo(x.dtype).tiny)
    return weight.mT, mean - middle @ weight, best.clamp(LEAST_OPEN, MOST_OPEN)


def _take_root(square: Tensor) -> Tensor:
    """A with ``A A^T = square``, which is symmetric and has no negative eigenvalues ``(.., D, D)``."""
    values, vectors = torch.linalg.eigh(square)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)


def _find_constant(k: Tensor) -> Tensor:
    """u (D,) whose product with each key ``(n, D)`` is as near to 1 as can be."""
    gram = k.mT @ k
    ridge = 1e-3 * gram.diagonal().mean() + torch.finfo(k.dtype).tiny
    return torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=k.dtype, device=k.device), k.sum(0))


def _find_centres(points: Tensor, weight: Tensor, count: int) -> Tensor:
    """``count`` centres (count, D) of ``points`` (n, D) with weights, by k-means with a seed of its own."""
    chance, tiny = torch.Generator(points.device).manual_seed(0), torch.finfo(points.dtype).tiny
    centres = points[torch.multinomial(weight + tiny, 1, generator=chance)]
    far = (points - centres).square().sum(-1)
    for _ in range(count - 1):  # k-means++: the next one where points are far from all others
        new = points[torch.multinomial(weight * far + tiny, 1, generator=chance)]
        centres, far = torch.cat([centres, new]), torch.minimum(far, (points - new).square().sum(-1))
    for _ in range(ROUNDS):
        part = one_hot(torch.cdist(points, centres).argmin(1), count).to(points.dtype) * weight.unsqueeze(-1)
        total = part.sum(0).unsqueeze(-1)
        centres = torch.where(total > 0, (part.mT @ points) / total.clamp_min(tiny), centres)
    return centres

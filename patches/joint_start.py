"""A start for ``joint``'s linear branch that is calculated from a few thousand tokens of text; see
docs/memories/joint.md for what it is worth.

Written without positions, a key meets the queries of a far position turned by the average rotation of the distances
ahead: ``q . E k``. The keys of a text fall into F clusters, in a metric that tells them apart as far as queries do. A
key's feature is the cluster in which it lies, a query's feature the attention that it would pay to the cluster's
centre. So the branch reads what full attention would, with each key moved to its centre. What is left is the mass,
which a least squares fit to the attention's input gives, and how far each head opens.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .precision import wide
from .rotary import rotate
from .step import Pass, Step

KEYS, QUERIES = 4096, 256  # of a text that are looked at, evenly spread over it
POWER = 0.5  # of the expected weight, with which a key counts in its cluster
SHARPNESS = 0.2  # of clusters: the distance, in logits, at which a key begins to belong to two of them
ROUNDS = 15  # of k-means
RIDGE = 0.3  # times the mean square of the inputs
LEAST_OPEN, MOST_OPEN = 0.02, 0.9
SLICE = 64  # queries whose attention is written out at a time
Known = dict[str, Any]


def mean_turn(now: Pass, first: int, last: int, dim: int, dtype: torch.dtype) -> Tensor:
    """E (D, D), by which a key (n, D) is multiplied from the right: its mean turn for queries ``first`` to ``last - 1``
    positions later."""
    ahead = torch.arange(first, last, device=now.device)[None]
    cos, sin = (x.mean(1, keepdim=True).to(dtype) for x in now.turn(ahead))
    units = torch.eye(dim, dtype=dtype, device=now.device)[None, None]
    units = rotate(units, *(x.to(dtype) for x in now.turn_of_zero()))
    return rotate(units, cos, -sin)[0, 0]


def observe_heads(known: Known, step: Step, window: int, sinks: int) -> None:
    """Add a text's keys, values' lengths and queries, none of them rotated, to what is ``known`` of a layer."""
    k, q = (x.to(wide(x.dtype)) for x in (step.k, step.q))
    every = -(-k.shape[2] // KEYS)
    k, v = (x[:, :, sinks::every] for x in (k, step.v))  # a sink draws more attention than all others, and never leaves
    length = v.to(k.dtype).norm(dim=-1)
    q = q.transpose(0, 1).flatten(1, 2) * step.scale  # (H, tokens, D)
    known.setdefault("k", []).append(k.transpose(0, 1).flatten(1, 2))
    known.setdefault("length", []).append(length.transpose(0, 1).flatten(1))
    for name, sums in (("n", q.shape[1]), ("q", q.double().sum(1)), ("qq", q.mT.double() @ q.double())):
        known[name] = known.get(name, 0) + sums
    last = max(window + step.now.new, known.get("last", 0))
    if last != known.get("last"):
        known |= {"last": last, "turn": mean_turn(step.now, window, last, q.shape[-1], q.dtype)}
    known["scale"] = step.scale


def feature_maps(known: Known, heads: slice, kv_head: int, features: int) -> tuple[Tensor, Tensor]:
    """The maps of a state: of each of its query heads ``(G, D, F)``, and of its keys ``(D, F)``."""
    k, length = (torch.cat(known[name], 1)[kv_head] for name in ("k", "length"))
    turn = known["turn"]
    mean = (known["q"] / known["n"])[heads]
    spread = _root((known["qq"] / known["n"])[heads] - mean.unsqueeze(-1) * mean.unsqueeze(-2)).to(k.dtype)
    met = k @ turn  # as far queries meet them
    expected = met @ mean.to(k.dtype).unsqueeze(-1)  # the log of the weight that each query head is expected to give
    expected = expected.squeeze(-1) + (met @ spread).square().sum(-1) / 2
    level = expected.logsumexp(0)
    weight = (POWER * (level - level.max())).exp() * length
    metric = _root((spread @ spread.mT).mean(0).double()).to(k.dtype)
    seen = met @ metric  # two keys are as far apart as the logits that queries give them
    nearest = _cluster(seen, weight, features)
    ones = torch.nn.functional.one_hot(nearest, features).to(k.dtype) * weight.unsqueeze(-1)
    total = ones.sum(0).unsqueeze(-1)
    middle = (weight @ k) / weight.sum()
    centres = torch.where(total > 0, (ones.mT @ k) / total.clamp_min(torch.finfo(k.dtype).tiny), middle)
    q_map = known["scale"] * ((centres - centres.mean(0)) @ turn).mT
    # the nearest centre has the largest k.c - c.c / 2, of which a product with k can give the second part, too
    placed = centres @ turn @ metric
    half = placed.square().sum(-1) / 2
    k_map = turn @ metric @ (placed - placed.mean(0)).mT - _constant(k).unsqueeze(-1) * (half - half.mean())
    return q_map.expand(heads.stop - heads.start, -1, -1), k_map / SHARPNESS**2


def observe_mass(known: Known, memory: Any, step: Step) -> None:
    """Add some queries of a text: what the linear branch reads for them, and what full attention gives them."""
    first = memory.capacity
    count = step.k.shape[2] - first
    if count <= 0:
        return
    dtype = wide(step.k.dtype)
    q, k, v = (x.to(dtype) for x in (step.q, step.k, step.v))
    gone = slice(memory.sinks, memory.sinks + count)
    gates = memory.write_gates(step.x)[:, gone].split(memory.states, -1)[:: 1 + memory.both]
    far, mass, _ = memory.linear(q[:, :, first:], k[:, :, gone], pad(v[:, :, gone], (0, 1), value=1.0), gates, None)
    turn = tuple(x.to(dtype) for x in step.now.turn_of_slots(0, step.now.new))
    q, k = rotate(q, *turn).unflatten(1, (memory.kv_heads, -1)), rotate(k, *turn)
    for t in torch.arange(first, first + count, -(-count // QUERIES), device=q.device).split(SLICE):
        logits = q[:, :, :, t] @ k.mT.unsqueeze(2) * step.scale  # (B, H_kv, G, t, T)
        j = torch.arange(k.shape[2], device=t.device)
        beyond = (j >= memory.sinks) & (j <= t[:, None] - memory.window)
        parts = []
        for hidden in (~beyond, beyond | (j > t[:, None])):
            part = logits.masked_fill(hidden, -math.inf)
            out = part.softmax(-1) @ v.unsqueeze(2)
            parts += [out.flatten(1, 2).transpose(1, 2), part.logsumexp(-1).flatten(1, 2).mT]  # (B, t, H, ...)
        beyond_out, beyond_mass, near_out, near_mass = parts
        share = (beyond_mass - near_mass).sigmoid().unsqueeze(-1)  # of full attention
        own, full = (share * (out - near_out) for out in (far[:, t - first], beyond_out))
        known.setdefault("x", []).append(step.x[:, t].to(dtype).flatten(0, 1))
        known.setdefault("missing", []).append((beyond_mass - mass[:, t - first]).flatten(0, 1))
        for name, other in (("own", own), ("full", full)):
            known[name] = known.get(name, 0) + (own * other).sum((0, 1, 3))


def logit_weights(known: Known) -> tuple[Tensor, Tensor]:
    """Weights ``(H, E)`` and biases ``(H,)`` that give the mass that the linear branch lacks, from the input."""
    x, missing = (torch.cat(known[name]).double() for name in ("x", "missing"))
    middle, mean = x.mean(0), missing.mean(0)
    x, missing = x - middle, missing - mean
    ridge = RIDGE * x.square().sum() / x.shape[1]
    kernel = x @ x.mT  # queries are fewer than numbers of an input, or not many more
    weight = (x.mT @ torch.linalg.solve(kernel + ridge * torch.eye(len(x), dtype=x.dtype, device=x.device), missing)).mT
    return weight, mean - weight @ middle


def openness(known: Known) -> Tensor:
    """How far each head opens ``(H,)``: where its output is nearest to full attention's, if that is between limits."""
    best = known["full"] / known["own"].clamp_min(torch.finfo(known["own"].dtype).tiny)
    return best.clamp(LEAST_OPEN, MOST_OPEN)


def _root(square: Tensor) -> Tensor:
    """A with ``A A^T`` = ``square`` (.., D, D), symmetric and not negative."""
    values, vectors = torch.linalg.eigh(square)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)


def _constant(k: Tensor) -> Tensor:
    """u (D,) whose product with each key ``(n, D)`` is nearest to 1."""
    gram = k.mT @ k
    ridge = 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), dtype=k.dtype, device=k.device)
    return torch.linalg.solve(gram + ridge, k.sum(0))


def _cluster(points: Tensor, weight: Tensor, count: int) -> Tensor:
    """The cluster ``(n,)`` of each of the ``points`` (n, D), by k-means with weights, the same every time."""
    chance = torch.Generator(points.device).manual_seed(0)
    tiny = torch.finfo(points.dtype).tiny
    centres = points[torch.multinomial(weight + tiny, 1, generator=chance)]
    far = (points - centres).square().sum(-1)
    for _ in range(count - 1):  # k-means++: a next one where the points are badly served
        new = points[torch.multinomial(weight * far + tiny, 1, generator=chance)]
        centres, far = torch.cat([centres, new]), torch.minimum(far, (points - new).square().sum(-1))
    for _ in range(ROUNDS):
        nearest = torch.cdist(points, centres).argmin(1)
        total = weight.new_zeros(count).index_add_(0, nearest, weight).unsqueeze(-1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points * weight.unsqueeze(-1))
        centres = torch.where(total > 0, sums / total.clamp_min(tiny), centres)
    return torch.cdist(points, centres).argmin(1)

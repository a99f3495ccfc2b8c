"""A start for ``joint``'s linear branch that is calculated from a few thousand tokens of text: docs/memories/joint.md.

On average over the distances beyond the window, a query q meets a key k as ``q . E k``. The keys of a text are put into
F clusters. A query's feature is the attention that it would pay to a cluster's centre, a key's feature is the cluster
in which it lies: so the branch reads what full attention would if each key lay at its centre. A regression on the
attention's input gives the mass that is then missing, and each head opens as far as that helps.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from .memory import Step
from .precision import wide
from .rotary import rotate
from .sequence import Pass

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
    mean, spread = mean.to(k.dtype), _root(covariance).to(k.dtype)
    metric = _root(square.mean(0)).to(k.dtype)
    met = k @ known["turn"]
    # the log of the weight that a key is expected to get from each query head, as in patches/expected.py
    expected = (met @ mean.unsqueeze(-1)).squeeze(-1) + (met @ spread).square().sum(-1) / 2
    expected = expected.logsumexp(0)
    weight = (POWER * (expected - expected.max())).exp() * length
    place = met @ metric  # two keys are as far apart as the logits that queries give them, by root mean square
    centres = _cluster(place, weight, features)
    # the nearest centre has the largest p.c - c.c / 2, of which a product with k gives the second part about, too
    half = centres.square().sum(-1) / 2
    k_map = known["turn"] @ metric @ (centres - centres.mean(0)).mT - _constant(k).unsqueeze(-1) * (half - half.mean())
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


def _root(square: Tensor) -> Tensor:
    """A with ``A A^T = square``, which is symmetric and has no negative eigenvalues ``(.., D, D)``."""
    values, vectors = torch.linalg.eigh(square)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)


def _constant(k: Tensor) -> Tensor:
    """u (D,) whose product with each key ``(n, D)`` is as near to 1 as can be."""
    gram = k.mT @ k
    ridge = 1e-3 * gram.diagonal().mean() + torch.finfo(k.dtype).tiny
    return torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=k.dtype, device=k.device), k.sum(0))


def _cluster(points: Tensor, weight: Tensor, count: int) -> Tensor:
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

"""Memories without parameters that keep some tokens as they are and drop the rest: what every such policy shares.

A policy (``tova.py``, ``h2o.py``) scores the entries it holds by the attention they receive; the one with the lowest
score goes. Dropping comes *after* the output, as in the methods' own code: between calls ``capacity`` entries are held,
and a query sees those and itself. So up to ``capacity`` tokens nothing was ever missing, and the base's own attention
runs.

With ``prefill="full"`` (the methods' own code) all T tokens of a call are held meanwhile, with ``"chunk"`` never more
than ``capacity + chunk``; both depend on how a text is cut into calls. ``"token"`` does not: the logits of a block of
queries are one matrix product, and only who goes is decided in a loop over tokens. ``chunk=1`` is the same, plainly.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from .errors import one_of
from .memory import Joined, Memory, Step
from .options import Options, whole_number
from .precision import wide

LOGITS = 2**22  # logits held at a time on a CPU, in elements
GPU_LOGITS = 2**28  # and on a GPU, where launches count; not measured
CHUNK = 1024  # the most tokens between drops that is chosen unasked
BLOCK = 128  # queries whose logits are made together where an entry is dropped after each


@dataclass(frozen=True)
class EvictionOptions(Options):
    """Attributes:
    scope: who shares a choice of entries: all heads of a ``"layer"``, or the queries of one key/value ``"head"``.
    prefill: when entries are dropped within a call: after every ``"chunk"`` or every ``"token"``, or once (``"full"``).
    chunk: tokens between drops with ``prefill="chunk"``. None: an eighth of the window, 1024 at most; below 16 tokens
        that is every token.
    """

    before: ClassVar[dict[str, Any]] = {"prefill": "token", "chunk": 256}

    scope: str = "layer"
    prefill: str = "chunk"
    chunk: int | None = None

    def __post_init__(self) -> None:
        one_of("scope", self.scope, "layer", "head")
        one_of("prefill", self.prefill, "token", "chunk", "full")
        if self.chunk is not None:
            whole_number("chunk", self.chunk)


class Entries(NamedTuple):
    """Kept tokens, in order of arrival, for N *sets* of heads that choose for themselves (all heads, or each key head).

    Attributes:
        k, v: ``(N, H_kv, R, D)``, with the key heads of one set.
        position: index of each token in its text ``(N, R)``, int32.
        score: what the policy knows of each ``(N, R)``, float32 or wider.
    """

    k: Tensor
    v: Tensor
    position: Tensor
    score: Tensor

    @property
    def size(self) -> int:
        return self.k.shape[2]

    def part(self, first: int, last: int) -> "Entries":
        here = slice(first, last)
        return Entries(self.k[:, :, here], self.v[:, :, here], self.position[:, here], self.score[:, here])

    def join(self, other: "Entries") -> "Entries":
        k, v = torch.cat([self.k, other.k], 2), torch.cat([self.v, other.v], 2)
        position, score = (torch.cat(pair, 1) for pair in zip(self[2:], other[2:], strict=True))
        return Entries(k, v, position, score)

    def take(self, index: Tensor) -> "Entries":
        """The entries at ``index`` (N, R')."""
        sets, heads, held, dim = self.k.shape
        at = torch.arange(0, sets * heads * held, held, device=index.device).view(sets, heads, 1) + index[:, None]
        # whole entries are copied: on a CPU several times faster than gather, which picks number by number
        k, v = (x.flatten(0, 2).index_select(0, at.flatten()).view(sets, heads, -1, dim) for x in (self.k, self.v))
        return Entries(k, v, self.position.gather(1, index), self.score.gather(1, index))


class Eviction(Memory):
    """A policy: what it protects and how it scores; in the cache ``state["positions"]`` (B, sets, entries) says what is
    kept.

    The first S tokens are pinned. A subclass gives ``protected``, ``score`` and, if it keeps more than S + W entries,
    ``capacity``.

    A policy that ``accumulates`` scores over all queries caches them from the first token on.
    """

    trainable, decodes_ragged = False, True
    accumulates: ClassVar[bool] = False
    Options = EvictionOptions

    @property
    def protected(self) -> int:
        """How many of the newest tokens cannot be dropped."""
        raise NotImplementedError

    @property
    def stride(self) -> int:
        """Tokens between drops within a call; 0: the whole call."""
        chunk = max(1, min(CHUNK, self.window // 8)) if self.options.chunk is None else self.options.chunk
        return {"token": 1, "chunk": chunk, "full": 0}[self.options.prefill]

    def score(self, before: Tensor, weights: Tensor) -> Tensor:
        """Scores ``(N, R)`` after some more queries.

        Args:
            before: scores so far ``(N, R)``, zero for a new entry.
            weights: attention of the queries, oldest first, ``(N, H, n, R)``; zero where one is not seen.
        """
        raise NotImplementedError

    @property
    def replaces(self) -> bool:
        """Whether kept tokens take new rotary positions when one is dropped; keys are then held as :meth:`plain`."""
        return False

    def plain(self, x: Tensor, step: Step, start: int) -> Tensor:
        """Queries or keys ``(B, H, n, D)`` of the tokens from ``start`` on, in the form in which they are held."""
        return x

    def turned(self, q: Tensor, k: Tensor, position: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Held queries ``(N, H, n, D)`` and keys ``(N, H_kv, R, D)`` at ``position`` (N, R), ready for their product.

        The queries are those of the last ``n`` entries.
        """
        return q, k

    def state_bytes(self, dtype: torch.dtype, tokens: int | None = None) -> int:
        """As for every memory: tokens beyond S + W, positions (int32) and scores of all tokens."""
        score = wide(dtype).itemsize if self.accumulates else 0
        if tokens is not None and tokens <= self.capacity:
            return self._set_count * tokens * score  # scores are kept from the first token on
        kept = 2 * self.kv_heads * self.head_dim * (self.capacity - self.window - self.sinks) * dtype.itemsize
        return kept + self._set_count * self.capacity * (torch.int32.itemsize + score)

    def state_shapes(self, tokens: int) -> dict[str, tuple[int, ...]]:
        shape = (self._set_count, min(tokens, self.capacity))
        return {"positions": shape, "scores": shape}

    def seen_beyond(self, t: Tensor) -> Tensor:
        past = t - self.capacity
        return self.capacity + 1 + (past % self.stride if self.stride else past)

    def attend(self, step: Step) -> Joined:
        n = step.now.new
        q, held = self._split_queries(step), self._take_held(step)
        new = self._make_entries(self.plain(step.k, step, 0), step.v, step, 0)
        pieces = []
        for first, last, each in self._cut_call(n, self.capacity - held.size):
            held = held.join(new.part(first, last))
            look = self._drop_each if each else self._drop_after
            out, held = look(q[:, :, first:last], held, step)
            pieces.append(out)
        if step.layer.keeps:
            self._keep_entries(held, step)
        return torch.cat(pieces, 2).reshape(step.q.shape).to(step.q.dtype), None

    @torch.no_grad()
    def notice(self, step: Step) -> None:
        """Score the tokens that the base's own attention is about to read."""
        if not self.accumulates:
            return
        scores, total = [], step.now.seen + step.now.new
        for text in step.now.texts:
            one = step.of_text(text, step.layer.part(text, self.state_shapes(text.now.seen)))
            held = self._take_held(one).join(self._make_entries(self.plain(one.k, one, 0), one.v, one, 0))
            score = self._attend_all(self._split_queries(one), held, one)[1] if text.now.new else held.score
            scores.append(pad(score.unflatten(0, (-1, self._set_count)), (total - held.size, 0)))
        step.layer.state["scores"] = torch.cat(scores)

    # ---- two ways to look and drop; both take queries (N, H, n, D) of the last n entries held ----

    def _drop_after(self, q: Tensor, held: Entries, step: Step) -> tuple[Tensor, Entries]:
        """All queries look, then all surplus entries go at once, by the scores after the last query."""
        out, score = self._attend_all(q, held, step)
        held = held._replace(score=score)
        surplus = held.size - self.capacity
        if surplus <= 0:
            return out, held
        order = score + self._protect_sinks(held.position)
        if self.protected:
            order[:, -self.protected :] = torch.inf
        index = order.argsort(dim=1, stable=True)[:, surplus:].sort(1).values
        return out, held.take(index)

    def _drop_each(self, q: Tensor, held: Entries, step: Step) -> tuple[Tensor, Entries]:
        """As :meth:`_drop_after` token by token, for entries that were ``capacity`` before the first query."""
        n, total = q.shape[2], held.size
        logits = self._compute_logits(q, held, step)
        until, score = self._choose_victims(logits.detach(), held)
        turn = torch.arange(n, device=q.device)
        gone = turn[:, None] > until[:, None]  # (N, n, R)
        out = self._read_values(logits.masked_fill(gone.unsqueeze(1), -torch.inf).softmax(-1), held.v, step)
        index = (until < n).to(torch.int8).argsort(dim=1, stable=True)[:, : total - n]
        return out, held._replace(score=score).take(index)

    @torch.no_grad()
    def _choose_victims(self, logits: Tensor, held: Entries) -> tuple[Tensor, Tensor]:
        """The last query that sees each entry ``(N, R)``, n or more if it stays, and the scores after all.

        Args:
            logits: ``(N, H, n, R)``, -inf where a query does not see an entry even if it is kept.
        """
        n, total = logits.shape[2], logits.shape[3]
        first = total - n
        score, standing = held.score, self._protect_sinks(held.position)
        unseen = logits.new_zeros(len(score), 1, total)
        victims = []
        for i, row in enumerate(logits.permute(2, 0, 1, 3).contiguous()):  # (N, H, R)
            weights = (row + unseen).softmax(-1)
            score = self.score(score, weights.unsqueeze(2))
            end = first + i + 1 - self.protected
            victim = (score[:, :end] + standing[:, :end]).argmin(1, keepdim=True)
            standing.scatter_(1, victim, torch.inf)
            unseen[:, 0].scatter_(1, victim, -torch.inf)
            victims.append(victim)
        until = torch.full_like(held.position, n, dtype=torch.long)
        until.scatter_(1, torch.cat(victims, 1), torch.arange(n, device=score.device).expand(len(score), -1))
        return until, score

    def _attend_all(self, q: Tensor, held: Entries, step: Step) -> tuple[Tensor, Tensor]:
        """Causal attention of the queries over all entries ``(N, H, n, D)``, and the scores after it ``(N, R)``."""
        n, score, pieces = q.shape[2], held.score, []
        most = LOGITS if q.device.type == "cpu" else GPU_LOGITS
        block = max(1, most // (q.shape[0] * q.shape[1] * held.size))
        for first in range(0, n, block):
            last = min(first + block, n)
            seen = held.part(0, held.size - n + last)
            weights = self._compute_logits(q[:, :, first:last], seen, step).softmax(-1)
            pieces.append(self._read_values(weights, seen.v, step))
            known = self.score(score[:, : seen.size], weights.detach())
            score = torch.cat([known, score[:, seen.size :]], 1)
        return torch.cat(pieces, 2), score

    def _compute_logits(self, q: Tensor, held: Entries, step: Step) -> Tensor:
        """``(N, H, n, R)`` for queries of the last n entries; -inf for what is later than a query, and for padding."""
        q, k = self.turned(q, held.k.to(q.dtype), held.position, step)
        logits = (_group_queries(q * step.scale, k) @ k.transpose(2, 3)).view(*q.shape[:3], held.size)
        column = torch.arange(held.size, device=q.device)
        query = column[-q.shape[2] :, None]
        return logits.masked_fill(column > query, -torch.inf)

    def _read_values(self, weights: Tensor, v: Tensor, step: Step) -> Tensor:
        weights = dropout(weights, step.dropout)
        return (_group_queries(weights, v) @ v.to(weights.dtype)).view(*weights.shape[:3], -1)

    def _protect_sinks(self, position: Tensor) -> Tensor:
        """What is added to scores ``(N, R)``: sinks never go."""
        standing = torch.zeros(position.shape, dtype=torch.float32, device=position.device)
        return standing.masked_fill_(position < self.sinks, torch.inf)

    # ---- pieces of a call, and the way into the cache and out ----

    def _cut_call(self, n: int, room: int) -> Iterator[tuple[int, int, bool]]:
        """Stretches of a call of ``n`` tokens with space for ``room``, and whether each token of one drops an entry."""
        first = 0
        # of a single token all drop alike, and this is the fast form; a chunk of 1 that was asked for is the plain one
        each = self.options.prefill == "token" or (self.options.chunk is None and 1 in (self.stride, n))
        stride = max(room, 1) if each else self.stride or n
        while first < n:
            last = min(first + stride, n)
            fast = each and first >= room and not self.replaces
            if each and first >= room:
                last = min(first + (BLOCK if fast else 1), n)
            yield first, last, fast
            first = last

    @property
    def _set_count(self) -> int:
        return self.kv_heads if self.options.scope == "head" else 1

    def _split_queries(self, step: Step) -> Tensor:
        """The new queries by set ``(N, H, n, D)``, float32 or wider."""
        q = self.plain(step.q.to(wide(step.q.dtype)), step, 0)
        return q.unflatten(1, (self._set_count, -1)).flatten(0, 1)

    def _make_entries(self, k: Tensor, v: Tensor, step: Step, start: int, score: Tensor | None = None) -> Entries:
        """Entries of each set: keys and values ``(B, H_kv, n, D)`` of the tokens from ``start`` on, ``score`` (B, sets,
        n)."""
        position = step.now.indices(start, k.shape[2])
        position = position.to(torch.int32).expand(len(k), -1).repeat_interleave(self._set_count, 0)
        known = k.new_zeros(position.shape, dtype=wide(k.dtype)) if score is None else score.flatten(0, 1)
        k, v = (x.unflatten(1, (self._set_count, -1)).flatten(0, 1) for x in (k, v))
        return Entries(k, v, position, known)

    def _take_held(self, step: Step) -> Entries:
        """The entries before this call."""
        layer, seen = step.layer, step.now.seen
        if not seen:
            return self._make_entries(step.k[:, :, :0], step.v[:, :, :0], step, 0)
        if "positions" not in layer.state:
            k, scores = self.plain(layer.keys, step, -seen), layer.state.get("scores")
            return self._make_entries(k, layer.values, step, -seen, scores)
        k, v = (x.unflatten(1, (self._set_count, -1)).flatten(0, 1) for x in (layer.keys, layer.values))
        position = layer.state["positions"].flatten(0, 1)
        score = layer.state["scores"].flatten(0, 1) if self.accumulates else None
        return Entries(k, v, position, k.new_zeros(position.shape, dtype=wide(k.dtype)) if score is None else score)

    def _keep_entries(self, held: Entries, step: Step) -> None:
        layer = step.layer
        layer.hold(*(x.unflatten(0, (-1, self._set_count)).flatten(1, 2) for x in (held.k, held.v)))
        layer.aligned = True
        layer.state["positions"] = held.position.unflatten(0, (-1, self._set_count))
        if self.accumulates:
            layer.state["scores"] = held.score.unflatten(0, (-1, self._set_count))


def _group_queries(x: Tensor, like: Tensor) -> Tensor:
    """``(N, H, n, ...) -> (N, H_kv, H / H_kv * n, ...)`` for the key heads of ``like``, which they share."""
    return x.unflatten(1, (like.shape[1], -1)).flatten(2, 3)

"""Expected attention: of what left the window, the tokens stay that future queries are expected to look at.

A key that meets queries of mean m and covariance C has the expected weight ``exp(k.m / sqrt(d) + k.Ck / (2 d))``, m and
C turned by the average rotation over the positions ahead; times the length of its value it is the token's score
("Expected Attention", NVIDIA 2025). That method reads a prompt whole and then cuts it. Here a token is scored once,
when it leaves the window, by queries that were measured beforehand on a few thousand tokens of other text
(:meth:`ExpectedAttention.observe`), so that the memory is bounded from the first token to the last.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from transformers import initialization as init

from .errors import RetrofitError, one_of
from .memory import Evicted, Joined, Kept, Step, WindowMemory
from .merged_softmax import join, look
from .options import Options, whole_number
from .precision import wide
from .rotary import rotate

BLOCK = 128  # evicted tokens that compete for the entries together
LEAST = 1e-6  # below this a spread or a length is taken for it
STEPS = 1024  # scores are rounded to this part of 1: a word has the same score wherever the first layer meets it

Entries = dict[str, Tensor]  # by name, every tensor (B, heads, entries, ...)


# ---- which tokens stay ----

EMPTY = float("-inf")  # the score of a place that holds no token


class Choice(NamedTuple):
    """Who is there while ``n`` tokens arrive at R entries, for each row of the batch and key head.

    Attributes:
        alive: whether each of the R + n candidates is kept after each arrival ``(B, H_kv, n, R + n)``.
        kept: indices of the R candidates that stay after all, in order of arrival ``(B, H_kv, R)``.
    """

    alive: Tensor
    kept: Tensor


def choose(held: Tensor, new: Tensor) -> Choice:
    """Who stays when tokens with scores ``new`` (B, H_kv, n) come, one after the other, to R entries with scores
    ``held`` (B, H_kv, R), in order of arrival and those that hold no token in front.

    A score never changes, so one sort decides: a candidate is there as long as fewer than R that have arrived so far
    stand above it. Of equal scores the later one stands above: the first layer of a model gives the same word the same
    score. With 2 entries that hold scores 5 and 1, a token with 3 takes the place of 1, and one with 2 is dropped:

    >>> choice = choose(torch.tensor([[[5.0, 1.0]]]), torch.tensor([[[3.0, 2.0]]]))
    >>> choice.alive[0, 0].int().tolist()
    [[1, 0, 1, 0], [1, 0, 1, 0]]
    >>> choice.kept[0, 0].tolist()
    [0, 2]
    """
    entries, n = held.shape[-1], new.shape[-1]
    scores = torch.cat([held, new], -1)
    candidate = torch.arange(entries + n, device=scores.device)
    # a stable sort of the reversed order has the later of two equals first
    best_first = scores.shape[-1] - 1 - scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    rank = best_first.argsort(-1)
    held_so_far = (best_first < entries).cumsum(-1)
    beaten_by_held = held_so_far.gather(-1, rank) - (candidate < entries).long()
    beats = rank[..., entries:, None] < rank[..., None, :]  # (.., n, R + n): new token i stands above candidate j
    beaten_by_new = beats.cumsum(-2)
    arrived = candidate < entries + torch.arange(1, n + 1, device=scores.device)[:, None]
    alive = (beaten_by_held.unsqueeze(-2) + beaten_by_new < entries) & arrived & (scores > EMPTY).unsqueeze(-2)
    if not entries:
        return Choice(alive, best_first[..., :0])
    last = alive[..., -1, :] if n else scores > EMPTY
    # empty places in front, then those that stay; both in order of arrival
    kept = last.to(torch.uint8).argsort(dim=-1, stable=True)[..., -entries:]
    return Choice(alive, kept)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """The candidates at ``index`` (B, H_kv, R) of ``x`` (B, H_kv, C, ...) -> ``(B, H_kv, R, ...)``."""
    at = index.view(*index.shape, *[1] * (x.dim() - 3)).expand(*index.shape, *x.shape[3:])
    return x.gather(2, at)


# ---- numbers in few bits ----

BITS = (16, 8, 6, 5, 4)  # 16: the model's own dtype, nothing is rounded
SMALLEST = 1e-12  # a step, so that a token that is its channels' mean divides by something
LARGEST = 2.0**15  # spreads from the mean, of which the scale in 4 bits is still a float16
COARSER = 4  # how many times as coarse as without spreads their steps may be: 1 token in 200 asks for more


class Channels(NamedTuple):
    """What the channels of each head are like: their ``mean`` and ``spread``, both ``(H, D)``."""

    mean: Tensor
    spread: Tensor


def quantise(x: Tensor, channels: Channels, bits: int) -> tuple[Tensor, Tensor]:
    """Round ``x`` (B, H, n, D), less its channels' mean and over their spread, to ``bits`` bits.

    Levels lie at odd multiples of half a scale, as many below zero as above. A channel that hardly varied when it was
    measured must not set the scale of all: where it would, the token is not divided by the spreads. So no number is
    wrong by more than ``COARSER / (2**bits - 1)`` of the token's largest difference from the mean.

    Returns:
        The codes, packed, ``(B, H, n, D * bits / 8)`` uint8, and each token's scale ``(B, H, n, 1)``
        in float16, negative where the spreads have no part in it.

    The scale of [-1, 1] in 4 bits is 1 / 7.5, and its ends are levels:

    >>> channels = Channels(torch.zeros(1, 2), torch.ones(1, 2))
    >>> codes, scale = quantise(torch.tensor([[[[-1.0, 1.0]]]]), channels, bits=4)
    >>> codes.tolist(), restore(codes, scale, channels, bits=4).round(decimals=2).tolist()
    ([[[[240]]]], [[[[-1.0, 1.0]]]])
    """
    far, half = x - channels.mean.unsqueeze(-2), (2**bits - 1) / 2
    largest, farthest = (vector_norm(each, math.inf, -1, True) for each in (far / channels.spread.unsqueeze(-2), far))
    most = (farthest * (COARSER / channels.spread.amax(-1)[:, None, None])).clamp_max(LARGEST)
    scale = (torch.where(largest > most, -farthest, largest) / half).to(torch.float16)
    codes = (far / _compute_steps(scale, channels.spread).clamp_min(SMALLEST) + half).round().clamp(0, 2 * half)
    return _pack(codes.to(torch.uint8), bits), scale


def restore(codes: Tensor, scale: Tensor, channels: Channels, bits: int) -> Tensor:
    """What :func:`quantise` has rounded, ``(B, H, n, D)`` in the dtype of the channels' mean."""
    mean, spread = channels
    codes = _unpack(codes, bits)
    levels = codes.to(mean.dtype).sub_((2**bits - 1) / 2)
    return _compute_steps(scale, spread).mul_(levels).add_(mean.unsqueeze(-2))


def _compute_steps(scale: Tensor, spread: Tensor) -> Tensor:
    """From one level of a number to the next ``(B, H, n, D)``, in the dtype of ``spread``."""
    scale = scale.to(spread.dtype)
    return (spread.unsqueeze(-2) * scale.clamp_min(0)).add_((-scale).clamp_min(0))  # choosing takes twice as long


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of so many bits side by side, the lowest bit of the first code first."""
    if bits == 8:
        return codes
    if bits == 4:
        return codes[..., ::2] | (codes[..., 1::2] << 4)
    place = torch.arange(8, dtype=torch.uint8, device=codes.device)
    each = (codes.unsqueeze(-1) >> place[:bits]) & 1
    return (each.flatten(-2).unflatten(-1, (-1, 8)) << place).sum(-1, dtype=torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """What :func:`_pack` has packed."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    place = torch.arange(8, dtype=torch.uint8, device=packed.device)
    each = (packed.unsqueeze(-1) >> place) & 1
    return (each.flatten(-2).unflatten(-1, (-1, bits)) << place[:bits]).sum(-1, dtype=torch.uint8)


# ---- the memory ----


@dataclass(frozen=True)
class ExpectedOptions(Options):
    """Options of ``expected``.

    Attributes:
        rows: tokens kept per key/value head; a list has a number for each. None: as many as fill the bytes of an AHN
            state, ``H D^2`` elements.
        shares: ``"need"``: calibration measures which heads of which layers lack tokens and gives each its share of all
            entries; how many there are in all stays.
        bits: of a number of a kept key or value: 16 (the model's own dtype, as it is), 8, 6, 5 or 4.
        horizon: over how many positions beyond the window future queries are expected.
        tilt: what a token's score gains for each position that it comes later, at least 0. A large one (1e6) keeps the
            most recent tokens: a longer window, in few bits if so chosen.
    """

    rows: int | list[int] | None = None
    bits: int = 16
    horizon: int = 512
    tilt: float = 0.0
    shares: str = "even"

    def __post_init__(self) -> None:
        if isinstance(self.rows, list):
            for number in self.rows:
                whole_number("rows", number, least=0)
        elif self.rows is not None:
            whole_number("rows", self.rows)
        one_of("shares", self.shares, "even", "need")
        if self.bits not in BITS:
            raise RetrofitError(f"bits={self.bits!r}: use 16 (the model's own dtype), 8, 6, 5 or 4")
        whole_number("horizon", self.horizon)
        if isinstance(self.tilt, bool) or not isinstance(self.tilt, int | float) or not 0 <= self.tilt < math.inf:
            raise RetrofitError(f"tilt={self.tilt!r}: give a number, 0 or more")


class ExpectedAttention(WindowMemory):
    """Sinks, window, and the R evicted tokens with the highest scores, all in one softmax; nothing is trained.

    What :meth:`observe` measures is saved with the model. Without it every key is expected to be looked at alike, and
    the longest values stay.
    """

    kind = "expected"
    trainable = writes_back = compiles = False
    joins_window = True
    calibrates = needs_texts = True
    size = "rows"
    Options = ExpectedOptions
    key_mean: Tensor  # of kept keys and values in few bits: of each channel (H_kv, D)
    key_spread: Tensor
    value_mean: Tensor
    value_spread: Tensor

    def __init__(self, config: Any, window: int, sinks: int, options: ExpectedOptions):
        super().__init__(config, window, sinks, options)
        if self.head_dim * options.bits % 8:
            raise RetrofitError(
                f"bits={options.bits}: {self.head_dim} numbers, a head of this base, do not fill whole bytes: use 8"
            )
        heads, kv_heads, dim = self.heads, self.kv_heads, self.head_dim
        self.group = heads // kv_heads  # query heads that share a key/value head
        if isinstance(options.rows, list) and len(options.rows) != kv_heads:
            raise RetrofitError(
                f"rows={options.rows}: this base has {kv_heads} key/value heads in a layer, so give as many numbers"
            )
        self.query_mean = nn.Parameter(torch.empty(heads, dim), requires_grad=False)  # m
        self.query_spread = nn.Parameter(torch.empty(heads, dim, dim), requires_grad=False)  # C = A A^T
        self.level = nn.Parameter(torch.empty(heads), requires_grad=False)  # log of all keys' expected weight
        if options.bits < 16:
            for name in ("key_mean", "key_spread", "value_mean", "value_spread"):
                setattr(self, name, nn.Parameter(torch.empty(kv_heads, dim), requires_grad=False))
        self._sums: dict[str, Tensor] = {}

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            init.constant_(parameter, 1.0 if name in ("key_spread", "value_spread") else 0.0)

    @property
    def rows(self) -> tuple[int, ...]:
        """R of each key/value head: tokens kept."""
        given = self.usual_rows() if self.options.rows is None else self.options.rows
        return tuple(given) if isinstance(given, list) else (given,) * self.kv_heads

    def usual_rows(self) -> int:
        """R where nothing is said."""
        state = self.heads * self.head_dim**2 * torch.float32.itemsize
        return max(1, state // (self.kv_heads * self._entry_bytes))

    def _group_heads(self) -> list[tuple[slice, int]]:
        """Key/value heads that keep as many tokens, and how many: all of them, or each by itself."""
        if len(set(self.rows)) == 1:
            return [(slice(0, self.kv_heads), self.rows[0])]
        return [(slice(head, head + 1), rows) for head, rows in enumerate(self.rows)]

    # ---- what it costs ----

    def _describe_entry(self, dtype: torch.dtype) -> dict[str, Kept]:
        """What is kept of one token."""
        score = {"score": Kept((), wide(dtype))}
        if self.options.bits == 16:
            return {name: Kept((self.head_dim,), dtype) for name in ("k", "v")} | score
        codes, scale = Kept((self.head_dim * self.options.bits // 8,), torch.uint8), Kept((1,), torch.float16)
        position = Kept((), torch.int32)
        return {"k": codes, "k_scale": scale, "v": codes, "v_scale": scale, "position": position} | score

    @property
    def _entry_bytes(self) -> int:
        return sum(kept.bytes for kept in self._describe_entry(torch.float32).values())

    def state_tensors(self, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Kept]:
        rows = sum(self.rows)
        return {name: Kept((rows, *kept.shape), kept.dtype) for name, kept in self._describe_entry(dtype).items()}

    def seen_beyond(self, t: Tensor) -> Tensor:
        evicted = t - self.capacity + 1
        return self.capacity + sum(evicted.clamp(0, rows) for rows in self.rows) // self.kv_heads

    def flops(self, tokens: int) -> int:
        evicted = max(0, tokens - self.capacity)
        return 2 * self.heads * self.head_dim * (self.head_dim + 1) * evicted  # m and A against each key

    # ---- calibration: what queries, keys and values of other text are like ----

    @torch.no_grad()
    def observe(self, step: Step, again: bool) -> None:
        """Add a text to what is known.

        Args:
            step: the layer's step, with queries, keys and values before their rotation.
            again: whether this is the second time, in which keys are weighed by the queries of the first.
        """
        if again:
            expected = self._expect_weights(step.k.to(wide(step.k.dtype)), step).logsumexp(-1)  # (B, H_kv, G)
            sums = {"n": expected.new_tensor(len(expected)), "level": expected.flatten(1).sum(0)}
        else:
            q, k, v = (x.double().transpose(0, 1).flatten(1, 2) for x in (step.q, step.k, step.v))  # (heads, tokens, D)
            sums = {"n": q.new_tensor(q.shape[1]), "q": q.sum(1), "qq": q.transpose(1, 2) @ q}
            for name, x in (("k", k), ("v", v)):
                sums |= {name: x.sum(1), name * 2: x.square().sum(1)}
        self._sums = {name: self._sums.get(name, 0) + x for name, x in sums.items()}

    @torch.no_grad()
    def settle(self) -> None:
        """Take over what was observed since the last time."""
        known, self._sums = self._sums, {}
        n = known.pop("n")
        if "level" in known:
            self.level.copy_(known["level"] / n)
            return
        self.level.zero_()
        mean = known["q"] / n
        covariance = known["qq"] / n - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        values, vectors = torch.linalg.eigh(covariance)
        self.query_mean.copy_(mean)
        self.query_spread.copy_(vectors * values.clamp_min(0).sqrt().unsqueeze(-2))
        if self.options.bits < 16:
            for name, key in (("key", "k"), ("value", "v")):
                mean = known[key] / n
                spread = (known[key * 2] / n - mean.square()).clamp_min(LEAST**2).sqrt()
                getattr(self, f"{name}_mean").copy_(mean)
                getattr(self, f"{name}_spread").copy_(spread)

    # ---- choosing ----

    def score(self, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """How much future queries are expected to look at tokens ``(B, H_kv, n)``, float32 or wider.

        Args:
            k: keys before their rotation ``(B, H_kv, n, D)``; v: values.
        """
        level = self.level.to(k.dtype).unflatten(0, (self.kv_heads, -1)).unsqueeze(-1)
        length = v.to(k.dtype).norm(dim=-1).clamp_min(LEAST)
        score = (self._expect_weights(k, step) - level).logsumexp(2) + length.log()
        return (score * STEPS).round() / STEPS

    def _expect_weights(self, k: Tensor, step: Step) -> Tensor:
        """Log of the weight that each query head is expected to give keys before their rotation ``(B, H_kv, G, n)``."""
        dtype = k.dtype
        cos, sin = step.now.mean_tables(self.window, self.options.horizon)
        k = rotate(k, *(x.to(dtype) for x in step.now.tables_at_zero()))
        # the average rotation is none itself: queries turned by it meet a key as the key turned by its transpose
        k = rotate(k, cos.to(dtype), -sin.to(dtype)).unsqueeze(2) * step.scale  # (B, H_kv, 1, n, D)
        mean, spread = (x.to(dtype).unflatten(0, (self.kv_heads, -1)) for x in (self.query_mean, self.query_spread))
        return (k @ mean.unsqueeze(-1)).squeeze(-1) + (k @ spread).square().sum(-1) / 2

    # ---- writing and reading ----

    def recall(self, step: Step, near: Tensor, lse: Tensor | None, gone: Evicted) -> Joined:
        return self.join_entries(step, near, lse, gone)[0], None

    def join_entries(self, step: Step, near: Tensor, lse: Tensor | None, gone: Evicted) -> tuple[Tensor, Tensor]:
        """Let evicted tokens compete for the entries, and join the entries to the window's softmax.

        Returns:
            The output ``(B, H, n, D)`` and the log-sum-exp ``(B, H, n)`` of all logits, for what may join after them.
        """
        assert lse is not None
        plain = gone.plain_keys(step.now, wide(gone.k.dtype))
        arrival = step.now.indices(gone.start, gone.count).to(plain.dtype)
        score = self.score(plain, gone.v, step) + self.options.tilt * arrival.unsqueeze(1)
        new, state = self._make_entries(step, gone, plain, score), step.layer.state
        joined: list[tuple[Tensor, Tensor]] = []
        ends: list[Entries] = []
        first = 0  # of these heads' entries among those of all
        for heads, entries in self._group_heads():
            own = {name: x[:, heads] for name, x in new.items()}
            shape = (heads.stop - heads.start, entries)
            last = first + math.prod(shape)
            held = {
                name: state[name][:, first:last].unflatten(1, shape)
                if name in state
                else empty_entries(name, x, entries)
                for name, x in own.items()
            }
            queries = slice(heads.start * self.group, heads.stop * self.group)
            out, mass, held = self._attend_heads(step, near[:, queries], lse[:, queries], gone, heads, own, held)
            first, joined, ends = last, [*joined, (out, mass)], [*ends, held]
        if step.layer.keeps:
            state.update({name: torch.cat([held[name].flatten(1, 2) for held in ends], 1) for name in new})
        out, mass = (torch.cat(parts, 1) for parts in zip(*joined, strict=True))
        return out, mass

    def _attend_heads(
        self, step: Step, near: Tensor, lse: Tensor, gone: Evicted, heads: slice, new: Entries, held: Entries
    ) -> tuple[Tensor, Tensor, Entries]:
        """What the queries of some key/value heads read while new tokens come to the entries that are held.

        Args:
            near, lse: the window's output and log-sum-exp of these query heads.
            heads: the key/value heads.
            new, held: their evicted tokens, and their entries before this call.

        Returns:
            The output ``(B, query heads, n, D)``, its log-sum-exp, and the entries after this call.
        """
        queries = slice(heads.start * self.group, heads.stop * self.group)
        outs, sums = [near[:, :, : gone.first]], [lse[:, :, : gone.first]]
        for first in range(0, gone.count, BLOCK):
            last = min(first + BLOCK, gone.count)
            part = {name: x[:, :, first:last] for name, x in new.items()}
            choice = choose(held["score"], part["score"])
            candidates = {name: torch.cat([held[name], x], 2) for name, x in part.items()}
            at = slice(gone.first + first, gone.first + last)
            k, v = (x.flatten(0, 1).unsqueeze(1) for x in self._restore_entries(candidates, heads, step))
            q = step.q[:, queries, at].unflatten(1, (-1, self.group)).flatten(0, 1)  # (B heads, G, m, D)
            far = look(q, k, v, choice.alive.flatten(0, 1), step.scale, step.dropout)
            far_out, far_lse = (x.unflatten(0, (len(near), -1)).flatten(1, 2) for x in far)
            near_part = near[:, :, at], lse[:, :, at]
            outs.append(join(near_part, (far_out, far_lse)))
            sums.append(torch.logaddexp(near_part[1], far_lse))
            held = {name: pick(x, choice.kept) for name, x in candidates.items()}
        return torch.cat(outs, 2), torch.cat(sums, 2), held

    def _make_entries(self, step: Step, gone: Evicted, plain: Tensor, score: Tensor) -> Entries:
        """Evicted tokens in the form in which they are kept."""
        if self.options.bits == 16:
            return {"k": gone.k, "v": gone.v, "score": score}
        of_keys, of_values = self._get_channels(plain.dtype)
        keys, key_scale = quantise(plain, of_keys, self.options.bits)
        values, value_scale = quantise(gone.v.to(plain.dtype), of_values, self.options.bits)
        position = step.now.positions(gone.start, gone.count).to(torch.int32)[:, None].expand(*score.shape)
        coded = {"k": keys, "k_scale": key_scale, "v": values, "v_scale": value_scale}
        return {**coded, "position": position, "score": score}

    def _get_channels(self, dtype: torch.dtype) -> tuple[Channels, Channels]:
        """What the channels of keys before their rotation and of values are like."""
        keys = Channels(self.key_mean.to(dtype), self.key_spread.to(dtype))
        return keys, Channels(self.value_mean.to(dtype), self.value_spread.to(dtype))

    def _restore_entries(self, kept: Entries, heads: slice, step: Step) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values ``(B, heads, C, D)`` of kept tokens, in the model's dtype."""
        if self.options.bits == 16:
            return kept["k"], kept["v"]
        dtype = wide(step.k.dtype)
        of_keys, of_values = (Channels(*(x[heads] for x in channels)) for channels in self._get_channels(dtype))
        k = restore(kept["k"], kept["k_scale"], of_keys, self.options.bits)
        v = restore(kept["v"], kept["v_scale"], of_values, self.options.bits)
        cos, sin = step.now.turn(kept["position"].flatten(0, 1).long())  # (B heads, C, D)
        k = rotate(k.flatten(0, 1).unsqueeze(1), cos.to(dtype), sin.to(dtype)).squeeze(1).unflatten(0, k.shape[:2])
        return k.to(step.k.dtype), v.to(step.v.dtype)


def empty_entries(name: str, like: Tensor, entries: int) -> Tensor:
    """Entries that hold no token, like new ones ``(B, heads, count, ...)``."""
    empty = like.new_zeros(*like.shape[:2], entries, *like.shape[3:])
    return empty.fill_(EMPTY) if name == "score" else empty

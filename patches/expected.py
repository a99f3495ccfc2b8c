"""Expected attention: of what left the window, the tokens stay that future queries are expected to look at.

A key that meets queries of mean m and covariance C has the expected weight ``exp(k.m / sqrt(d) + k.Ck / (2 d))``, m and
C turned by the average rotation over the positions ahead; times the length of its value it is the token's score
("Expected Attention", NVIDIA 2025). That method reads a prompt whole and then cuts it. Here a token is scored once,
when it leaves the window, by queries that were measured beforehand on a few thousand tokens of other text
(:meth:`ExpectedAttention.observe`), so that the memory is bounded from the first token to the last.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.linalg import vector_norm
from transformers import initialization as init

from .coding import Code, coded_bytes, decode, encode, fit_code
from .errors import RetrofitError, one_of
from .memory import Evicted, Joined, Kept, Step, WindowMemory
from .merged_softmax import join, look
from .options import Options, whole_number
from .precision import wide
from .rotary import rotate

BLOCK = 512  # evicted tokens that compete for the entries together on a CPU
GPU_BLOCK = 4096  # and on a GPU, where launches count; not measured
LEAST = 1e-6  # below this a value's length is taken for it
STEPS = 256  # scores are whole multiples of this part of a nat, and 16 bits keep one
FARTHEST = 127  # nats: scores beyond it are taken for it
RIDGE = 1e-2  # of the mean variance of a key's numbers: what the map from keys to values is held back by
EVERY = 24  # position ahead counts in what an error of a key costs

Entries = dict[str, Tensor]  # by name, every tensor (B, heads, entries, ...)


# ---- which tokens stay ----

NO_SCORE = torch.iinfo(torch.int16).min  # of a place that holds no token
EMPTY = torch.iinfo(torch.int64).min  # its rank


class Choice(NamedTuple):
    """Who is there while ``n`` tokens arrive at R entries, for each row of the batch and key head.

    Attributes:
        alive: whether each of the R + n candidates is kept after each arrival ``(B, H_kv, n, R + n)``.
        kept: indices of the R candidates that stay after all, those that hold no token in front ``(B, H_kv, R)``.
    """

    alive: Tensor
    kept: Tensor


def choose(held: Tensor, new: Tensor, entries: Tensor | int | None = None) -> Choice:
    """Who stays when tokens of ranks ``new`` (B, H_kv, n) come, one after the other, to R entries of ranks ``held``
    (B, H_kv, R).

    A rank never changes, and no two tokens have the same, so one sort decides: a candidate is there as long as fewer
    than R that have arrived so far stand above it. With 2 entries of ranks 5 and 1, a token of rank 3 takes the place
    of the second, and one of rank 2 is dropped:

    >>> choice = choose(torch.tensor([[[5, 1]]]), torch.tensor([[[3, 2]]]))
    >>> choice.alive[0, 0].int().tolist()
    [[1, 0, 1, 0], [1, 0, 1, 0]]
    >>> choice.kept[0, 0].tolist()
    [0, 2]

    Args:
        entries: how many of the R each head has ``(H_kv, 1, 1)``, where they do not all have R.
    """
    places, n = held.shape[-1], new.shape[-1]
    entries = places if entries is None else entries
    ranks = torch.cat([held, new], -1)
    candidate = torch.arange(places + n, device=ranks.device)
    best_first = ranks.argsort(dim=-1, descending=True, stable=True)
    rank = best_first.argsort(-1)
    held_so_far = (best_first < places).cumsum(-1)
    beaten_by_held = held_so_far.gather(-1, rank) - (candidate < places).long()
    beats = rank[..., places:, None] < rank[..., None, :]  # (.., n, R + n): new token i stands above candidate j
    beaten_by_new = beats.cumsum(-2)
    arrived = candidate < places + torch.arange(1, n + 1, device=ranks.device)[:, None]
    alive = (beaten_by_held.unsqueeze(-2) + beaten_by_new < entries) & arrived & (ranks > EMPTY).unsqueeze(-2)
    kept = alive[..., -1, :].to(torch.uint8).argsort(dim=-1, stable=True)[..., n:]
    return Choice(alive, kept)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """The candidates at ``index`` (B, H_kv, R) of ``x`` (B, H_kv, C, ...) -> ``(B, H_kv, R, ...)``."""
    at = index.view(*index.shape, *[1] * (x.dim() - 3)).expand(*index.shape, *x.shape[3:])
    return x.gather(2, at)


class Layout(NamedTuple):
    """Where the entries of each head lie in the state: head after head, in each the latest tokens before the others.

    Heads have different numbers of entries: what works on all heads at once gives each the places of the largest.

    Attributes:
        first: where each head begins ``(H_kv, 1)``.
        latest: how many places its latest tokens have ``(H_kv, 1)``, at most ``most_latest``.
        chosen: how many the others have ``(H_kv, 1)``, at most ``most_chosen``.
        head: of each place of the state, its head ``(places,)``.
        place: and which of the head's places it is ``(places,)``.
    """

    first: Tensor
    latest: Tensor
    chosen: Tensor
    head: Tensor
    place: Tensor
    most_latest: int
    most_chosen: int


def lay_out(rows: tuple[int, ...], latest: tuple[int, ...], like: Tensor) -> Layout:
    """The layout for so many entries per head, of which so many are for the latest tokens, where ``like`` lies."""
    # a fake tensor's layout is itself one, which nobody else may find
    return (_build_layout if is_fake(like) else _cached_layout)(rows, latest, like.device)


def _build_layout(rows: tuple[int, ...], latest: tuple[int, ...], device: torch.device) -> Layout:
    chosen = [each - recent for each, recent in zip(rows, latest, strict=True)]
    first, recent, others = (
        torch.tensor([[number] for number in numbers], device=device)
        for numbers in ([sum(rows[:head]) for head in range(len(rows))], latest, chosen)
    )
    places = [(head, place) for head, count in enumerate(rows) for place in range(count)]
    head, place = (torch.tensor(numbers, device=device) for numbers in zip(*places, strict=True))
    return Layout(first, recent, others, head, place, max(latest), max(chosen))


_cached_layout = lru_cache(maxsize=512)(_build_layout)


# ---- the memory ----


@dataclass(frozen=True)
class ExpectedOptions(Options):
    """Options of ``expected``.

    Attributes:
        rows: tokens kept per key/value head; a list has a number for each. None: as many as fill the bytes of an AHN
            state, ``H D^2`` elements.
        shares: ``"need"``: calibration measures which heads of which layers lack tokens and gives each its share of all
            entries; how many there are in all stays.
        bits: of a number of a kept key or value: 16 (the model's own dtype, as it is), or 1 to 8, on average: fractions
            are allowed. A list has the bits of keys and those of values.
        horizon: over how many positions beyond the window future queries are expected.
        latest: part of the window and a head's entries together that is for the latest tokens, whatever their score;
            with 1 the memory is a longer window, in few bits if so chosen.
        recency: nats that a score gains for a token that comes W + R tokens later, R being the entries of its head.
    """

    gone: ClassVar[dict[str, str]] = {
        "tilt": "later tokens are favoured by recency, so leave it out and calibrate the base again"
    }

    rows: int | list[int] | None = None
    bits: float | list[float] = 16
    horizon: int = 512
    latest: float = 0.3
    recency: float = 1.0
    shares: str = "even"

    def __post_init__(self) -> None:
        if isinstance(self.rows, list):
            for number in self.rows:
                whole_number("rows", number, least=0)
        elif self.rows is not None:
            whole_number("rows", self.rows)
        one_of("shares", self.shares, "even", "need")
        both = self.bits if isinstance(self.bits, list) else [self.bits]
        if not 1 <= len(both) <= 2 or not (all(map(_is_few_bits, both)) or all(bits == 16 for bits in both)):
            raise RetrofitError(
                f"bits={self.bits!r}: use 16 (the model's own dtype) or 1 to 8, or a list of two such numbers, for "
                "keys and for values"
            )
        whole_number("horizon", self.horizon)
        for name, most in (("latest", 1.0), ("recency", 1e3)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise RetrofitError(f"{name}={value!r}: give a number from 0 to {most:g}")

    @property
    def coded(self) -> bool:
        """Whether entries are kept in few bits."""
        return self.key_and_value_bits != (16, 16)

    @property
    def key_and_value_bits(self) -> tuple[float, float]:
        """Bits of a key's number and of a value's."""
        both = self.bits if isinstance(self.bits, list) else [self.bits]
        return both[0], both[-1]


def _is_few_bits(bits: Any) -> bool:
    return isinstance(bits, int | float) and not isinstance(bits, bool) and 1 <= bits <= 8


class ExpectedAttention(WindowMemory):
    """Sinks, window, and R evicted tokens per head, all in one softmax: the latest, and those with the highest scores.

    Nothing is trained; what :meth:`observe` measures is saved with the model. Without it every key is expected to be
    looked at alike, and the longest values stay.
    """

    kind = "expected"
    trainable = writes_back = compiles = False
    joins_window = True
    calibrates = needs_texts = True
    size = "rows"
    Options = ExpectedOptions
    # calibrated, of entries in few bits
    key_mean: nn.Parameter
    key_bits: nn.Parameter
    value_mean: nn.Parameter
    value_bits: nn.Parameter
    value_of_key: nn.Parameter

    def __init__(self, config: Any, window: int, sinks: int, options: ExpectedOptions):
        super().__init__(config, window, sinks, options)
        heads, kv_heads, dim = self.heads, self.kv_heads, self.head_dim
        self.group = heads // kv_heads  # query heads that share a key/value head
        if isinstance(options.rows, list) and len(options.rows) != kv_heads:
            raise RetrofitError(
                f"rows={options.rows}: this base has {kv_heads} key/value heads in a layer, so give as many numbers"
            )

        def measured(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)

        self.query_mean = measured(heads, dim)  # m
        self.query_spread = measured(heads, dim, dim)  # C = A A^T
        self.level = measured(heads)  # log of all keys' expected weight
        if options.coded:
            for name in ("key", "value"):
                setattr(self, f"{name}_mean", measured(kv_heads, dim))
                setattr(self, f"{name}_forward", measured(kv_heads, dim, dim))
                setattr(self, f"{name}_backward", measured(kv_heads, dim, dim))
                setattr(self, f"{name}_spread", measured(kv_heads, dim))
                setattr(self, f"{name}_bits", measured(kv_heads, dim, dtype=torch.uint8))
            self.value_of_key = measured(kv_heads, dim, dim)  # what a key predicts of its value
        self._sums: dict[str, Tensor] = {}

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if name in ("key_spread", "value_spread"):
                init.ones_(parameter)
            elif name.endswith(("_forward", "_backward")):
                init.copy_(parameter, torch.eye(self.head_dim).expand_as(parameter))
            elif name.endswith("_bits"):
                total = 8 * self.coded_bytes[name == "value_bits"]
                each, more = divmod(min(total, 8 * self.head_dim), self.head_dim)
                bits = each + (torch.arange(self.head_dim) < more).to(torch.uint8)
                init.copy_(parameter, bits.expand_as(parameter))
            else:
                init.zeros_(parameter)

    @property
    def coded_bytes(self) -> tuple[int, int]:
        """Bytes of the codes of a key and of a value."""
        of_keys, of_values = self.options.key_and_value_bits
        return coded_bytes(self.head_dim, of_keys), coded_bytes(self.head_dim, of_values)

    @property
    def rows(self) -> tuple[int, ...]:
        """R of each key/value head: tokens kept."""
        given = self.usual_rows() if self.options.rows is None else self.options.rows
        return tuple(given) if isinstance(given, list) else (given,) * self.kv_heads

    def usual_rows(self) -> int:
        """R where nothing is said."""
        state = self.heads * self.head_dim**2 * torch.float32.itemsize
        return max(1, state // (self.kv_heads * self.entry_bytes(torch.float32)))

    # ---- what it costs ----

    def _describe_entry(self, dtype: torch.dtype) -> dict[str, Kept]:
        """What is kept of one token."""
        marks = {"index": Kept((), torch.int32), "score": Kept((), torch.int16)}
        if not self.options.coded:
            return {name: Kept((self.head_dim,), dtype) for name in ("k", "v")} | marks
        of_keys, of_values = (Kept((size,), torch.uint8) for size in self.coded_bytes)
        scale = Kept((1,), torch.float16)
        return {"k": of_keys, "k_scale": scale, "v": of_values, "v_scale": scale} | marks

    def entry_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token that is kept."""
        return sum(kept.bytes for kept in self._describe_entry(dtype).values())

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
        if step.k.shape[2] <= self.sinks:
            return
        if again:
            k = step.k[:, :, self.sinks :].to(wide(step.k.dtype))
            expected = self._expect_weights(k, step).logsumexp(-1)  # (B, H_kv, G)
            sums = {"n": expected.new_tensor(len(expected)), "level": expected.flatten(1).sum(0)}
        else:
            # sinks are unlike all other tokens, and are never among the entries
            q, k, v = (x[:, :, self.sinks :].double() for x in (step.q, step.k, step.v))
            q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (q, k, v))  # (heads, tokens, D)
            sums = {"n": q.new_tensor(q.shape[1]), "q": q.sum(1), "qq": q.mT @ q}
            if self.options.coded:
                sums |= {"k": k.sum(1), "kk": k.mT @ k, "v": v.sum(1), "vv": v.mT @ v, "kv": k.mT @ v}
                sums["metric"] = self._turn_ahead(sums["qq"], step)
        self._sums = {name: self._sums.get(name, 0) + x for name, x in sums.items()}

    def _turn_ahead(self, moments: Tensor, step: Step) -> Tensor:
        """Second moments of queries ``(H, D, D)`` as keys before their rotation meet them, on average over the
        positions ahead and summed over the query heads of a key head: ``(H_kv, D, D)``."""
        ahead = torch.arange(self.window, self.window + self.options.horizon, EVERY, device=moments.device)
        cos, sin = (x.to(moments.dtype)[0, :, None] for x in step.now.turn(ahead[None]))  # (positions, 1, D)
        moments = moments.unflatten(0, (self.kv_heads, -1)).sum(1)
        # a query that comes d positions later meets a key as if it were turned by d: its rows, then its columns
        rows = rotate(moments.expand(len(ahead), -1, -1, -1), cos, sin)
        return rotate(rows.mT, cos, sin).mean(0)

    @torch.no_grad()
    def settle(self, costs: Tensor) -> None:
        """Take over what was observed since the last time.

        Args:
            costs: what a change ``c`` of the outputs of a key head's query heads costs, ``c M c'``: M
                ``(H_kv, G D, G D)``, as :func:`retrofit.needs.weigh_outputs` has it.

        Raises:
            RetrofitError: no text was longer than the sinks; entries are coded, and there were too few tokens.
        """
        known, self._sums = self._sums, {}
        if not known:
            raise RetrofitError(f"no text is longer than {self.sinks} tokens: calibrate on longer ones")
        n = known.pop("n")
        if "level" in known:
            self.level.copy_(known["level"] / n)
            return
        if self.options.coded and n < 2 * self.head_dim:
            raise RetrofitError(
                f"entries in few bits are measured on {2 * self.head_dim} tokens at least, and the texts have "
                f"{int(n)}: calibrate on more"
            )
        self.level.zero_()
        mean = known["q"] / n
        covariance = known["qq"] / n - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        values, vectors = torch.linalg.eigh(covariance)
        self.query_mean.copy_(mean)
        self.query_spread.copy_(vectors * values.clamp_min(0).sqrt().unsqueeze(-2))
        if self.options.coded:
            of_heads = costs.double().unflatten(2, (self.group, -1)).unflatten(1, (self.group, -1))
            of_values = of_heads.diagonal(dim1=1, dim2=3).sum(-1)  # one error in all query heads' outputs
            self._settle_codes({name: x / n for name, x in known.items()}, of_values)

    def _settle_codes(self, mean: dict[str, Tensor], output: Tensor) -> None:
        """Codes of keys, and of what keys do not predict of values, from the means of products.

        The map from keys to values is that of ridge regression. What it leaves of a value has the covariance of the
        regression's residual, and the part of it that stems from the key's own rounding.
        """

        def covary(first: str, second: str) -> Tensor:
            return mean[first + second] - mean[first].unsqueeze(-1) * mean[second].unsqueeze(-2)

        kk, vv, kv = covary("k", "k"), covary("v", "v"), covary("k", "v")
        ridge = RIDGE * kk.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-12)
        eye = torch.eye(self.head_dim, dtype=kk.dtype, device=kk.device)
        of_key = torch.linalg.solve(kk + ridge[:, None, None] * eye, kv)
        keys, error = fit_code(kk, mean["metric"], 8 * self.coded_bytes[0])
        cross = of_key.mT @ kv
        left = vv - cross - cross.mT + of_key.mT @ (kk + error) @ of_key
        values, _ = fit_code(left, output, 8 * self.coded_bytes[1])
        self.value_of_key.copy_(of_key)
        for name, own, code in (("key", "k", keys), ("value", "v", values)):
            getattr(self, f"{name}_mean").copy_(mean[own])
            for part, x in code._asdict().items():
                getattr(self, f"{name}_{part}").copy_(x)

    # ---- choosing ----

    def score(self, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """How much future queries are expected to look at tokens ``(B, H_kv, n)``, in steps of 1/256 nat, int16.

        Args:
            k: keys before their rotation ``(B, H_kv, n, D)``, float32 or wider; v: values.
        """
        level = self.level.to(k.dtype).unflatten(0, (self.kv_heads, -1)).unsqueeze(-1)
        length = vector_norm(v.to(k.dtype), dim=-1).clamp_min(LEAST)
        score = (self._expect_weights(k, step) - level).logsumexp(2) + length.log()
        return (score.clamp(-FARTHEST, FARTHEST) * STEPS).round().to(torch.int16)

    def _expect_weights(self, k: Tensor, step: Step) -> Tensor:
        """Log of the weight that each query head is expected to give keys before their rotation ``(B, H_kv, G, n)``."""
        dtype = k.dtype
        cos, sin = step.now.mean_tables(self.window, self.options.horizon)
        k = rotate(k, *(x.to(dtype) for x in step.now.tables_at_zero()))
        # the average rotation is none itself: queries turned by it meet a key as the key turned by its transpose
        k = rotate(k, cos.to(dtype), -sin.to(dtype)).unsqueeze(2) * step.scale  # (B, H_kv, 1, n, D)
        mean, spread = (x.to(dtype).unflatten(0, (self.kv_heads, -1)) for x in (self.query_mean, self.query_spread))
        return (k @ mean.unsqueeze(-1)).squeeze(-1) + (k @ spread).square().sum(-1) / 2

    def count_latest(self, rows: int) -> int:
        """How many of a head's entries are for the tokens that left the window last.

        With W = 20, ``latest=0.3`` and 180 entries, 40 of them: together with the window that is 0.3 of the 200 tokens.
        """
        return min(rows, max(0, round(self.options.latest * (self.window + rows)) - self.window))

    def rank(self, score: Tensor, index: Tensor, rows: Tensor | int) -> Tensor:
        """Ranks ``(B, H_kv, n)`` int64 of tokens of some scores and indices; a higher one stays longer.

        Of two that are alike the later stands above, so all ranks are different.

        Args:
            rows: entries of each head ``(H_kv, 1)``, or of all.
        """
        index = index.long()
        later = index * round(STEPS * self.options.recency) // (rows + self.window)
        rank = (score.long() + later << 32) + index
        return rank.masked_fill(score == NO_SCORE, EMPTY)

    def kept_after(self, score: Tensor, newest: Tensor, rows: int) -> Tensor:
        """Which tokens a head of so many entries holds at different times: ``(m, n)``.

        Args:
            score: of the evicted tokens in order ``(n,)``.
            newest: at each time, the number of the token that was evicted last ``(m,)``.
        """
        token = torch.arange(len(score), device=score.device)
        latest = self.count_latest(rows)
        last = (newest - latest)[:, None]  # that no longer waits among the latest
        waiting = (token > last) & (token <= newest[:, None])
        chosen = rows - latest
        if not chosen:
            return waiting
        rank = self.rank(score, token + self.sinks, rows)
        rank = torch.where(token <= last, rank, EMPTY)
        least = rank.kthvalue(max(len(score) - chosen + 1, 1), dim=-1, keepdim=True).values
        return waiting | ((rank >= least) & (rank > EMPTY))

    # ---- writing and reading ----

    def recall(self, step: Step, near: Tensor, lse: Tensor | None, gone: Evicted) -> Joined:
        return self.join_entries(step, near, lse, gone)[0], None

    def join_entries(self, step: Step, near: Tensor, lse: Tensor | None, gone: Evicted) -> tuple[Tensor, Tensor]:
        """Let evicted tokens compete for the entries, and join the entries to the window's softmax.

        Returns:
            The output ``(B, H, n, D)`` and the log-sum-exp ``(B, H, n)`` of all logits, for what may join after them.
        """
        assert lse is not None
        if not any(self.rows):
            return near, lse
        new, state = self._make_entries(step, gone), step.layer.state
        latest = tuple(self.count_latest(rows) for rows in self.rows)
        layout = lay_out(self.rows, latest, near)
        outs, sums = [near[:, :, : gone.first]], [lse[:, :, : gone.first]]
        held = {name: state[name] if name in state else _no_entries(name, x, layout) for name, x in new.items()}
        if held["score"].shape[1] != len(layout.head):
            raise RetrofitError("this cache was begun when heads had other numbers of entries: start a new cache")
        size = BLOCK if near.device.type == "cpu" else GPU_BLOCK
        for first in range(0, gone.count, size):
            part = {name: x[:, :, first : first + size] for name, x in new.items()}
            at = slice(gone.first + first, gone.first + first + part["score"].shape[2])
            candidates, alive, held = self._compete(layout, held, part)
            far = self._look_far(step, candidates, alive, at)
            here = near[:, :, at], lse[:, :, at]
            outs.append(join(here, far))
            sums.append(torch.logaddexp(here[1], far[1]))
        if step.layer.keeps:
            state.update(held)
        return torch.cat(outs, 2), torch.cat(sums, 2)

    def _compete(self, layout: Layout, held: Entries, new: Entries) -> tuple[Entries, Tensor, Entries]:
        """Let ``n`` tokens come to the entries, one after the other.

        A token waits among its head's latest until as many have come after it, and then competes with those chosen. A
        head with 2 places for the latest that holds tokens 3 and 4 there, and is given 5 and 6, lets 3 and 4 compete.

        Args:
            held: the state ``(B, places, ...)``; new: of the tokens ``(B, H_kv, n, ...)``.

        Returns:
            All candidates ``(B, H_kv, C, ...)``, which of them each query sees ``(B, H_kv, n, C)``, and the new state.
        """
        batch, _, n = new["score"].shape
        most, chosen = layout.most_latest, layout.most_chosen
        here = torch.arange(most + n, device=layout.first.device)
        arrivals = new["index"][:, :, :1].long() - self.sinks  # tokens that were evicted before these (B, H_kv, 1)
        # the latest from the oldest on, at the end of `most` places; token number a lies at place a % latest
        number = arrivals + here[:most] - most
        there = (here[:most] >= most - layout.latest) & (number >= 0)
        ring = layout.first + number % layout.latest.clamp_min(1)
        others = torch.arange(chosen, device=here.device)
        after = layout.first + layout.latest + others.clamp_max(layout.chosen - 1).clamp_min(0)
        index = torch.cat([after.expand(batch, -1, -1), ring.expand(batch, -1, -1)], -1)
        index = index.clamp_max(layout.first[-1] + layout.latest[-1] + layout.chosen[-1] - 1)
        real = torch.cat([(others < layout.chosen).expand(batch, -1, -1), there.expand(batch, -1, -1)], -1)
        before = {name: _take(x, index) for name, x in held.items()}
        before["score"] = before["score"].masked_fill(~real, NO_SCORE)
        candidates = {name: torch.cat([before[name], x], 2) for name, x in new.items()}
        # one token leaves the latest for each that comes
        leaving = most - layout.latest + here[:n]  # (H_kv, n), counted from the latest's first place
        ranks = self.rank(candidates["score"], candidates["index"], layout.latest + layout.chosen)
        choice = choose(
            ranks[:, :, :chosen],
            ranks[:, :, chosen:].gather(-1, leaving.expand(batch, -1, -1)),
            layout.chosen[..., None],
        )
        # which of the latest and new tokens a query sees: those that wait, and those that were chosen after waiting
        arrived = here - most <= here[:n, None]
        waiting = arrived & (here > leaving.unsqueeze(-1)) & (candidates["score"][:, :, None, chosen:] != NO_SCORE)
        left = here - (most - layout.latest)  # (H_kv, most + n): how many left before it
        after_waiting = (
            choice.alive[..., chosen:].gather(-1, left.clamp(0, n - 1)[:, None].expand(batch, -1, n, -1))
            & ((left >= 0) & (left < n))[:, None]
        )
        alive = torch.cat([choice.alive[..., :chosen], waiting | after_waiting], -1)
        # the new state: each head's ring, then those that were chosen
        kept = torch.where(choice.kept < chosen, choice.kept, choice.kept + (most - layout.latest))
        place, head = layout.place, layout.head
        recent = layout.latest[head, 0]
        in_ring = chosen + n + most - recent + (place - (arrivals[:, head, 0] + n)) % recent.clamp_min(1)
        behind = chosen - layout.chosen[head, 0] + place - recent
        in_chosen = (
            kept.flatten(1).gather(1, (head * chosen + behind.clamp_min(0)).expand(batch, -1)) if chosen else in_ring
        )
        source = torch.where(place < recent, in_ring, in_chosen) + head * (chosen + most + n)
        after_all = {
            name: x.flatten(1, 2).gather(1, _expand(source.expand(batch, -1), x.flatten(1, 2)))
            for name, x in candidates.items()
        }
        return candidates, alive, after_all

    def _look_far(self, step: Step, candidates: Entries, alive: Tensor, at: slice) -> tuple[Tensor, Tensor]:
        """What the queries ``at`` read of the candidates that each sees, and the log-sum-exp of its logits."""
        k, v = (x.flatten(0, 1).unsqueeze(1) for x in self._restore_entries(candidates, step))
        q = step.q[:, :, at].unflatten(1, (self.kv_heads, -1)).flatten(0, 1)  # (B H_kv, G, m, D)
        far = look(q, k, v, alive.flatten(0, 1), step.scale, step.dropout)
        out, lse = (x.unflatten(0, (len(alive), -1)).flatten(1, 2) for x in far)
        return out, lse

    def _make_entries(self, step: Step, gone: Evicted) -> Entries:
        """Evicted tokens in the form in which they are kept."""
        plain = gone.plain_keys(step.now, wide(gone.k.dtype))
        score = self.score(plain, gone.v, step)
        index = step.now.indices(gone.start, gone.count).to(torch.int32)[:, None].expand(score.shape)
        marks = {"index": index, "score": score}
        if not self.options.coded:
            return {"k": gone.k, "v": gone.v} | marks
        of_keys, of_values = self._get_codes(plain.dtype)
        mean = self.key_mean.to(plain.dtype).unsqueeze(-2)
        keys, key_scale = encode(plain - mean, of_keys, self.coded_bytes[0])
        left = gone.v.to(plain.dtype) - self._predict_values(decode(keys, key_scale, of_keys))
        values, value_scale = encode(left, of_values, self.coded_bytes[1])
        return {"k": keys, "k_scale": key_scale, "v": values, "v_scale": value_scale} | marks

    def _get_codes(self, dtype: torch.dtype) -> tuple[Code, Code]:
        """How keys before their rotation are coded, and what they do not predict of values."""
        codes = []
        for name, bits in (("key", self.key_bits), ("value", self.value_bits)):
            forward, backward, spread = (
                self.get_parameter(f"{name}_{part}").to(dtype) for part in ("forward", "backward", "spread")
            )
            codes.append(Code(forward, backward, spread, bits))
        return codes[0], codes[1]

    def _predict_values(self, keys: Tensor) -> Tensor:
        """What restored keys, less their mean, predict of values ``(B, H_kv, n, D)``."""
        return self.value_mean.to(keys.dtype).unsqueeze(-2) + keys @ self.value_of_key.to(keys.dtype)

    def _restore_entries(self, kept: Entries, step: Step) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values ``(B, H_kv, C, D)`` of kept tokens, in the model's dtype."""
        if not self.options.coded:
            return kept["k"], kept["v"]
        dtype = wide(step.k.dtype)
        of_keys, of_values = self._get_codes(dtype)
        k = decode(kept["k"], kept["k_scale"], of_keys)
        v = decode(kept["v"], kept["v_scale"], of_values) + self._predict_values(k)
        k = k + self.key_mean.to(dtype).unsqueeze(-2)
        positions = kept["index"].long() + step.now.origin()[:, None, None]
        cos, sin = step.now.turn(positions.flatten(0, 1))  # (B H_kv, C, D)
        k = rotate(k.flatten(0, 1).unsqueeze(1), cos.to(dtype), sin.to(dtype)).squeeze(1).unflatten(0, k.shape[:2])
        return k.to(step.k.dtype), v.to(step.v.dtype)


def _no_entries(name: str, like: Tensor, layout: Layout) -> Tensor:
    """A state that holds no token, for new ones ``(B, heads, count, ...)``."""
    empty = like.new_zeros(len(like), len(layout.head), *like.shape[3:])
    return empty.fill_(NO_SCORE) if name == "score" else empty


def _take(x: Tensor, index: Tensor) -> Tensor:
    """The places ``index`` (B, H_kv, n) of a state ``x`` (B, places, ...) -> ``(B, H_kv, n, ...)``."""
    flat = index.flatten(1)
    return x.gather(1, _expand(flat, x)).unflatten(1, index.shape[1:])


def _expand(index: Tensor, x: Tensor) -> Tensor:
    """``index`` (B, n) for ``x.gather(1, index)`` of ``x`` (B, m, ...)."""
    return index.view(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])

"""What a memory is: the interface that every kind fills in, and the two base classes that most kinds begin from.

The attention calls a memory with a :class:`Step`; once something must be evicted, it gives what goes into the output
projection. Everything a kind does differently (what it keeps, how it is read, where it joins, what it costs) is inside.
All tensors are ``(B, H, tokens, D)``, as transformers keeps caches; gates are ``(B, G, tokens)``.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .cache import MemoryCacheLayer
from .errors import one_of
from .kernels import decode_attention, window_attention
from .options import Options
from .precision import cast, exact_products, wide
from .sequence import Pass, Text


class Kept(NamedTuple):
    """A tensor that is kept of one sequence in one layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# the heads before the output projection (B, H, n, D), and what to add after it (B, n, E) or None
Joined = tuple[Tensor, Tensor | None]


@dataclass
class Step:
    """One layer's share of a pass.

    Attributes:
        now: the pass.
        x: the attention's input ``(B, n, E)``.
        q: queries ``(B, H, n, D)``, rotated at their original positions.
        k, v: keys and values ``(B, H_kv, n, D)``; keys rotated likewise.
        layer: the layer's cache, or one that forgets.
        scale: factor of the attention logits.
        dropout: the base's attention dropout, 0 outside training.
        key_bias: what the key projection adds to every key before its rotation ``(H_kv * D,)``, for kinds that ask for
            it; None: nothing.
        plain_q: ``q`` before its rotation, for kinds that ask for it; None: nobody knows.
        gates: write gates ``(B, G, n)`` of the new tokens, or None; filled in by :meth:`Memory.forward`.
    """

    now: Pass
    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    layer: MemoryCacheLayer
    scale: float
    dropout: float = 0.0
    key_bias: Tensor | None = None
    plain_q: Tensor | None = None
    gates: Tensor | None = None

    def of_text(self, text: Text, layer: MemoryCacheLayer) -> "Step":
        """The step for some of its texts alone, whose padding is left out."""
        rows, skip = text.rows, text.skip
        q, k, v, plain_q, gates = (
            None if x is None else x[rows, :, skip:] for x in (self.q, self.k, self.v, self.plain_q, self.gates)
        )
        x = self.x[rows, skip:]
        return replace(self, now=text.now, x=x, q=q, k=k, v=v, layer=layer, plain_q=plain_q, gates=gates)  # type: ignore

    def readers(self, first: int) -> tuple[Tensor, Tensor]:
        """Input ``(B, n - first, E)`` and queries ``(B, H, n - first, D)`` of the tokens from ``first`` on."""
        return (self.x[:, first:], self.q[:, :, first:]) if first else (self.x, self.q)

    def plain_queries(self, first: int, dtype: torch.dtype) -> Tensor:
        """Queries ``(B, H, n - first, D)`` of the tokens from ``first`` on, before rotation."""
        if self.plain_q is None:
            return self.now.rotate_back(cast(self.q[:, :, first:], dtype), first)
        return cast(self.plain_q[:, :, first:] if first else self.plain_q, dtype)

    def differentiates(self) -> bool:
        """Whether a graph is recorded that writing to the cache in place would break."""
        if not torch.is_grad_enabled():
            return False
        return any(tensor.requires_grad for tensor in (self.q, self.k, self.v, *self.layer.tensors()))


@dataclass
class Evicted:
    """Tokens that leave the window, one after the other; query ``first + i`` reads once the i-th is written."""

    k: Tensor  # rotated (B, H_kv, m, D)
    v: Tensor  # (B, H_kv, m, D)
    gates: Tensor | None  # write gates (B, G, m)
    first: int  # the call's first query that evicts a token which is no sink
    start: int  # of the first such token, counted from the call's first token: first - W

    @property
    def count(self) -> int:
        return self.k.shape[2]

    def plain_keys(self, now: Pass, dtype: torch.dtype) -> Tensor:
        """The keys before their rotation."""
        return now.rotate_back(cast(self.k, dtype), self.start)


class Memory(nn.Module):
    """Interface of one layer's memory.

    Attributes:
        window, sinks: W and S; run-time settings, changed by ``set_window``.
        Options: dataclass of the kind's own options.
        tf32: whether products of float32 numbers may be taken in TF32 on a GPU, as torch's global switch says.
        trainable: whether there is anything to distil.
        calibrates: whether it learns from texts that it is shown, by ``observe`` and ``settle``, without gradients.
        needs_texts: whether it is of little use before that.
        needs_key_bias: whether it must know what the base adds to every key.
        needs_plain_queries: whether it must know queries as they were before their rotation.
        writes_back: whether each step changes the whole state, or only reads it.
        size: the option that says how many tokens it keeps, if it has one.
        decodes_ragged: whether a step of plain decoding may hold texts of different length.
        compiles: whether such a step depends on no number but those on the device.
    """

    is_retrofit_memory = True
    tf32 = False
    kind: ClassVar[str]
    trainable: ClassVar[bool] = True
    calibrates: ClassVar[bool] = False
    needs_texts: ClassVar[bool] = False
    needs_key_bias: ClassVar[bool] = False
    needs_plain_queries: ClassVar[bool] = False
    writes_back: ClassVar[bool] = False
    decodes_ragged: ClassVar[bool] = False
    compiles: ClassVar[bool] = False
    size: ClassVar[str | None] = None
    Options: ClassVar[type[Options]] = Options

    def __init__(self, config: Any, window: int, sinks: int, options: Any):
        """Args: ``config`` is the base's transformers configuration, ``options`` an instance of ``Options``."""
        super().__init__()
        self.window, self.sinks, self.options = window, sinks, options
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.hidden_size = config.hidden_size
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.check_window(window, sinks)

    def check_window(self, window: int, sinks: int) -> None:
        """Refuse a window that this kind cannot work with, by ``RetrofitError``, before anything is changed."""

    @classmethod
    def read_options(cls, options: dict[str, Any], saved: bool = False) -> Any:
        """``Options`` of a new memory from a mapping, or of one that was ``saved``, perhaps before it had all of them.

        Raises as :meth:`patches.options.Options.read`.
        """
        return cls.Options.read(cls.kind, {**cls.Options.before, **options} if saved else options)

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that are kept without loss; up to this many the base's own attention runs."""
        return self.window + self.sinks

    def reset_parameters(self) -> None:
        """Initialise every parameter by functions of ``transformers.initialization``, which leave loaded ones alone."""

    # ---- a forward pass ----

    def forward(self, step: Step) -> Joined | None:
        """What :meth:`attend` gives, or None while nothing is evicted: the base's own attention then runs."""
        now = step.now
        if not now.evicting and not step.layer.keeps:
            return None
        # states, gates and decays stay in float32 under mixed precision too
        with torch.autocast(step.x.device.type, enabled=False), exact_products(self.tf32):
            if now.decoding and step.differentiates():
                now = step.now = replace(now, decoding=False, results={}, elsewhere={})
            if now.decoding and self.trainable:
                step.x = cast(step.x, wide(step.x.dtype))  # once for all projections
            if now.new == 1:
                step.layer.take_tensors()
            gates = self.write_gates(step.x)
            step.gates = None if gates is None else _Transpose.apply(gates) if gates.requires_grad else gates.mT
            alone = not (now.starts.alike or (now.decoding and self.decodes_ragged))
            if not now.evicting:
                self.notice(step)
                return None
            return self.attend_each(step) if alone else self.attend(step)

    def attend_each(self, step: Step) -> Joined:
        """:meth:`attend` for texts of a padded batch, those that start alike together; padding reads zeros."""
        heads, added, parts, adds = list[Tensor](), list[Tensor](), [], False
        for text in step.now.texts:
            part, out, more = step.layer.part(text, self.state_shapes(text.now.seen)), None, None
            if text.now.new:
                out, more = self.attend(step.of_text(text, part))
            for results, x, like in ((heads, out, step.q), (added, more, step.x)):
                results.append(torch.zeros_like(like[text.rows]) if x is None else pad(x, (0, 0, text.skip, 0)))
            parts.append((text.rows, part))
            adds = adds or more is not None
        step.layer.join(parts)
        return torch.cat(heads), torch.cat(added) if adds else None

    def write_gates(self, x: Tensor) -> Tensor | None:
        """Gates ``(B, n, G)`` with which tokens of input ``x`` (B, n, E) will be written; computed when they arrive."""
        return None

    def notice(self, step: Step) -> None:
        """Look at tokens that arrive while nothing is evicted, before ``step.layer`` holds them."""

    def attend(self, step: Step) -> Joined:
        """The attention's output over sinks, window and memory for texts that start alike; also updates
        ``step.layer``."""
        raise NotImplementedError

    # ---- what it costs, for one sequence in one layer ----

    def state_tensors(self, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Kept]:
        """The tensors by name that ``step.layer.state`` holds of a sequence in a ``dtype`` model, after so many
        ``tokens``, more than ``capacity``; None means a long one."""
        raise NotImplementedError

    @property
    def state_grows(self) -> bool:
        """Whether it has no bound of its own."""
        return False

    def state_elements(self) -> int:
        """Elements of the state of a long sequence, besides sinks and window."""
        return sum(math.prod(kept.shape) for kept in self.state_tensors(torch.float32).values())

    def state_bytes(self, dtype: torch.dtype, tokens: int | None = None) -> int:
        """Bytes of the state besides sinks and window; arguments as above, and none up to ``capacity``."""
        if tokens is not None and tokens <= self.capacity:
            return 0
        return sum(kept.bytes for kept in self.state_tensors(dtype, tokens).values())

    def seen_keys(self, tokens: int) -> Tensor:
        """Keys that each query attends to by a softmax, sinks and kept tokens included: ``(tokens,)`` int64."""
        t = torch.arange(tokens)
        return torch.where(t < self.capacity, t + 1, self.seen_beyond(t))

    def seen_beyond(self, t: Tensor) -> Tensor:
        """:meth:`seen_keys` of the queries at ``t`` (n,), where that is beyond ``capacity``; elsewhere anything."""
        return torch.full_like(t, self.sinks + self.window)

    def flops(self, tokens: int) -> int:
        """Operations to write and read the memory over ``tokens`` tokens, its own matrices included.

        A product of matrices counts 2 per multiplication; what the softmax sees is in :meth:`seen_keys`.
        """
        weights = sum(parameter.numel() for parameter in self.parameters() if parameter.dim() > 1)
        return 2 * weights * tokens + self.state_flops(max(0, tokens - self.capacity))

    def state_flops(self, evicted: int) -> int:
        """Operations on the state while ``evicted`` tokens leave the window."""
        return 0

    def state_shapes(self, tokens: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the state's tensors after so many tokens of a sequence; nothing was written up to ``capacity``."""
        if tokens <= self.capacity:
            return {}
        return {name: kept.shape for name, kept in self.state_tensors(torch.float32, tokens).items()}


class WindowMemory(Memory):
    """Base class: sinks, sliding window, and a memory that is given what leaves it (here: nothing).

    Attributes:
        joins_window: whether the memory competes with the window's logits, so that :meth:`recall` needs their sum.
    """

    writes_back = decodes_ragged = compiles = True
    joins_window: ClassVar[bool] = False

    def state_tensors(self, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Kept]:
        return {}

    def attend(self, step: Step) -> Joined:
        layer, now, window = step.layer, step.now, self.window
        first, scale, dropout, lse = now.first_evicting(window, self.sinks), step.scale, step.dropout, self.joins_window
        if now.decoding:
            gone = Evicted(*layer.replace(now, step.k, step.v, step.gates), 0, -window)
            near, total = decode_attention(step.q, layer.keys, layer.values, scale=scale, dropout=dropout, lse=lse)
            return self.recall(step, near, total, gone)
        stream = layer.stream(now, step.k, step.v, step.gates)
        given = (step.q, stream.k, stream.v, stream.sink_k, stream.sink_v)
        near, total = window_attention(*given, window=window, start=now.seen, scale=scale, dropout=dropout, lse=lse)
        out: Joined = near, None
        if first < now.new:
            k, v = stream.k[:, :, first : now.new], stream.v[:, :, first : now.new]
            gates = None if stream.gates is None else stream.gates[:, :, first : now.new]
            out = self.recall(step, near, total, Evicted(k, v, gates, first, first - window))
        layer.commit(stream, now)
        return out

    def recall(self, step: Step, near: Tensor, lse: Tensor | None, gone: Evicted) -> Joined:
        """Write the evicted tokens, read the memory and join it with the window's output; here there is no memory.

        Args:
            near: the window's output ``(B, H, n, D)``.
            lse: log-sum-exp of its logits ``(B, H, n)``, float32 or wider, if the kind ``joins_window``.
            gone: what leaves the window.
        """
        return near, None


class WindowOnly(WindowMemory):
    """Sinks + sliding window and nothing else (StreamingLLM's attention at original positions, arXiv 2309.17453)."""

    kind = "none"
    trainable = False


class MatrixMemory(WindowMemory):
    """Base class: one matrix per head, written with evicted tokens, read by a product, added to the window's output.

    Attributes:
        shared: whether the query heads of a key head read one matrix; else each has its own.
        writes: products of a written token with each matrix.
    """

    shared: ClassVar[bool] = False
    writes: ClassVar[int] = 1

    @property
    def states(self) -> int:
        """H_s, the matrices of a layer; whatever writes is there once for each."""
        return self.kv_heads if self.shared else self.heads

    def read(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Write ``m`` tokens one after the other and read the memory after each.

        Args:
            x, q: attention inputs ``(B, m, E)`` and queries ``(B, H, m, D)`` of the reading tokens.
            k, v, gates: of the written tokens, ``(B, H_kv, m, D)`` and ``(B, G, m)``.
            state: the state before, or None.

        Returns:
            What is added to the window's output ``(B, H, m, D)``, and the new state.
        """
        raise NotImplementedError

    def state_tensors(self, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Kept]:
        return {"matrix": Kept((self.states, self.head_dim, self.head_dim), wide(dtype))}

    def state_flops(self, evicted: int) -> int:
        return 2 * self.head_dim**2 * (self.writes * self.states + self.heads) * evicted  # each query head reads once

    def recall(self, step: Step, near: Tensor, lse: Tensor | None, gone: Evicted) -> Joined:
        assert gone.gates is not None
        state = step.layer.state
        read, state["matrix"] = self.read(*step.readers(gone.first), gone.k, gone.v, gone.gates, state.get("matrix"))
        return add_from(near, gone.first, read), None


def spread_by_head(x: Tensor) -> Tensor:
    """A number for each token and head ``(B, n, H)`` as ``(B, H, n, 1)``."""
    return x.view(len(x), -1, 1, 1) if x.shape[1] == 1 else x.mT.unsqueeze(-1)


def add_from(near: Tensor, first: int, added: Tensor) -> Tensor:
    """``near`` (B, H, n, D) with ``added`` (B, H, n - first, D) on what comes from ``first`` on."""
    added = cast(added, near.dtype)
    return near + added if first == 0 else torch.cat([near[:, :, :first], near[:, :, first:] + added], 2)


class Pairs(NamedTuple):
    """Tokens that are written one after the other, and beside each the query that reads next."""

    q: Tensor  # (B, H, m, D); zeros where nothing reads
    k: Tensor  # (B, H_kv, m, D)
    v: Tensor  # (B, H_kv, m, D)
    start: int  # of the first written token, counted from the call's first token
    lag: int  # tokens between a written one and the query beside it: W, or 0
    lead: int  # pairs before the first one whose reading is used


@dataclass(frozen=True)
class PopulationOptions(Options):
    """Options of memories without write gates.

    Attributes:
        population: ``"evicted"``, so that every token is in exactly one place, or ``"all"``: every token as it arrives.
    """

    population: str = "evicted"

    def __post_init__(self) -> None:
        one_of("population", self.population, "evicted", "all")


class UngatedMemory(WindowMemory):
    """Base class: a matrix memory whose writing depends on keys and values alone; it can take either population.

    Attributes:
        products: how often a written token costs one multiplication per element of the state: written, read by each
            query of its group, corrected.
    """

    Options = PopulationOptions

    @property
    def products(self) -> float:
        return 1 + self.heads / self.kv_heads

    def state_flops(self, evicted: int) -> int:
        return int(2 * self.state_elements() * self.products * evicted)

    def exchange(self, step: Step, pairs: Pairs, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Write and read pair after pair; ``state`` is empty before the first write.

        Returns:
            The readings ``(B, H, m, R)`` for :meth:`join`, zero where nothing was ever written, and the new state.
        """
        raise NotImplementedError

    def join(self, near: Tensor, read: Tensor) -> Joined:
        """Put readings ``(B, H, n, R)`` and the window's output ``(B, H, n, D)`` together; returns as ``attend``."""
        raise NotImplementedError

    def recall(self, step: Step, near: Tensor, lse: Tensor | None, gone: Evicted) -> Joined:
        first = gone.first
        if self.options.population == "evicted":
            pairs = Pairs(step.readers(first)[1], gone.k, gone.v, gone.start, self.window, 0)
        else:
            pairs = self._all_arrived(step, first)
        read, step.layer.state = self.exchange(step, pairs, step.layer.state)
        if pairs.lead or first:
            read = pad(read[:, :, pairs.lead :], (0, 0, first, 0))
        return self.join(near, read)

    def _all_arrived(self, step: Step, first: int) -> Pairs:
        """All tokens that are not written yet; nothing reads before the first eviction, as with the other population.

        The base's own attention runs until then, without the memory: up to W tokens wait in the cache.
        """
        k, v, start = step.k, step.v, 0
        if not step.layer.state:
            stream, start = step.layer.stream(step.now, k, v, None), self.sinks - step.now.seen
            k, v = (x[:, :, self.window + start :] for x in (stream.k, stream.v))
        lead = first - start
        return Pairs(pad(step.q[:, :, first:], (0, 0, lead, 0)), k, v, start, 0, lead)


class _Transpose(torch.autograd.Function):
    """``x.mT``. Its gradient is contiguous, as torch.compile takes the gradients of softplus and elu to be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mT.contiguous()

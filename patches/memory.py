"""What a memory is: the interface every kind fills in, and the sinks + window that most of them stand on.

The attention hands a :class:`Step` to ``Memory.attend`` once something must be evicted, and gets back what goes into
the output projection. Everything a kind does differently (what it keeps, how it is read, where it joins) is inside
that one call.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .cache import MemoryCacheLayer, Stream, plain_stream
from .errors import RetrofitError, nearest
from .rotary import Rotary
from .window import decode_attention, decode_attention_lse, window_attention, window_attention_lse


@dataclass
class Step:
    """One layer's share of a forward pass over ``n`` new tokens.

    Attributes:
        x: the attention's input ``(B, n, E)``.
        q: queries ``(B, H, n, D)``, rotated at their original positions.
        k, v: keys and values ``(B, H_kv, n, D)``; keys rotated likewise.
        gates: write gates ``(B, n, G)`` of the new tokens, or None.
        layer: the layer's cache, or None when nothing is cached.
        seen: tokens before this call, padding included.
        pad: left padding of each row ``(B,)``, or None when no row is padded.
        min_pad, max_pad: its extremes.
        offset: rotary position of a slot minus the slot, for each row ``(B or 1,)``.
        rotary: the model's tables at any positions.
        scale: factor of the attention logits.
        dropout: the base's attention dropout, 0 outside training.
        key_bias: what the key projection adds to every key before its rotation ``(H_kv * D,)``, or None.
        lse: log-sum-exp ``(B, n, H)`` of the logits over sinks and window, for kinds that ``joins_window``.
    """

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor | None
    layer: MemoryCacheLayer | None
    seen: int
    pad: Tensor | None
    min_pad: int
    max_pad: int
    offset: Tensor
    rotary: Rotary
    scale: float
    dropout: float
    key_bias: Tensor | None = None
    lse: Tensor | None = None


@dataclass(frozen=True)
class Options:
    """A kind's own options; a subclass adds fields and checks their ranges in ``__post_init__``."""


class Memory(nn.Module):
    """Interface of one layer's memory.

    Attributes:
        window, sinks: W and S; run-time settings, changed by ``set_window``.
        Options: dataclass of the kind's own options.
        trainable: whether there is anything to distil.
        observes: whether it must see the queries of a cached text from the first token on, by :meth:`observe`.
    """

    is_retrofit_memory = True
    kind: ClassVar[str]
    trainable: ClassVar[bool] = True
    observes: ClassVar[bool] = False
    Options: ClassVar[type] = Options

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
        """Refuse a window that this kind cannot work with, when patching and before ``set_window`` changes anything.

        Raises:
            RetrofitError: with what to choose instead.
        """

    @classmethod
    def read_options(cls, options: dict[str, Any]) -> Any:
        """Build ``Options`` from a mapping.

        Raises:
            RetrofitError: an option this kind does not have, or a value out of range.
        """
        known = [f.name for f in fields(cls.Options)]
        for name in options:
            if name not in known:
                has = f"its options are {', '.join(known)}" if known else "it has no options"
                raise RetrofitError(f"memory {cls.kind!r} has no option {name!r}{nearest(name, known)}: {has}")
            value = options[name]
            if isinstance(value, int | float) and not abs(value) < 2**63:
                raise RetrofitError(f"{name}={value!r}: give a number, and a smaller one")
        return cls.Options(**options)

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that are kept without loss; up to this many the base's own attention runs."""
        return self.window + self.sinks

    def state_elements(self) -> int:
        """Elements of the state that one sequence needs in this layer, besides sinks and window."""
        raise NotImplementedError

    def state_bytes(self, dtype: torch.dtype, tokens: int | None = None) -> int:
        """Bytes of the state of one sequence in this layer of a ``dtype`` model, besides sinks and window.

        Args:
            tokens: of the sequence so far; None means a long one. Up to ``capacity`` there is nothing yet.
        """
        if tokens is not None and tokens <= self.capacity:
            return 0
        return self.state_elements() * torch.promote_types(dtype, torch.float32).itemsize

    def reset_parameters(self) -> None:
        """Initialise every parameter by functions of ``transformers.initialization``, which leave loaded ones alone."""
        raise NotImplementedError

    def write_gates(self, x: Tensor) -> Tensor | None:
        """Gates ``(B, n, G)`` with which tokens of input ``x`` (B, n, E) will be written; computed when they arrive."""
        raise NotImplementedError

    def attend(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """The attention's output over sinks, window and memory; also updates ``step.layer``.

        Returns:
            The heads before the output projection ``(B, n, H, D)``, and what to add after it ``(B, n, E)`` or None.
        """
        raise NotImplementedError

    def observe(self, step: Step) -> None:
        """Note what the base's own attention did: ``step.layer`` holds all tokens, those of ``step`` included."""
        raise NotImplementedError


class WindowOnly(Memory):
    """Sinks + sliding window and nothing else (StreamingLLM's attention at original positions, arXiv 2309.17453).

    Attributes:
        joins_window: whether the memory competes with the window's logits and :meth:`recall` needs ``step.lse``.
    """

    kind = "none"
    trainable = False
    joins_window: ClassVar[bool] = False

    def state_elements(self) -> int:
        return 0

    def reset_parameters(self) -> None:
        pass

    def write_gates(self, x: Tensor) -> Tensor | None:
        return None

    def attend(self, step: Step) -> tuple[Tensor, Tensor | None]:
        layer, n = step.layer, step.x.shape[1]
        if layer is not None and self._one_more(step, layer):
            k, v, gates = layer.push(step.k, step.v, step.gates)
            local = self._look_once(step, layer)
            return self.recall(step, local, 0, k, v, gates)
        if layer is None:
            stream = plain_stream(step.k, step.v, step.gates, step.pad, seen=0, window=self.window, sinks=self.sinks)
        else:
            stream = layer.stream(step.k, step.v, step.gates, step.pad)
        local = self._look(step, stream)
        # the query that evicts the first token that is not a sink; before it nothing is written, and nothing may be
        # read
        first = max(self.capacity + step.min_pad - step.seen, 0)
        k, v = stream.k[:, :, first:n], stream.v[:, :, first:n]
        gates = None if stream.gates is None else stream.gates[:, first:n]
        out = self.recall(step, local, first, k, v, gates) if first < n else (local, None)
        if layer is not None:
            layer.commit(stream, n)
        return out

    def _look(self, step: Step, stream: Stream) -> Tensor:
        rows = (step.q, stream.k, stream.v, stream.sink_k, stream.sink_v)
        how: dict[str, Any] = {
            "window": self.window,
            "start": step.seen,
            "scale": step.scale,
            "pad": step.pad,
            "max_pad": step.max_pad,
            "dropout": step.dropout,
        }
        if not self.joins_window:
            return window_attention(*rows, **how)
        local, step.lse = window_attention_lse(*rows, **how)
        return local

    def _look_once(self, step: Step, layer: MemoryCacheLayer) -> Tensor:
        rows = (step.q, layer.keys, layer.values)
        how: dict[str, Any] = {"scale": step.scale, "dropout": step.dropout}
        if not self.joins_window:
            return decode_attention(*rows, **how)
        local, step.lse = decode_attention_lse(*rows, **how)
        return local

    def _one_more(self, step: Step, layer: MemoryCacheLayer) -> bool:
        """Whether this is plain decoding: one token, every row's buffer full, no graph for in-place writes to break."""
        full = layer.evicting and step.seen >= self.capacity + step.max_pad
        if not full or step.x.shape[1] != 1:
            return False
        graph = (step.q, step.k, step.v, layer.keys, layer.values)
        return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in graph))

    def recall(
        self, step: Step, local: Tensor, first: int, k: Tensor, v: Tensor, gates: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Write the evicted tokens, read the memory and join it with the window's output; here there is no memory.

        Query ``first + i`` is paired with the ``i``-th evicted token: the one at distance W, written before it reads.

        Args:
            local: the window's output ``(B, n, H, D)``.
            first: index of the first query that reads.
            k, v: evicted keys and values ``(B, H_kv, n - first, D)``.
            gates: their write gates ``(B, n - first, G)``.

        Returns:
            As :meth:`attend`.
        """
        return local, None


class MatrixMemory(WindowOnly):
    """One matrix per head, written with evicted tokens, read by a product, added before the output projection."""

    trainable = True

    def read(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Write ``m`` tokens one after the other and read the memory after each.

        Args:
            x: attention inputs of the reading tokens ``(B, m, E)``.
            q: their queries ``(B, H, m, D)``.
            k, v: written keys and values ``(B, H_kv, m, D)``.
            gates: write gates of the written tokens ``(B, m, G)``; rows with no token to write have been silenced.
            state: the state before, or None.

        Returns:
            What is added to the window's output ``(B, m, H, D)``, exactly zero where nothing was ever written, and the
            new state.
        """
        raise NotImplementedError

    def silence(self, gates: Tensor, valid: Tensor) -> Tensor:
        """Gates ``(B, m, G)`` that leave the state untouched where ``valid`` (B, m) is False (padding and sinks)."""
        raise NotImplementedError

    def recall(
        self, step: Step, local: Tensor, first: int, k: Tensor, v: Tensor, gates: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert gates is not None
        m = k.shape[2]
        if step.pad is not None:
            slot = torch.arange(m, device=k.device) + (step.seen + first - self.window)
            gates = self.silence(gates, slot >= step.pad[:, None] + self.sinks)
        state = step.layer.state.get("matrix") if step.layer is not None else None
        with torch.autocast(
            k.device.type, enabled=False
        ):  # the state and its decay stay in float32 under mixed precision too
            read, state = self.read(step.x[:, first:], step.q[:, :, first:], k, v, gates, state)
        if step.layer is not None:
            step.layer.state["matrix"] = state
        read = read.to(local.dtype)
        return (local + read if first == 0 else torch.cat([local[:, :first], local[:, first:] + read], 1)), None

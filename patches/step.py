"""What a layer works on: the forward pass as all layers share it, and the layer's own share of it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from .cache import MemoryCacheLayer
from .frames import Frame
from .padding import Starts
from .precision import cast
from .rotary import Rotary, Turn, after, back, for_heads, turned

T = TypeVar("T")


@dataclass(frozen=True)
class Evicted:
    """Who leaves a window in this pass, and who reads next: query ``first + i`` evicts the token at ``slots[i]``.

    Attributes:
        first: index of the first query that evicts a token which is neither padding nor sink.
        start: slot of the first evicted token; ``count``: how many.
        written: False where a row's token is padding or a sink ``(B, count)``; None: nowhere.
    """

    first: int
    start: int
    count: int
    written: Tensor | None


@dataclass
class Pass:
    """A forward pass over ``new`` tokens with the memory on, made once by the model for all its layers.

    What is a number is known to Python; tensors are made when first asked for, once for all layers on ``device``.

    Attributes:
        seen: tokens before this pass, padding included.
        new: tokens in it.
        starts: where each row's text starts.
        evicting: whether a token leaves a window in this pass or has before.
        rotary: the model's rotary embedding.
        device: where the tensors are; ``home``: where the model was called.
        keeper: index of the layer whose cache keeps ``starts``.
        slot: of the last new token ``(1,)``, on ``home``, in the cache; None without one.
        full: whether this is plain decoding: one token, and every row's sinks and window are there.
    """

    seen: int
    new: int
    starts: Starts
    evicting: bool
    rotary: Rotary
    device: torch.device
    home: torch.device
    keeper: int = 0
    slot: Tensor | None = None
    full: bool = False
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)
    _elsewhere: dict[torch.device, "Pass"] = field(default_factory=dict, repr=False)

    def to(self, device: Any, **how: Any) -> "Pass":
        """The same pass on another device; made once for all layers there. accelerate's hooks call it, too."""
        device = torch.device(device)
        if device == self.device:
            return self
        if device not in self._elsewhere:
            there = replace(self, device=device, _made={}, _elsewhere={self.device: self})
            self._elsewhere[device] = there
        return self._elsewhere[device]

    def once(self, name: Any, make: Callable[[], T]) -> T:
        """What ``make`` gives, made for the first layer that asks for ``name`` and kept for the others."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @property
    def pad(self) -> Tensor | None:
        """Left padding of each row ``(B,)``, or None when no row is padded."""
        return self.starts.on(self.device)[0]

    @property
    def offset(self) -> Tensor:
        """Rotary position of a slot less the slot ``(1 or B,)``."""
        return self.starts.on(self.device)[1]

    @property
    def min_pad(self) -> int:
        return min(self.starts.pads)

    @property
    def max_pad(self) -> int:
        return max(self.starts.pads)

    def still(self) -> "Pass":
        """The same pass for a layer that does not rotate."""

        def unturned(positions: Tensor) -> Turn:
            cos, sin = self.rotary(positions)
            return torch.ones_like(cos), torch.zeros_like(sin)

        return self.once("still", lambda: replace(self, rotary=unturned, _made={}, _elsewhere={}))

    def turn(self, positions: Tensor) -> Turn:
        """The rotary tables at ``positions`` (1 or B, n)."""
        if self.device == self.home:
            return self.rotary(positions)
        cos, sin = self.rotary(positions.to(self.home))
        return cos.to(self.device), sin.to(self.device)

    def slots(self, start: int, count: int) -> Tensor:
        """The slots ``start .. start + count - 1``."""
        return self.once(("slots", start, count), lambda: self._slots(start, count))

    def _slots(self, start: int, count: int) -> Tensor:
        if self.full and self.slot is not None and count == 1:  # a compiled step knows no numbers, only distances
            slot = self.slot if self.device == self.home else self.slot.to(self.device)
            return slot if start == self.seen else slot - (self.seen - start)
        return torch.arange(start, start + count, device=self.device)

    def places(self, window: int, sinks: int) -> tuple[Tensor, Tensor]:
        """Where in a ring of W tokens the new token of plain decoding goes, and in the buffer behind S sinks: ``(1,)``
        each."""
        place = lambda: self.slots(self.seen, 1) % window  # noqa: E731
        return self.once(("places", window, sinks), lambda: (place(), place() + sinks))

    def turn_of_slots(self, start: int, count: int) -> Turn:
        """The rotary tables of the tokens at these slots ``(1 or B, count, D)``."""
        at = lambda: self.turn(self.slots(start, count) + self.offset[:, None])  # noqa: E731
        return self.once(("turn", start, count), at)

    def turned_back(self, x: Tensor, start: int) -> Tensor:
        """Rotated queries or keys ``(B, H, n, D)`` of the slots from ``start`` on as they were at position 0."""
        n = x.shape[2]
        tables = lambda: for_heads(*back(*(cast(t, x.dtype) for t in self.turn_of_slots(start, n))))  # noqa: E731
        cos, sin = self.once(("back", start, n), tables)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    def from_first_token(self, x: Tensor) -> Tensor:
        """Queries or keys ``(B, heads, m, D)`` turned as if each row's positions were counted from its first token.

        For what depends on where a token stands and not only on distances: padding must not move it.
        """
        tables = lambda: for_heads(*after(back(*self.turn_of_starts()), self.turn_of_zero()))  # noqa: E731
        return turned(x, *self.once("from first", tables))

    def turn_of_starts(self) -> Turn:
        """The rotary tables of each row's first real token ``(1 or B, 1, D)``."""
        first = self.offset if self.pad is None else self.offset + self.pad
        return self.once("starts", lambda: self.turn(first[:, None]))

    def turn_of_zero(self) -> Turn:
        """The rotary tables of position 0 ``(1, 1, D)``; scaled ones do not leave it as it is."""
        return self.once("zero", lambda: self.turn(torch.zeros(1, 1, dtype=torch.long, device=self.device)))

    def evicted(self, window: int, sinks: int) -> Evicted:
        """Who leaves a window of W tokens behind S sinks.

        With T = 10 tokens, W = 4, S = 1 the query at index 5 is the first that evicts a token which is no sink: the one
        at slot 1. The queries 5 to 9 evict 1 to 5.

        >>> whole = Pass(0, 10, Starts(), True, None, torch.device("cpu"), torch.device("cpu"))
        >>> whole.evicted(window=4, sinks=1)
        Evicted(first=5, start=1, count=5, written=None)
        """
        return self.once(("evicted", window, sinks), lambda: self._evicted(window, sinks))

    def _evicted(self, window: int, sinks: int) -> Evicted:
        if self.full:
            return Evicted(0, self.seen - window, 1, None)
        first = min(max(window + sinks + self.min_pad - self.seen, 0), self.new)
        start, count = self.seen + first - window, self.new - first
        written = None if self.pad is None else self.slots(start, count) >= self.pad[:, None] + sinks
        return Evicted(first, start, count, written)

    def frame(self, sinks: int, unit: int, start: int, count: int) -> Frame:
        """``count`` tokens from slot ``start`` on in blocks of ``unit`` tokens, counted from behind the sinks."""
        pads = list(self.starts.pads)
        make = lambda: Frame(start, count, pads, sinks, unit, self.device)  # noqa: E731
        return self.once(("frame", sinks, unit, start, count), make)


@dataclass
class Step:
    """One layer's share of a pass.

    Attributes:
        now: the pass.
        x: the attention's input ``(B, n, E)``.
        q: queries ``(B, H, n, D)``, rotated at their original positions.
        k, v: keys and values ``(B, H_kv, n, D)``; keys rotated likewise.
        layer: the layer's cache, or None when nothing is cached.
        scale: factor of the attention logits.
        dropout: the base's attention dropout, 0 outside training.
        key_bias: what the key projection adds to every key before its rotation ``(H_kv * D,)``, for kinds that ask for
            it; None: nothing.
        plain_q: ``q`` before its rotation, for kinds that ask for it; None: nobody knows.
        gates: write gates ``(B, n, G)`` of the new tokens, or None; filled in by ``Memory.forward``.
        lse: log-sum-exp ``(B, n, H)`` of the logits over sinks and window, for kinds that ``joins_window``.
    """

    now: Pass
    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    layer: MemoryCacheLayer | None
    scale: float
    dropout: float = 0.0
    key_bias: Tensor | None = None
    plain_q: Tensor | None = None
    gates: Tensor | None = None
    lse: Tensor | None = None

    def reading(self, first: int) -> tuple[Tensor, Tensor]:
        """Input ``(B, n - first, E)`` and queries ``(B, H, n - first, D)`` of the tokens from ``first`` on."""
        return (self.x[:, first:], self.q[:, :, first:]) if first else (self.x, self.q)

    def plain_queries(self, first: int, dtype: torch.dtype) -> Tensor:
        """Queries ``(B, H, n - first, D)`` of the tokens from ``first`` on without their positions."""
        if self.plain_q is None:
            return self.now.turned_back(cast(self.q[:, :, first:], dtype), self.now.seen + first)
        return cast(self.plain_q[:, :, first:] if first else self.plain_q, dtype)

    def differentiates(self, layer: MemoryCacheLayer) -> bool:
        """Whether a graph is recorded that writing to ``layer`` in place would break."""
        if not torch.is_grad_enabled():
            return False
        return any(tensor.requires_grad for tensor in (self.q, self.k, self.v, *layer.tensors()))

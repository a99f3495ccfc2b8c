"""Matrix memories without write gates: which tokens they are given, those that leave the window or every one."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .cache import MemoryCacheLayer
from .errors import RetrofitError, nearest
from .memory import Options, Step, WindowOnly
from .rotary import rotate, unrotate

POPULATIONS = ("evicted", "all")


@dataclass
class Pairs:
    """Tokens that are written one after the other, and beside each the query that reads next.

    Attributes:
        q: queries ``(B, H, m, D)``; zeros where nothing reads.
        k, v: written keys and values ``(B, H_kv, m, D)``.
        written: False where a row has no token to write, only padding or a sink, ``(B, m)``; None: it always has.
        reading: False where a row has evicted nothing yet and must not read, ``(B, m - lead)``; None: all may.
        slot: slot of each written token ``(m,)``.
        lag: slot of the query less the slot of the token beside it: W, or 0.
        lead: pairs before the first one whose reading is used.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    written: Tensor | None
    reading: Tensor | None
    slot: Tensor
    lag: int
    lead: int


@dataclass(frozen=True)
class PopulationOptions(Options):
    """What every such memory can be told.

    Attributes:
        population: ``"evicted"``, so that every token is in exactly one place, or ``"all"``: every token as it arrives.
    """

    population: str = "evicted"

    def __post_init__(self) -> None:
        one_of("population", self.population, POPULATIONS)


class UngatedMemory(WindowOnly):
    """A matrix memory whose writing depends on keys and values alone, so that it can take either population."""

    trainable = True
    Options = PopulationOptions

    def exchange(self, step: Step, pairs: Pairs, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Write and read pair after pair.

        Args:
            step: the forward pass, for rotary positions.
            pairs: what to write and what reads.
            state: the state before, by name; empty before the first write.

        Returns:
            The readings ``(B, H, m, R)`` for :meth:`join`, zero where nothing was ever written, and the new state.
        """
        raise NotImplementedError

    def join(self, local: Tensor, read: Tensor) -> tuple[Tensor, Tensor | None]:
        """Put readings ``(B, n, H, R)`` and the window's output ``(B, n, H, D)`` together; returns as ``attend``."""
        raise NotImplementedError

    def recall(
        self, step: Step, local: Tensor, first: int, k: Tensor, v: Tensor, gates: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        evicted = self.options.population == "evicted"
        pairs = self._evicted(step, first, k, v) if evicted else self._every(step, first)
        with torch.autocast(k.device.type, enabled=False):  # the state stays in float32 under mixed precision too
            read, state = self.exchange(step, pairs, step.layer.state if step.layer is not None else {})
            read = read[:, :, pairs.lead :].transpose(1, 2)
            if pairs.reading is not None:
                read = read * pairs.reading[:, :, None, None]
            if step.layer is not None:
                step.layer.state = state
            return self.join(local, pad(read, (0, 0, 0, 0, first, 0)))

    def _one_more(self, step: Step, layer: MemoryCacheLayer) -> bool:
        # before the first write the tokens in the cache may have to be written too: see _every
        return bool(layer.state) and super()._one_more(step, layer)

    def _evicted(self, step: Step, first: int, k: Tensor, v: Tensor) -> Pairs:
        slot = torch.arange(k.shape[2], device=k.device) + (step.seen + first - self.window)
        written = None if step.pad is None else slot >= step.pad[:, None] + self.sinks
        return Pairs(step.q[:, :, first:], k, v, written, None, slot, self.window, 0)

    def _every(self, step: Step, first: int) -> Pairs:
        """All tokens that are not written yet; nothing reads before the first eviction, as with the other population.

        The base's own attention runs until then, without the memory: up to W tokens wait in the cache.
        """
        k, v, start = step.k, step.v, step.seen
        if step.layer is not None and not step.layer.state:
            stream = step.layer.stream(k, v, None, step.pad)
            k, v, start = stream.k, stream.v, step.seen - self.window
        slot = torch.arange(k.shape[2], device=k.device) + start
        edge = slot.new_zeros(1) if step.pad is None else step.pad
        reading = None if step.pad is None else slot[-step.q.shape[2] + first :] >= edge[:, None] + self.capacity
        lead = step.seen + first - start
        q = pad(step.q[:, :, first:], (0, 0, lead, 0))
        return Pairs(q, k, v, slot >= edge[:, None] + self.sinks, reading, slot, 0, lead)


def from_first_token(step: Step, x: Tensor) -> Tensor:
    """Queries or keys ``(B, heads, m, D)`` turned as if each row's positions were counted from its first token.

    For what depends on where a token stands and not only on distances: padding must not move it.
    """
    shift = (step.offset if step.pad is None else step.offset + step.pad)[:, None]
    return rotate(unrotate(x, *step.rotary(shift)), *step.rotary(torch.zeros_like(shift)))


def per_query(x: Tensor, q: Tensor) -> Tensor:
    """``x`` (R, 1, ...), one for each state, seen once for each of its queries ``q`` (R, G, m, D): ``(R, G, ...)``."""
    return x.expand(-1, q.shape[1], *x.shape[2:])


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse an option's ``value`` that is not one of ``choices``.

    Raises:
        RetrofitError: it is not.
    """
    if value not in choices:
        raise RetrofitError(f"{name}={value!r} is not known{nearest(value, choices)}: use {' or '.join(choices)}")

"""Matrix memories without write gates: which tokens they are given, those that leave the window or every one."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from .cache import MemoryCacheLayer
from .errors import one_of
from .memory import Joined
from .options import Options
from .step import Evicted, Step
from .window_only import WindowOnly


@dataclass
class Pairs:
    """Tokens that are written one after the other, and beside each the query that reads next.

    Attributes:
        q: queries ``(B, H, m, D)``; zeros where nothing reads.
        k, v: written keys and values ``(B, H_kv, m, D)``.
        written: False where a row has no token to write, only padding or a sink, ``(B, m)``; None: it always has.
        reading: False where a row has evicted nothing yet and must not read, ``(B, m - lead)``; None: all may.
        start: slot of the first written token.
        lag: slot of the query less the slot of the token beside it: W, or 0.
        lead: pairs before the first one whose reading is used.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    written: Tensor | None
    reading: Tensor | None
    start: int
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
        one_of("population", self.population, "evicted", "all")


class UngatedMemory(WindowOnly):
    """A matrix memory whose writing depends on keys and values alone, so that it can take either population.

    Attributes:
        products: how often a written token costs one multiplication per element of the state: written, read by each
            query of its group, corrected.
    """

    trainable = True
    Options = PopulationOptions

    @property
    def products(self) -> float:
        return 1 + self.heads / self.kv_heads

    def state_flops(self, evicted: int) -> int:
        return int(2 * self.state_elements() * self.products * evicted)

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

    def join(self, local: Tensor, read: Tensor) -> Joined:
        """Put readings ``(B, n, H, R)`` and the window's output ``(B, n, H, D)`` together; returns as ``attend``."""
        raise NotImplementedError

    def recall(self, step: Step, local: Tensor, gone: Evicted, k: Tensor, v: Tensor, gates: Tensor | None) -> Joined:
        if self.options.population == "evicted":
            q = step.q[:, :, gone.first :]
            pairs = Pairs(q, k, v, gone.written, None, gone.start, self.window, 0)
        else:
            pairs = self._every(step, gone.first)
        read, state = self.exchange(step, pairs, step.layer.state if step.layer is not None else {})
        read = read[:, :, pairs.lead :].transpose(1, 2)
        if pairs.reading is not None:
            read = read * pairs.reading[:, :, None, None]
        if step.layer is not None:
            step.layer.state = state
        return self.join(local, pad(read, (0, 0, 0, 0, gone.first, 0)) if gone.first else read)

    def decodes(self, step: Step, layer: MemoryCacheLayer) -> bool:
        # before the first write the tokens in the cache may have to be written too: see _every
        return bool(layer.state) and super().decodes(step, layer)

    def _every(self, step: Step, first: int) -> Pairs:
        """All tokens that are not written yet; nothing reads before the first eviction, as with the other population.

        The base's own attention runs until then, without the memory: up to W tokens wait in the cache.
        """
        now = step.now
        k, v, start = step.k, step.v, now.seen
        if step.layer is not None and not step.layer.state:
            stream = step.layer.stream(k, v, None, now.pad)
            k, v, start = stream.k, stream.v, now.seen - self.window
        slot = now.slots(start, k.shape[2])
        edge = slot.new_zeros(1) if now.pad is None else now.pad
        reading = None if now.pad is None else slot[-now.new + first :] >= edge[:, None] + self.capacity
        lead = now.seen + first - start
        q = pad(step.q[:, :, first:], (0, 0, lead, 0))
        return Pairs(q, k, v, slot >= edge[:, None] + self.sinks, reading, start, 0, lead)

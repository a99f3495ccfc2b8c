"""TOVA (arXiv 2401.06104): keep the tokens that the newest query attends to, drop the one it attends to least."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import one_of
from .eviction import Eviction, EvictionOptions
from .memory import Step
from .options import true_or_false
from .rotary import rotate, unrotate

LONGEST = 10  # tokens; a longer gap between kept tokens is squeezed (section 7.2)


@dataclass(frozen=True)
class TovaOptions(EvictionOptions):
    """Options of every eviction policy, and:

    Attributes:
        protect_newest: whether the newest token is kept for at least one step (as in kvpress; the paper's code drops
            it if nobody attends to it).
        positions: rotary positions of what is kept: the ``"true"`` ones, or gaps squeezed by ``"lnln"``.
    """

    protect_newest: bool = False
    positions: str = "true"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("positions", self.positions, "true", "lnln")
        true_or_false("protect_newest", self.protect_newest)


class Tova(Eviction):
    """Algorithm 1: S + W entries of its own choice, the first S tokens pinned ("TOVA + i" for i = S, TOVA for S = 0).

    An entry's score is the mean weight that the newest query of all heads gives it (of one group, ``scope="head"``).
    With ``positions="lnln"`` (section 7.2, for texts beyond the base's context) kept tokens stand at the sum of their
    squeezed gaps, the query included; keys are then held before rotation.
    """

    kind = "tova"
    Options = TovaOptions

    @property
    def protected(self) -> int:
        return int(self.options.protect_newest)

    def score(self, before: Tensor, weights: Tensor) -> Tensor:
        return weights[:, :, -1].mean(1)

    @property
    def replaces(self) -> bool:
        return self.options.positions == "lnln"

    def plain(self, x: Tensor, step: Step, start: int) -> Tensor:
        if not self.replaces:
            return x
        cos, sin = step.now.tables(start, x.shape[2], torch.float32)
        return unrotate(x.to(cos.dtype), cos, sin).to(x.dtype)

    def turned(self, q: Tensor, k: Tensor, position: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        if not self.replaces:
            return q, k
        cos, sin = step.now.turn(squeezed(position))
        n = q.shape[2]
        return rotate(q, cos[:, -n:], sin[:, -n:]), rotate(k, cos, sin)


def squeezed(position: Tensor) -> Tensor:
    """Positions ``(N, R)`` of kept tokens when a gap g between neighbours is g up to 10 and ln ln g beyond, from 0 on.

    The function falls from 10 to 0.87 between g = 10 and 11, as published, and its values are fractions.
    """
    gap = position.diff(dim=1).to(torch.float32)
    gap = torch.where(gap <= LONGEST, gap, gap.clamp_min(LONGEST).log().log())
    return torch.nn.functional.pad(gap.cumsum(1), (1, 0))

"""How many rows KVM may hold (Key-Value Means, arXiv 2605.09877): a budget, and what it means block by block."""

import math
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Budget:
    """B(e), the rows a head may hold after ``e`` tokens: never fewer than ``rows``.

    Attributes:
        kind: ``"fixed"``; ``"power_law"``, ``factor * e ** exponent``; or ``"saturating"``, ``N e / (N + e)``.
        rows: the number itself if fixed, the least otherwise.
        factor, exponent: of the power law.
        saturation: N.
        multiple: growing budgets are rounded down to a multiple of this.
    """

    kind: str = "fixed"
    rows: int = 1
    factor: float = 16.0
    exponent: float = 0.5
    saturation: int = 1024
    multiple: int = 1

    def __call__(self, tokens: int) -> int:
        if self.kind == "fixed":
            return self.rows
        if self.kind == "power_law":
            allowed = math.floor(self.factor * float(tokens) ** self.exponent)
        else:
            allowed = math.floor(self.saturation * tokens / (self.saturation + tokens))
        return max(self.rows, allowed // self.multiple * self.multiple)


class Schedule:
    """How many rows there are once so many blocks of ``chunk`` tokens have left a window of ``window``.

    The first block founds a row per token. The block ``[b, b + C)`` that leaves when ``e = b + W`` tokens have been
    seen adds as many as B(e) allows, ``b + C`` in all at most. With blocks of 2 and 3 rows:

    >>> [Schedule(Budget("fixed", rows=3), chunk=2, window=4).rows(blocks) for blocks in range(5)]
    [0, 2, 3, 3, 3]
    """

    def __init__(self, budget: Budget, chunk: int, window: int):
        self.budget, self.chunk, self.window = budget, chunk, window
        self._counts = [0, chunk]

    def rows(self, blocks: int) -> int:
        """Rows after ``blocks`` blocks; 0 or fewer blocks leave none."""
        while len(self._counts) <= blocks:
            left, now = (len(self._counts) - 1) * self.chunk, self._counts[-1]
            allowed = min(self.budget(left + self.window), left + self.chunk)
            self._counts.append(min(max(now, allowed), now + self.chunk))
        return self._counts[max(blocks, 0)]


@lru_cache
def schedule(budget: Budget, chunk: int, window: int) -> Schedule:
    """The schedule of these settings, made once."""
    return Schedule(budget, chunk, window)

"""H2O (arXiv 2306.14048): keep the most recent tokens, and of the others the heavy hitters of accumulated attention."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .config import native_window
from .errors import RetrofitError
from .eviction import Eviction, EvictionOptions
from .options import whole_number


@dataclass(frozen=True)
class H2OOptions(EvictionOptions):
    """Options of every eviction policy (``scope`` is ``"head"`` here unless said otherwise), and:

    Attributes:
        heavy: older tokens kept for their accumulated attention; None means as many as the window (the paper's halves).
    """

    scope: str = "head"
    heavy: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heavy is not None:
            whole_number("heavy", self.heavy, least=0)


class H2O(Eviction):
    """Algorithm 1: W recent tokens and ``heavy`` others; the first S tokens are pinned besides.

    An entry's score is the sum of the weights that all queries so far gave it, of all heads that share it: the paper
    has one query head to a key head; grouped ones are summed, and with ``scope="layer"`` all of them are.
    """

    kind = "h2o"
    accumulates = True
    size = "heavy"
    native: int | None = None  # the base's own sliding window
    Options = H2OOptions

    def __init__(self, config: Any, window: int, sinks: int, options: Any):
        super().__init__(config, window, sinks, options)
        self.native = native_window(config)
        self.check_window(window, sinks)

    def check_window(self, window: int, sinks: int) -> None:
        heavy = self._heavy(window)
        if self.native is not None and sinks + window + heavy > self.native:
            raise RetrofitError(
                f"this base attends to {self.native} tokens only: choose sinks + window + heavy <= {self.native} "
                f"(now {sinks} + {window} + {heavy})"
            )

    def _heavy(self, window: int) -> int:
        return window if self.options.heavy is None else self.options.heavy

    @property
    def capacity(self) -> int:
        return self.sinks + self.window + self._heavy(self.window)

    @property
    def protected(self) -> int:
        return self.window

    def score(self, before: Tensor, weights: Tensor) -> Tensor:
        return before + weights.sum((1, 2))

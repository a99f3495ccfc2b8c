"""What one layer may have, how many bytes that takes, and which of it each layer gets for a number of bytes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from patches.config import native_window
from patches.errors import RetrofitError
from patches.kinds import build_memory, find_kind, new_memory
from retrofit.costs.held import layer_bytes

# of the bytes that a layer gets on average: what single layers are measured at
SHARES = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1, 3 / 2, 2, 3, 4)
ROWS = (1 / 3, 2 / 3)  # of a layer's bytes, for the memory's rows
LONGEST = 2**22  # more tokens than a window is ever given


@dataclass(frozen=True)
class Size:
    """What a layer may have.

    Attributes:
        window: W.
        rows: the memory's size option; None for a layer without the memory, or of a kind whose size is not chosen.
        bytes: window, gates and state of one sequence, the sinks left out.
    """

    window: int
    rows: int | None
    bytes: int


@dataclass(frozen=True)
class Sizer:
    """Sizes of a kind on a base, in bytes of the base's dtype."""

    config: Any
    kind: str
    sinks: int
    options: dict[str, Any]
    dtype: torch.dtype

    @property
    def option(self) -> str | None:
        """The option that says how many rows are kept, of a kind for which they can be chosen without training."""
        kind = find_kind(self.kind)
        return None if kind.trainable else kind.size

    def size(self, window: int, rows: int | None = None) -> Size:
        """A window and so many rows; raises RetrofitError where the kind cannot have them."""
        kind, options = self.kind, dict(self.options)
        if self.option is not None:
            kind, options = ("none", {}) if rows is None else (kind, {**options, self.option: rows})
        with torch.device("meta"):
            memory = build_memory(self.config, new_memory(kind, window, self.sinks, options=options))
        return Size(window, rows, layer_bytes(self.config, memory, self.dtype))

    def fitting(self, budget: int, rows: int | None = None) -> Size | None:
        """The longest window that fits ``budget`` bytes beside so many rows; None if none does."""
        native, unit = native_window(self.config), self._unit(rows)
        low, high = 0, (LONGEST if native is None else native - self.sinks) // unit + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._bytes(middle * unit, rows) <= budget else (low, middle)
        return self.size(low * unit, rows) if low else None

    def _unit(self, rows: int | None) -> int:
        """What windows are multiples of: 1, or the option that the kind demands it of."""
        units = [1, *(value for value in self.options.values() if type(value) is int and 0 < value < LONGEST)]
        refused = None
        for unit in units:
            try:
                self.size(unit, rows)
            except RetrofitError as error:
                refused = error
            else:
                return unit
        if rows is None:
            raise RetrofitError(f"{refused} (you set an option of the memory with --option NAME=VALUE)")
        return 1

    def _bytes(self, window: int, rows: int | None) -> float:
        """Of :meth:`size`; infinite where the kind cannot have it."""
        try:
            return self.size(window, rows).bytes
        except RetrofitError:
            return math.inf

    def sizes(self, budget: int) -> Iterator[Size]:
        """The ways to spend a layer's ``budget``: the window alone, and with parts of it for rows."""
        shares: list[float] = [0.0, *(ROWS if self.option is not None else ())]
        for share in shares:
            rows = None
            if share:
                each = self.size(1, 2).bytes - self.size(1, 1).bytes
                rows = max(1, int(budget * share / each))
            found = self.fitting(budget, rows)
            if found is not None:
                yield found


def spend(sizes: Sequence[Size], losses: Sequence[Sequence[float]], budget: int) -> list[Size]:
    """A size for each layer, ``budget`` bytes in all: step by step what lowers the sum of losses most for its bytes.

    Args:
        sizes: those that a layer can have.
        losses: of each layer, with each of these sizes.

    Raises:
        RetrofitError: the smallest size of all layers does not fit.

    >>> small, large = Size(4, None, 100), Size(8, None, 200)
    >>> [size.window for size in spend([small, large], [[3.0, 1.0], [9.0, 2.0], [1.0, 1.0]], 400)]
    [4, 8, 4]
    """
    least = min(range(len(sizes)), key=lambda index: sizes[index].bytes)
    chosen = [least] * len(losses)
    left = budget - len(losses) * sizes[least].bytes
    if left < 0:
        raise RetrofitError(f"bytes: {budget // len(losses)} per layer are too few: give {sizes[least].bytes} or more")
    while True:
        best = (0.0, 0, 0, 0)
        for layer, (loss, now) in enumerate(zip(losses, chosen, strict=True)):
            for index, size in enumerate(sizes):
                more = size.bytes - sizes[now].bytes
                gain = loss[now] - loss[index]
                if more <= 0 and gain > 0:
                    best = (torch.inf, layer, index, more)
                elif 0 < more <= left and gain / more > best[0]:
                    best = (gain / more, layer, index, more)
        if not best[0]:
            return [sizes[index] for index in chosen]
        chosen[best[1]], left = best[2], left - best[3]

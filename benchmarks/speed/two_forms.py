"""Two forms of one computation side by side, in time and in peak memory."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from patches.errors import RetrofitError
from retrofit.bench.machine import Where, peak_bytes
from retrofit.bench.timing import interleaved, mib, ratios, spread, spread_columns

# the last row of such a table holds the ratios
TIME_AND_MEMORY = {
    "name": ("", ""),
    **spread_columns("seconds", "seconds", ".3f"),
    "extra_mib": ("peak extra MiB", ",.2f"),
}
# how far two forms may be apart, relative to their length
TOLERANCES = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 1e-2}


def side_by_side(
    prepare: Callable[..., Callable[[], Tensor]],
    case: Where,
    names: tuple[str, str],
    ratio: tuple[str, str],
    called: str,
    repeats: int,
) -> list[dict[str, Any]]:
    """Seconds and peak extra memory of two forms of one computation, and their ratios.

    Args:
        prepare: ``prepare(case, name)`` makes the inputs and returns the form that is measured, which returns what it
            computed. It must be a function that another process can import.
        names: of the two forms.
        ratio: which of them is divided by which, and what that row is ``called``.

    Returns:
        A row for each form with ``seconds`` (median; ``_low``, ``_high``) and ``extra_mib`` (None where the system does
        not tell), then a row with the ratios of both.

    Raises:
        RetrofitError: the two forms compute different things.
    """
    arms = {name: prepare(case, name) for name in names}
    check_equal([arm() for arm in arms.values()], TOLERANCES[case.dtype])
    seconds = interleaved(arms, repeats)
    arms.clear()  # the measured processes need the memory
    held = {name: peak_bytes(case.place(), prepare, case, name) for name in names}
    rows: list[dict[str, Any]] = [
        {"name": name, **spread("seconds", seconds[name]), "extra_mib": mib(held[name])} for name in names
    ]
    over, under = ratio
    much, little = held[over], held[under]
    quotient = much / little if much and little else None
    times = spread("seconds", ratios(seconds[over], seconds[under]))
    return [*rows, {"name": called, **times, "extra_mib": quotient}]


def check_equal(results: Sequence[Tensor], tolerance: float) -> None:
    """Refuse to compare two forms whose results differ by more than ``tolerance`` of their length."""
    one, other = results
    difference = ((one - other).float().norm() / one.float().norm()).item()
    if math.isnan(difference) or difference > tolerance:
        raise RetrofitError(f"the two forms differ by {difference:.1e}: their times would compare different things")

"""Time of competing functions: interleaved rounds, medians and quartiles, two forms of one computation side by side."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.benchmark import timer  # waits for the GPU before it reads the clock

from patches.errors import RetrofitError
from retrofit.bench.machine import Where, peak_bytes


def spread_columns(name: str, header: str, spec: str) -> dict[str, tuple[str, str]]:
    """Columns for what :func:`spread` gives."""
    return {name: (header, spec), f"{name}_low": ("quartile", spec), f"{name}_high": ("quartile", spec)}


# of verbs that set two forms side by side; the last row holds their ratios
TIME_AND_MEMORY = {
    "name": ("", ""),
    **spread_columns("seconds", "seconds", ".3f"),
    "extra_mib": ("peak extra MiB", ",.2f"),
}
Arm = TypeVar("Arm")  # whatever names one
# how far two forms may be apart, relative to their length
TOLERANCES = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 1e-2}


def interleaved(arms: Mapping[Arm, Callable[[], object]], repeats: int, warm_up: bool = True) -> dict[Arm, list[float]]:
    """Seconds of each arm, ``repeats`` times.

    A round runs every arm once, so that a slow spell of the machine hits all alike. One round before the first is not
    counted (``warm_up``): it loads kernels and fills caches.

    Raises:
        RetrofitError: ``repeats`` is below 1.
    """
    if repeats < 1:
        raise RetrofitError(f"repeats={repeats}: measure at least once")
    seconds: dict[Arm, list[float]] = {name: [] for name in arms}
    for counted in range(0 if warm_up else 1, repeats + 1):
        for name, arm in arms.items():
            began = timer()
            arm()
            if counted:
                seconds[name].append(timer() - began)
    return seconds


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """``{name: median, name_low: first quartile, name_high: third quartile}``: three columns of a row."""
    quartiles = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64))
    return dict(zip((name, f"{name}_low", f"{name}_high"), quartiles.tolist(), strict=True))


def ratios(numerator: list[float], denominator: list[float]) -> list[float]:
    """Round by round quotients of two arms."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


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


def mib(held: int | None) -> float | None:
    """Bytes as MiB; None stays None."""
    return None if held is None else held / 2**20

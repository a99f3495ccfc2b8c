"""Time of competing functions: interleaved rounds, medians and quartiles."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch.utils.benchmark import timer  # waits for the GPU before it reads the clock

from patches.errors import RetrofitError


def spread_columns(name: str, header: str, spec: str) -> dict[str, tuple[str, str]]:
    """Columns for what :func:`spread` gives."""
    return {name: (header, spec), f"{name}_low": ("quartile", spec), f"{name}_high": ("quartile", spec)}


Arm = TypeVar("Arm")  # whatever names one


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


def mib(held: int | None) -> float | None:
    """Bytes as MiB; None stays None."""
    return None if held is None else held / 2**20

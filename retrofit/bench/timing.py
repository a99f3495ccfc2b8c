"""Time and memory of competing functions: interleaved rounds, and the peak memory of each in its own process."""

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from patches.errors import RetrofitError

STATUS = Path("/proc/self/status")
PEAK_RESET = Path("/proc/self/clear_refs")  # writing 5 sets the peak back to what is held now (proc(5))
# of verbs that set two forms side by side; the last row holds their ratios
TIME_AND_MEMORY = {
    "name": ("", ""),
    "seconds": ("seconds", ".3f"),
    "seconds_low": ("quartile", ".3f"),
    "seconds_high": ("quartile", ".3f"),
    "extra_mib": ("peak extra MiB", ",.2f"),
}


def interleaved(arms: Mapping[str, Callable[[], object]], repeats: int, warm_up: bool = True) -> dict[str, list[float]]:
    """Seconds of each arm, ``repeats`` times.

    A round runs every arm once, so that a slow spell of the machine hits all alike. One round before the first is not
    counted (``warm_up``): it loads kernels and fills caches.

    Raises:
        RetrofitError: ``repeats`` is below 1.
    """
    if repeats < 1:
        raise RetrofitError(f"repeats={repeats}: measure at least once")
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for counted in range(0 if warm_up else 1, repeats + 1):
        for name, arm in arms.items():
            began = time.perf_counter()
            arm()
            if counted:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def spread(name: str, values: list[float]) -> dict[str, float]:
    """``{name: median, name_low: first quartile, name_high: third quartile}``: three columns of a row."""
    if len(values) == 1:
        values = values * 2
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {name: median, f"{name}_low": low, f"{name}_high": high}


def ratios(numerator: list[float], denominator: list[float]) -> list[float]:
    """Round by round quotients of two arms."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def peak_extra_bytes(prepare: Callable[..., Callable[[], object]], *arguments: Any) -> int | None:
    """Most memory a call holds beyond what was there before it, as the operating system counts it.

    A fresh process calls ``prepare(*arguments)``, which builds the inputs and returns the function to measure; its peak
    resident size while that function runs, less its resident size just before, is the answer. Nothing is warmed up
    first: memory freed by an earlier call could be used again without being seen. (The processes are forked from one
    that has only imported the libraries: importing takes longer than most measurements.)

    Returns:
        Bytes, or None where the system does not tell (it does on Linux).
    """
    if not PEAK_RESET.exists():
        return None
    context = get_context("forkserver")
    context.set_forkserver_preload(["retrofit"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_peak_extra_bytes, prepare, arguments).result()


def _peak_extra_bytes(prepare: Callable[..., Callable[[], object]], arguments: tuple[Any, ...]) -> int:
    function = prepare(*arguments)
    PEAK_RESET.write_text("5")
    before = _status_bytes("VmRSS")
    function()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def mib(held: int | None) -> float | None:
    """Bytes as MiB; None stays None."""
    return None if held is None else held / 2**20


def quotient(held: int | None, other: int | None) -> float | None:
    """How many times ``other`` is ``held``; None if either is unknown or nothing."""
    return held / other if held and other else None

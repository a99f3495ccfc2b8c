"""The machine a benchmark runs on: its device, what it could do at best, and the memory a call holds there."""

import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from patches.errors import RetrofitError
from retrofit.bench.timing import peak_extra_bytes
from retrofit.estimate import Device

# dense bfloat16 or float16, by what ends torch.cuda.get_device_name(); as the maker gives them
KNOWN = {"H100 80GB HBM3": Device(989, 3350), "H200": Device(989, 4800)}
PRODUCT = {"cpu": 1024, "cuda": 8192}  # side of the square matrices that measure the rest
COPIED = {"cpu": 2**27, "cuda": 2**31}  # bytes: beyond any cache
TRIES = 10


def find_device(name: str) -> torch.device:
    """``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        RetrofitError: it is another name, or there is no such device.
    """
    kind, _, index = name.partition(":")
    if kind not in PRODUCT or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise RetrofitError(f"device={name!r}: use cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise RetrofitError(f"device={name!r}: torch sees {torch.cuda.device_count()} CUDA devices; use cpu")
    return torch.device(name)


def peaks(device: torch.device, dtype: torch.dtype) -> Device:
    """The maker's figures where they are known, else the best of a few products and copies now, ``TRIES`` of each.

    On a shared machine what is measured is what was left of it just then.
    """
    if device.type == "cuda" and dtype.itemsize == 2:
        for ending, known in KNOWN.items():
            if torch.cuda.get_device_name(device).endswith(ending):
                return known
    side, size = PRODUCT[device.type], COPIED[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = min(_seconds(lambda: a @ b, device) for _ in range(TRIES))
    copy = min(_seconds(lambda: target.copy_(source), device) for _ in range(TRIES))
    return Device(tflops=2 * side**3 / product / 1e12, bandwidth=2 * size / copy / 1e9)


def finished(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """``function``, not returning before the device has done what it was given."""
    if device.type != "cuda":
        return function

    def call() -> Any:
        out = function()
        torch.cuda.synchronize(device)
        return out

    return call


def peak_bytes(device: torch.device, prepare: Callable[..., Callable[[], object]], *arguments: Any) -> int | None:
    """Most memory that ``prepare(*arguments)()`` holds beyond what was there before it.

    On a CPU in a process of its own (:func:`retrofit.bench.timing.peak_extra_bytes`); on CUDA in this one, as torch's
    allocator counts it.

    Returns:
        Bytes, or None where the system does not tell.

    Raises:
        MemoryError: there is not so much.
    """
    try:
        if device.type == "cpu":
            return peak_extra_bytes(prepare, *arguments)
        function = prepare(*arguments)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        finished(function, device)()
        return torch.cuda.max_memory_allocated(device) - before
    except BrokenProcessPool as error:  # the system ends the process that asks for too much
        raise MemoryError from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise MemoryError from error
        raise


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    finished(function, device)()
    return time.perf_counter() - began

"""Where a benchmark runs, and the most memory that a call holds there."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from patches.errors import RetrofitError
from retrofit.bench import cases
from retrofit.costs.estimate import DTYPES

STATUS = Path("/proc/self/status")
PEAK_RESET = Path("/proc/self/clear_refs")  # writing 5 sets the peak back to what is held now (proc(5))


class Where(cases.Where):
    """A case's device and dtype, as torch has them.

    Raises:
        RetrofitError: torch sees no such device.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, _, index = self.device.partition(":")
        if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
            raise RetrofitError(
                f"device={self.device!r}: torch sees {torch.cuda.device_count()} CUDA devices; use another, or cpu"
            )

    def place(self) -> torch.device:
        """The device, made torch's current one: clocks and memory counters read that."""
        place = torch.device(self.device)
        if place.type == "cuda":
            torch.cuda.set_device(place.index or 0)
        return place

    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPES[self.dtype]


def peak_bytes(device: torch.device, prepare: Callable[..., Callable[[], object]], *arguments: Any) -> int | None:
    """Most memory that a call holds beyond what was there before it.

    ``prepare(*arguments)`` builds the inputs and returns the function to measure. On CUDA torch's allocator counts.
    On a CPU the operating system does, in a fresh process: its peak resident size while that function runs, less its
    resident size just before. Nothing is warmed up there: memory freed by an earlier call could be used again without
    being seen. (The processes are forked from one that has only imported the libraries.)

    Returns:
        Bytes, or None where the system does not tell (Linux does).

    Raises:
        MemoryError: there is not so much.
    """
    try:
        if device.type == "cuda":
            return _peak_on_cuda(prepare, arguments)
        if not PEAK_RESET.exists():
            return None
        context = get_context("forkserver")
        context.set_forkserver_preload(["retrofit.patching"])
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(peak_of_this_process, prepare, arguments).result()
    except BrokenProcessPool as error:  # the system ends the process that asks for too much
        raise MemoryError from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise MemoryError from error
        raise


def _peak_on_cuda(prepare: Callable[..., Callable[[], object]], arguments: tuple[Any, ...]) -> int:
    function = prepare(*arguments)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_of_this_process(prepare: Callable[..., Callable[[], object]], arguments: tuple[Any, ...] = ()) -> int:
    """By how many bytes the function that ``prepare`` gives raises the resident size, at its peak."""
    function = prepare(*arguments)
    PEAK_RESET.write_text("5")
    before = _status_bytes("VmRSS")
    function()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024

"""What a forward pass does on CUDA, kernel by kernel, without a GPU: torch's fake tensors on ``cuda:0``.

A CPU build of torch lacks the device guard that even fake CUDA tensors ask for; :func:`build_guard` compiles one. What
needs it runs as a program, so that nothing of it stays in the process that tests.
"""

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;
static thread_local DeviceIndex current = 0;
struct OneFakeDevice final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device to) const override { current = to.index(); }
  void uncheckedSetDevice(Device to) const noexcept override { current = to.index(); }
  Device exchangeDevice(Device to) const override { Device before = getDevice(); setDevice(to); return before; }
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream) const override { return getStream(getDevice()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, OneFakeDevice);
"""


def build_guard(folder: Path) -> Path | None:
    """Compile the guard into ``folder``; None if there is no compiler that can."""
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    includes = [f"-I{path}" for path in include_paths()]
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10"]
    command = ["g++", "-shared", "-fPIC", "-O0", "-std=c++20", *includes, str(source), "-o", str(library), *libraries]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return library


def run(guard: Path, *arguments: str) -> Any:
    """What the program prints for these arguments, in a process of its own."""
    command = [sys.executable, "-m", "tests.kernels.fake_cuda", str(guard), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


class Context(SimpleNamespace):
    """Stands for what autograd hands from a forward to its backward; its engine needs a real GPU."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


def flash_shapes(padded: bool) -> dict[str, Any]:
    """Shapes and dtypes of what the flash forms return, forward and backward, by aten's own checks."""
    from patches import kernels, window_flash

    shapes = [(2, 64, 4, 64), *[(2, 64, 2, 64)] * 2, *[(2, 4, 2, 64)] * 2]
    rows = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    pad = torch.zeros(2, dtype=torch.long, device="cuda") if padded else None
    found = {}
    for lse in (False, True):
        context, plan = Context(), window_flash.Plan.make(rows[0], 64, 32, 0, 0.4, pad)
        out, sums = window_flash._Window.forward(context, *rows, plan)
        grads = window_flash._Window.backward(context, out, sums if lse else None)
        found[f"lse={lse}"] = [_described(x) for x in (out, sums, *grads)]
    found["decode"] = [_described(x) for x in kernels.decode_attention(rows[0][:, :1], *rows[1:3], scale=0.4, lse=True)]
    return found


def _described(x: torch.Tensor | None) -> str | None:
    return None if x is None else f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} {x.device.type}"


def main(guard: str, what: str, *arguments: str) -> None:
    """Load the guard, then print the JSON of what is asked for."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    ctypes.CDLL(guard)
    with FakeTensorMode(allow_non_fake_inputs=True):
        print(json.dumps(flash_shapes(arguments[0] == "padded")))


if __name__ == "__main__":
    main(*sys.argv[1:])

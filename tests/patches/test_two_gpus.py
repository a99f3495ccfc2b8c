"""A model spread over two GPUs: everything that a pass makes goes with the layer, and decoding waits for no GPU."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from patches.kinds import KINDS
from tests.helpers import ROOT, fresh_process

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device guard of CUDA, compiled."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler to build a device guard for CUDA with")
    if torch.version.cuda:
        pytest.skip("this torch has a device guard for CUDA of its own")
    built = tmp_path_factory.mktemp("guard") / "guard.so"
    includes = [f"-I{path}" for path in include_paths()]
    library = f"-L{Path(torch.__file__).parent / 'lib'}"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    source = str(HERE / "fake_cuda.cpp")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-std=c++20", abi, *includes, source, "-o", str(built), library, "-lc10"],
        check=True,
    )
    return built


def test_every_kind_over_two_gpus(guard: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    code = f"from tests.patches.two_gpus import main\nmain({str(guard)!r}, {list(KINDS)})"
    assert fresh_process(code, tmp_path, path=ROOT) == ""

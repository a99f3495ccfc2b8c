"""The interpreter and the fake GPU for the tests that need them."""

from pathlib import Path

import pytest

from tests.kernels.fake_cuda import build_guard
from tests.kernels.interpreter import mend


@pytest.fixture(scope="session")
def interpreter() -> None:
    """fla's kernels run on CPU tensors; skipped with the reason where they cannot."""
    reason = mend()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What fake CUDA tensors need of a CPU build of torch."""
    library = build_guard(tmp_path_factory.mktemp("guard"))
    if library is None:
        pytest.skip("g++ is not installed, or does not compile against this torch")
    return library

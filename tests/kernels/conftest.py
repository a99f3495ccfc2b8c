"""The interpreter for the tests that need it."""

import pytest

from tests.kernels.interpreter import mend


@pytest.fixture(scope="session")
def interpreter() -> None:
    """fla's kernels run on CPU tensors; skipped with the reason where they cannot."""
    reason = mend()
    if reason:
        pytest.skip(reason)

"""A model spread over two GPUs: everything that a pass makes goes with the layer, and decoding waits for no GPU."""

from pathlib import Path

import pytest

from patches.kinds import KINDS
from tests.helpers import ROOT, fresh_process


def test_every_kind_over_two_gpus(guard: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    code = f"from tests.patches.two_gpus import main\nmain({str(guard)!r}, {list(KINDS)})"
    assert fresh_process(code, tmp_path, path=ROOT) == ""

"""Invariant 9 across versions: exports made under this transformers come back equal under others.

Run by `make test-versions`, which names folders with other versions of transformers in RETROFIT_TRANSFORMERS.
"""

import os
from pathlib import Path

import pytest

from tests.helpers import ROOT, fresh_process
from tests.invariants.test_reload import PACKAGES, WITH_THE_PACKAGE, WITHOUT_THE_PACKAGE, exports  # noqa: F401

FOLDERS = [Path(folder) for folder in os.environ.get("RETROFIT_TRANSFORMERS", "").split()]
WHICH = "import transformers\nassert transformers.__version__ == {0!r}, transformers.__version__\n"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("package", [False, True], ids=["alone", "beside the package"])
def test_exports_under_another_transformers(exports: Path, folder: Path, package: bool) -> None:  # noqa: F811
    which = WHICH.format(folder.name)
    if package:
        done = fresh_process(which + WITH_THE_PACKAGE, exports, hide=["peft"], path=f"{folder}{os.pathsep}{ROOT}")
    else:
        done = fresh_process(which + WITHOUT_THE_PACKAGE, exports, hide=PACKAGES, path=folder)
    assert "all equal" in done

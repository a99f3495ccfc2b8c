"""What transformers' copier needs of this folder to ship it, and the one way in which imports go."""

import ast
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_imports

import patches
from tests.helpers import ROOT, fresh_process

FOLDER = Path(patches.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))
LAYERS = ("cli", "distill", "retrofit", "patches")  # each may import those behind it


def imported(file: Path) -> list[tuple[int, str, list[str]]]:
    """Level (0: absolute), module and names of every import statement, those inside functions too."""
    found: list[tuple[int, str, list[str]]] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or "", [name.name for name in node.names]))
        elif isinstance(node, ast.Import):
            found += [(0, name.name, []) for name in node.names]
    return found


def test_the_folder_is_flat() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} <= {"__pycache__"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_siblings_are_imported_as_the_copier_finds_them(file: Path) -> None:
    names = {path.stem for path in FILES}
    siblings = set()
    for level, module, _ in imported(file):
        if level:
            assert level == 1, "from ..x: outside the exported folder"
            assert module, "from . import x: silently not copied"
            assert module in names, f"from .{module}: a subpackage, or not there"
            siblings.add(module)
    # by regular expression, so one in a docstring counts as well
    assert set(get_relative_imports(file)) == siblings


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nothing_but_torch_and_transformers_is_needed(file: Path) -> None:
    others = {module.partition(".")[0] for level, module, _ in imported(file) if not level}
    assert set(get_imports(file)) - set(sys.stdlib_module_names) <= {"torch", "transformers"}
    assert not others & {"retrofit", "distill", "cli", "recipes", "tests", "patches"}


def test_each_file_imports_without_them(tmp_path: Path) -> None:
    """An export imports every file that it carries, whatever it uses."""
    code = "import importlib\n" + "\n".join(f"importlib.import_module('patches.{file.stem}')" for file in FILES)
    fresh_process(code, tmp_path, hide=["triton", "fla", "flash_attn"], path=ROOT)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_one_way(layer: str) -> None:
    before = LAYERS[: LAYERS.index(layer)]
    files = [ROOT / "cli.py"] if layer == "cli" else sorted((ROOT / layer).rglob("*.py"))
    assert files
    for file in files:
        for level, module, _ in imported(file):
            assert level or module.partition(".")[0] not in before, f"{file.name} imports {module}"

"""The wheel: what is in it, and that it works from its install with the checkout out of sight."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import typer

from retrofit.recipes import shipped_recipes

ROOT = Path(__file__).parents[1]
PACKAGES = ("distill", "patches", "recipes", "retrofit")


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, cwd=ROOT)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kinds = (".py", ".yaml", ".json", ".j2")
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in kinds]
    assert names == {"cli.py"} | {path.relative_to(ROOT).as_posix() for path in sources}
    assert any(name.endswith("licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_the_install_works_without_the_checkout(wheel: Path, tmp_path: Path, byte_checkpoint: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target]
    run(*pip, wheel, cwd=tmp_path)
    # -S: without the .pth file of an editable install, the checkout is not on the path
    retrofit = [sys.executable, "-S", target / "bin" / "retrofit"]
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(typer.__file__).parents[1])}
    path = os.pathsep.join([str(target), *sorted(installed)])

    listed = run(*retrofit, "recipes", "ls", cwd=tmp_path, PYTHONPATH=path)
    assert [line.split()[0] for line in listed.splitlines()] == list(shipped_recipes())
    where = "import cli, distill, patches, recipes, retrofit as r; print(cli.__file__, r.__file__)"
    assert str(ROOT) not in run(sys.executable, "-S", "-c", where, cwd=tmp_path, PYTHONPATH=path)
    run(*retrofit, "patch", byte_checkpoint, "-o", "patched", "--window", 8, cwd=tmp_path, PYTHONPATH=path)
    assert (tmp_path / "patched" / "model.safetensors").is_file()

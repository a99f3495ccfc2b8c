"""Packages: what was pinned or nothing, once, by the clients that a user has; each failure is one sentence."""

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks import packages
from benchmarks.packages import Package, fetch_package
from patches.errors import RetrofitError


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only registry pip knows, with a cache and a PATH of the test's own."""
    shelf, programs = tmp_path / "shelf", tmp_path / "programs"
    for folder in (shelf, programs):
        folder.mkdir()
    monkeypatch.setattr(packages, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return shelf


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def wheel(shelf: Path, text: str = "a text") -> Package:
    """``texts 1.0`` as a wheel on the shelf."""
    file = shelf / "texts-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("texts/a.txt", text)
        archive.writestr("texts-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: texts\nVersion: 1.0\n")
        archive.writestr("texts-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("texts-1.0.dist-info/RECORD", "")
    return Package("pypi", "texts", "1.0", digest(file))


def program(shelf: Path, name: str, script: str) -> None:
    file = shelf.parent / "programs" / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def test_a_wheel_is_fetched_once_with_the_real_pip(shelf: Path) -> None:
    said: list[str] = []
    package = wheel(shelf)
    folder = fetch_package(package, said.append)
    assert (folder / "texts" / "a.txt").read_text() == "a text"
    assert len(said) == 1
    assert "texts 1.0" in said[0]
    shutil.rmtree(shelf)  # the registry is gone: the second time needs none
    assert fetch_package(package, said.append) == folder
    assert len(said) == 1


def test_another_hash_is_refused_and_nothing_is_kept(shelf: Path) -> None:
    package = wheel(shelf)
    changed = wheel(shelf, "another text")
    with pytest.raises(RetrofitError, match=f"SHA-256 {changed.sha256}, not {package.sha256}"):
        fetch_package(package)
    assert not packages.CACHE.exists()


def test_what_the_registry_does_not_have_is_one_sentence(shelf: Path) -> None:
    with pytest.raises(RetrofitError, match=r"pip could not fetch nothing 2\.0 .*check the network") as caught:
        fetch_package(Package("pypi", "nothing", "2.0", "0"))
    assert "\n" not in str(caught.value)
    assert not packages.CACHE.exists()


def test_npm_and_its_errors(shelf: Path) -> None:
    archive = shelf / "scope-texts-1.0.tgz"
    with tarfile.open(archive, "w:gz") as file:
        entry = tarfile.TarInfo("package/a.txt")
        entry.size = 6
        file.addfile(entry, io.BytesIO(b"a text"))
    package = Package("npm", "@scope/texts", "1.0", digest(archive))
    fails = 'echo "npm error code E404" >&2; echo "npm error 404 no such thing" >&2; exit 1'
    program(shelf, "npm", f'[ "$4" = "@scope/texts@1.0" ] && cp {archive} . || {{ {fails}; }}')
    assert (fetch_package(package) / "package" / "a.txt").read_text() == "a text"
    with pytest.raises(RetrofitError, match=r"npm could not fetch other 1.0 \(npm error 404 no such thing\)"):
        fetch_package(Package("npm", "other", "1.0", "0"))


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
def test_debian(shelf: Path) -> None:
    tree = shelf / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        "Package: texts\nVersion: 1.0\nArchitecture: all\nMaintainer: nobody\nDescription: texts\n"
    )
    (tree / "usr").mkdir()
    (tree / "usr" / "a.txt").write_text("a text")
    archive = shelf / "texts_1.0_all.deb"
    subprocess.run(["dpkg-deb", "--build", str(tree), str(archive)], check=True, capture_output=True)
    program(shelf, "apt-get", f'[ "$3" = texts=1.0 ] && cp {archive} .')
    folder = fetch_package(Package("debian", "texts", "1.0", digest(archive)))
    assert (folder / "usr" / "a.txt").read_text() == "a text"


@pytest.mark.parametrize(("registry", "client"), [("npm", "npm"), ("debian", "apt-get"), ("pypi", "pip")])
def test_a_client_that_is_missing_is_named(
    registry: str, client: str, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(shelf))
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RetrofitError, match=f"fetched with {client}, which is not installed"):
        fetch_package(Package(registry, "texts", "1.0", "0"))

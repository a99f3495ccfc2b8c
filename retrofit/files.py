"""Writing without half-written results: everything goes to a temporary name first and is renamed when complete."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from patches.errors import RetrofitError


def check_output(path: str | Path, overwrite: bool = False, inputs: Iterable[str | Path] = ()) -> Path:
    """Return ``path`` if a folder may be written there.

    Args:
        inputs: files and folders that are still to be read (Hub ids are none): replacing ``path`` must not remove them.

    Raises:
        RetrofitError: a file is in the way, the folder cannot be replaced as a whole, it already holds something and
            ``overwrite`` is False, or it is or holds one of ``inputs``.
    """
    path = Path(path)
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise RetrofitError(f"{place} is a file, not a folder: choose another output folder")
    if Path.cwd().is_relative_to(path.resolve()) or path.is_mount():
        raise RetrofitError(f"{path} is the current folder, one above it or a mount point: choose a folder inside it")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise RetrofitError(
            f"{path} already holds something: choose another folder or pass --overwrite (overwrite=True)"
        )
    for read in map(Path, inputs):
        if read.exists() and read.resolve().is_relative_to(path.resolve()):
            raise RetrofitError(f"{path} is or holds {read}, which is read here: choose another output folder")
    return path


@contextmanager
def write_folder(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder beside ``path`` that takes its place when the block ends without an error.

    Raises:
        RetrofitError: as :func:`check_output`.
    """
    path = check_output(path, overwrite).resolve()  # a link is followed, not replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    draft.chmod(0o755)  # mkdtemp makes it private; what we ship should be as readable as any folder
    try:
        yield draft
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            os.replace(path, old / path.name)
            os.replace(draft, path)
            shutil.rmtree(old)
        else:
            os.replace(draft, path)
    except SafetensorError as error:  # what its writer raises where another would raise OSError: the disk is full, say
        raise RetrofitError(f"{path} cannot be written, nothing was kept there: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8 to ``path`` in one step (temporary file, then rename)."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write ``content`` to ``path`` in one step (temporary file, then rename)."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def write_json(path: str | Path, data: Any) -> None:
    """Write ``data`` as indented JSON to ``path`` in one step. NaN is refused: JSON has no word for it."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")

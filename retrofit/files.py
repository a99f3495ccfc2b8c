"""Writing without half-written results: everything goes to a temporary name first and is renamed when complete."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from patches.errors import RetrofitError


def check_output(
    path: str | Path,
    overwrite: bool = False,
    inputs: Iterable[str | Path] = (),
    data: Iterable[str | Path] = (),
) -> Path:
    """Return ``path`` if a folder may be written there; nothing is written yet.

    Args:
        inputs: files and folders that are still to be read (Hub ids are none): replacing ``path`` must not remove them.
        data: inputs that are read with all that lies in them, so that ``path`` must not lie there either.

    Raises:
        RetrofitError: a file is in the way, nothing can be written there, the folder cannot be replaced as a whole, it
            already holds something and ``overwrite`` is False, it is or holds an input, or it lies in ``data``.
    """
    path = Path(path)
    place = _writable(path, "folder")
    if Path.cwd().is_relative_to(path.resolve()) or path.is_mount():
        raise RetrofitError(f"{path} is the current folder, one above it or a mount point: choose a folder inside it")
    if place == path and any(path.iterdir()) and not overwrite:
        raise RetrofitError(
            f"{path} already holds something: choose another folder or pass --overwrite (overwrite=True)"
        )
    folders = [at_home(read) for read in data]
    for read in [*(at_home(read) for read in inputs), *folders]:
        if read.exists() and any(place.is_relative_to(path.resolve()) for place in _way(read)):
            raise RetrofitError(f"{path} is or contains {read}, which is an input: choose another output folder")
    for read in folders:
        if read.is_dir() and path.resolve().is_relative_to(read.resolve()):
            raise RetrofitError(f"{path} lies in {read}, which is an input: choose another output folder")
    return path


def check_file(path: str | Path, inputs: Iterable[str | Path | None] = ()) -> None:
    """Check that a file may be written to ``path``, in place of what is there; nothing is written yet.

    Args:
        inputs: files and folders that are still to be read (Hub ids are none), which must stay as they are.

    Raises:
        RetrofitError: it is a folder, nothing can be written there, or it is one of ``inputs`` or a file in one.
    """
    path = Path(path)
    if _writable(path, "file") == path and path.is_dir():
        raise RetrofitError(f"{path} is a folder: choose another file")
    for read in (at_home(read) for read in inputs if read is not None):
        if path.exists() and read.exists() and path.resolve().is_relative_to(read.resolve()):
            raise RetrofitError(f"{path} is or belongs to {read}, which is an input: choose another file")


def _way(path: Path) -> Iterator[Path]:
    """Where ``path``, which exists, leads past: every folder, every link, and what each of these points to."""
    ahead, here = [*reversed(Path(path.absolute()).parts)], Path()
    while ahead:
        place = here / ahead.pop()
        if place.name == "..":
            here = here.parent  # of no link: here are none
            continue
        yield place
        if place.is_symlink():
            ahead += reversed(Path(os.readlink(place)).parts)  # an absolute one begins anew
        else:
            here = place


def at_home(path: str | Path) -> Path:
    """``path`` with a leading ~ replaced by the home folder; as it is where there is no such user."""
    return Path(os.path.expanduser(path))  # that of pathlib raises


def _writable(path: Path, what: str) -> Path:
    """``path`` if it exists, else the nearest folder above it that does; something can be written there."""
    place = path
    try:
        while not _exists(place):
            place = place.parent
        if not place.is_dir() and (what == "folder" or place != path):
            raise RetrofitError(f"{place} is a file, not a folder: choose another output {what}")
        with tempfile.TemporaryFile(dir=place if place.is_dir() else place.parent):
            return place
    except RetrofitError:
        raise
    except (OSError, ValueError) as error:  # links in a circle, no permission, too long a name, a zero byte in it
        why = getattr(error, "strerror", None) or error
        raise RetrofitError(f"{path} cannot be written ({why}): choose another {what}") from None


def _exists(path: Path) -> bool:
    """Like ``path.exists()``, but what cannot be known is an error."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def write_folder(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder beside ``path`` that takes its place when the block ends without an error.

    Raises:
        RetrofitError: as :func:`check_output`.
    """
    path = check_output(path, overwrite).resolve()  # a link is followed, not replaced
    with no_empty_folders(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        with _taking_its_place(draft, path):
            yield draft


@contextmanager
def no_empty_folders(path: Path) -> Iterator[None]:
    """On an error in the block, remove ``path`` and the folders above it that it made, as far as they are empty."""
    made = [place for place in (path, *path.parents) if not place.exists()]
    try:
        yield
    except BaseException:
        for place in made:
            with suppress(OSError):
                place.rmdir()
        raise


@contextmanager
def _taking_its_place(draft: Path, path: Path) -> Iterator[None]:
    """Rename ``draft`` to ``path`` after the block, remove it after an error."""
    try:
        yield
        for made in (draft, *draft.rglob("*")):  # safetensors writes weights for their owner alone, as mkdtemp does
            made.chmod(_mode(made))
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            os.replace(path, old / path.name)
            os.replace(draft, path)
            shutil.rmtree(old)
        else:
            os.replace(draft, path)
    except SafetensorError as error:  # what its writer raises where another would raise OSError: the disk is full, say
        raise RetrofitError(f"{path} could not be written and nothing was kept: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def read_text(path: str | Path) -> str:
    """A text file's contents with its own line ends, without the byte order mark that some editors begin one with.

    Raises:
        RetrofitError: it cannot be read, or is not UTF-8.
    """
    try:
        return at_home(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RetrofitError(f"{path} is not UTF-8 text (byte {error.start}): convert it first") from None
    except OSError as error:
        raise RetrofitError(f"{path} cannot be read: {error.strerror}") from None


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
        os.chmod(draft, _mode(Path(draft)))
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _mode(path: Path) -> int:
    """The permissions that a file or folder gets when nobody asks for others."""
    mask = os.umask(0)  # which is the one way to read it
    os.umask(mask)
    return (0o777 if path.is_dir() else 0o666) & ~mask


def write_json(path: str | Path, data: Any) -> None:
    """Write ``data`` as indented JSON to ``path`` in one step. NaN is refused: JSON has no word for it."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")

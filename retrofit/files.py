"""Writing without half-written results: everything goes to a temporary name first and is renamed when complete."""

import errno
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError

from patches.errors import RetrofitError

# in every folder that we write: the names of its files, for only these are replaced
NAMES = ".retrofit"
OLD = "replaced"  # what was at the path, in the temporary folder


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
    whole = path.resolve()
    if place == path and not overwrite and any(one != _lock_of(whole) for one in whole.iterdir()):
        raise RetrofitError(
            f"{path} already holds something: choose another folder or pass --overwrite (overwrite=True)"
        )
    folders = [at_home(read) for read in data]
    for read in [*(at_home(read) for read in inputs), *folders]:
        if read.exists() and read.resolve().is_relative_to(path.resolve()):
            raise RetrofitError(f"{path} is or contains {read}, which is an input: choose another output folder")
    for read in folders:
        if read.is_dir() and path.resolve().is_relative_to(read.resolve()):
            raise RetrofitError(f"{path} lies in {read}, which is an input: choose another output folder")
    return path


def check_replaced(path: str | Path, overwrite: bool = False, **read: Iterable[str | Path]) -> Path:
    """Return ``path`` if a folder may take its place, with all that lies there.

    Raises:
        RetrofitError: as :func:`check_output`, which takes ``read``, or a file lies there that we did not write.
    """
    path = check_output(path, overwrite, **read)
    check_ours(path)
    return path


def check_ours(path: Path) -> None:
    """Refuse to remove a folder that holds more than we wrote there.

    Raises:
        RetrofitError: it does; the sentence names one such file.
    """
    try:
        names = {NAMES, *(path / NAMES).read_text(encoding="utf-8").split("\n")}
    except (OSError, ValueError):
        names = set()
    if others := sorted(_names(path) - names):
        raise RetrofitError(
            f"{path} holds {others[0]}, which Retrofit did not write there: move it away, or choose another folder"
        )


def _names(folder: Path) -> set[str]:
    """Of all that lies in a folder and the folders in it, these left out."""
    return {str(at.relative_to(folder)) for at in folder.rglob("*") if at.is_symlink() or not at.is_dir()}


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
def only_writer(path: str | Path) -> Iterator[None]:
    """Keep other processes from writing to the folder ``path`` inside the block.

    The system frees the lock of a process that dies. A file system without locks keeps nobody out.

    Raises:
        RetrofitError: another process is writing there, or nobody can.
    """
    path = check_output(path, overwrite=True).resolve()
    with no_empty_folders(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock_of(path)
        with lock.open("w") as file:
            if not _locked(file):
                raise RetrofitError(f"another process is writing to {path}: wait for it, or choose another folder")
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    """The file that a process locks while it writes to ``path``: beside it or, where nothing can be written, in it."""
    return (path.parent if os.access(path.parent, os.W_OK) else path) / f".{path.name}-lock"


def _locked(file: TextIO) -> bool:
    """Whether this process has the lock of ``file`` now, or nobody can have it."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return os.fstat(file.fileno()).st_nlink > 0  # who had it until now removes the file


@contextmanager
def write_folder(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder beside ``path`` that takes its place when the block ends without an error.

    Raises:
        RetrofitError: as :func:`check_replaced` and :func:`only_writer`.
    """
    with ends_tidily(), only_writer(path):
        path = Path(path).resolve()  # a link is followed, not replaced
        tidy(path)
        check_replaced(path, overwrite)
        scratch = Path(tempfile.mkdtemp(NAMES, f".{path.name}.", path.parent))
        try:
            draft = scratch / path.name
            draft.mkdir()
            yield draft
            write_text(draft / NAMES, "\n".join(sorted(_names(draft))))
            for made in (draft, *draft.rglob("*")):  # safetensors writes weights for their owner alone
                made.chmod(_mode(made))
            if path.exists():
                os.replace(path, scratch / OLD)
            os.replace(draft, path)
        except SafetensorError as error:  # what its writer raises where another would raise OSError: a full disk, say
            said = str(error).replace(str(draft), str(path))
            raise RetrofitError(f"{path} could not be written and nothing was kept: {said}") from error
        except OSError as error:
            if error.filename:
                error.filename = str(error.filename).replace(str(draft), str(path))
            raise
        finally:
            _remove(scratch, path)


def tidy(path: Path) -> None:
    """Remove what a process left that was killed while it wrote ``path``; for the :func:`only_writer` of a folder."""
    left = re.compile(rf"\.{re.escape(path.name)}\.\w+{re.escape(NAMES)}")
    for scratch in path.parent.iterdir():
        if left.fullmatch(scratch.name):
            _remove(scratch, path)


def _remove(scratch: Path, path: Path) -> None:
    """Remove a temporary folder; what was at ``path`` goes back there if nothing has taken its place."""
    if (scratch / OLD).exists() and not path.exists():
        os.replace(scratch / OLD, path)
    shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def ends_tidily() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as an exception does, unless they were ignored or handled already."""

    def leave(number: int, _: Any) -> None:
        sys.exit(128 + number)

    heard = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    ours = [one for one in heard if signal.getsignal(one) is signal.SIG_DFL]
    for one in ours:
        signal.signal(one, leave)
    try:
        yield
    finally:
        for one in ours:
            signal.signal(one, signal.SIG_DFL)


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
    try:
        handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        error.filename = str(path)  # nobody asked for the temporary one
        raise
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

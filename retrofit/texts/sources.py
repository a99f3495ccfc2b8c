"""Where records come from: texts and JSONL files, and whatever else ``datasets`` reads."""

import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from hashlib import sha256
from pathlib import Path
from typing import Any

from patches.errors import RetrofitError, first_line, nearest
from retrofit.files import at_home, read_text
from retrofit.untrusted import json_lines

HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
LOADERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}  # by which datasets reads a file
# ours: pyarrow's reader, which datasets has, ends the process on some damaged files, and names no line
JSON_LINES = {".jsonl", ".ndjson"}
# a missing one of these is a missing file; any other dot may be part of an id (user/data-v1.5)
FILE_SUFFIXES = {*LOADERS, *JSON_LINES, ".txt", ".md", ".json", ".tsv", ".gz", ".zst"}
WHERE = "_where"  # column of records that know where they stand: the file and the line


@dataclass(frozen=True)
class Source:
    """Records that can be read as often as needed, always in the same order.

    Attributes:
        name: what it is called in errors.
        data: an ``IterableDataset`` of the records.
        identity: a string that changes when the contents may have changed; None for a streamed dataset.
    """

    name: str
    data: Any
    identity: str | None


def open_source(
    source: str,
    *,
    name: str | None = None,
    revision: str | None = None,
    split: str | None = "train",
    streaming: bool = False,
) -> Source:
    """Open ``source`` without reading its records.

    Args:
        source: a text file (one record), a ``.jsonl`` file (one per line), a ``.parquet`` file, a folder of ``.txt``
            files (a record each), saved by ``datasets`` or holding data files it can load, or a dataset id of the Hub.
        name: configuration of a dataset that has several.
        revision: branch, tag or commit of a dataset of the Hub.
        split: which split of a dataset; None is ``test`` where there is one, else ``train``.
        streaming: do not download or convert a dataset before its first record is read.

    Raises:
        RetrofitError: nothing is there, it cannot be read, or it has no such split or option.
    """
    import datasets

    path = at_home(source)
    with reading(source):
        files = [path] if path.is_file() else _texts(path) if path.is_dir() else []
        saved = any((path / file).is_file() for file in ("dataset_info.json", "dataset_dict.json"))
        for key, value in (("data_name", name), ("data_revision", revision)):
            if value is not None and path.exists() and (key == "data_revision" or files or saved):
                raise RetrofitError(f"{key}: {path} is no dataset of the Hub and has none: remove this key")
        if files:
            found = _read_files(files)
        elif saved:
            found = datasets.load_from_disk(str(path))
        elif path.is_dir():
            found = datasets.load_dataset(str(path), name, streaming=streaming)
        elif path.exists() or path.is_symlink():
            raise RetrofitError(
                f"{path} is a pipe, a device or a link that leads nowhere: write the text to a file first"
            )
        elif not HUB_ID.fullmatch(source) or path.suffix.lower() in FILE_SUFFIXES:
            raise RetrofitError(f"there is no file or folder {source}: give a text or JSONL file, or a dataset")
        else:
            with reading(f"{source} is no file or folder here, and the dataset of that name on the Hub"):
                found = datasets.load_dataset(source, name, revision=revision, streaming=streaming)
        parts = found if isinstance(found, dict) else {"train": found}
        split = split or ("test" if "test" in parts else "train")
        if split not in parts:
            there = ", ".join(map(repr, parts))
            raise RetrofitError(
                f"{source} has no split {split!r}{nearest(split, parts)}, only {there}: choose one as data_split"
            )
        data = parts[split]
        if isinstance(data, datasets.Dataset):
            return Source(source, data.to_iterable_dataset(), data._fingerprint)
        return Source(source, data, _identity(files) if files else None)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever a reader raises inside the block into one sentence.

    Raises:
        RetrofitError: ``what`` cannot be read, or ``datasets`` has no room for its cache of it.
    """
    try:
        yield
    except (RetrofitError, ImportError):  # the command line says which package is missing
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno in (ENOSPC, EDQUOT):
                raise RetrofitError(
                    f"the cache of datasets has no room for {what} ({cause.strerror}): make room there, or set "
                    "HF_DATASETS_CACHE to another folder"
                ) from error
            cause = cause.__cause__ or cause.__context__
        raise RetrofitError(f"{what} cannot be read: {type(error).__name__}: {first_line(error)}") from error


def _read_files(files: list[Path]) -> Any:
    """The records of one file, or those of several texts."""
    import datasets

    file, suffix = files[0], files[0].suffix.lower()
    if suffix == ".json":
        raise RetrofitError(
            f"{file}: a .json file is not supported: write JSON Lines, one object per line, to a .jsonl file"
        )
    if suffix in LOADERS:
        return datasets.load_dataset(LOADERS[suffix], data_files=glob.escape(str(file)), streaming=True)
    lines = suffix in JSON_LINES
    return datasets.IterableDataset.from_generator(lambda: _read_lines(file) if lines else _read_texts(files))


def _texts(folder: Path) -> list[Path]:
    """The texts of a folder that holds no other data."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in FILE_SUFFIXES - {".md"})
    return files if all(path.suffix.lower() == ".txt" for path in files) else []


def _identity(paths: Sequence[Path]) -> str:
    """A hash of files' names, sizes and times of change, by which build tools too tell whether one has changed."""
    known = ((path.resolve(), path.stat()) for path in paths)
    parts = "\0".join(f"{path}\0{status.st_size}\0{status.st_mtime_ns}" for path, status in known)
    return sha256(parts.encode(errors="surrogateescape")).hexdigest()


def _read_texts(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        yield {WHERE: str(path), "text": read_text(path)}


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    columns: list[str] = []
    with path.open("rb") as file:
        for where, row in json_lines(file, str(path)):
            columns = columns or list(row)
            yield {**{name: row.get(name) for name in columns}, WHERE: where}

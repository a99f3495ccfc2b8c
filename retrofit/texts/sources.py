"""Where records come from: a text, JSONL or Parquet file, a folder of texts, or what ``datasets`` reads."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from errno import EDQUOT, ENOSPC
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from patches.errors import RetrofitError, first_line, nearest
from retrofit.files import at_home, read_text
from retrofit.untrusted import json_lines

HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
# a missing one of these is a missing file; any other dot may be part of an id (user/data-v1.5)
FILE_SUFFIXES = {".txt", ".md", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".tsv", ".gz", ".zst"}

Record = tuple[str, Any]  # where it stands, to be named in errors; what its column holds


@dataclass(frozen=True)
class Source:
    """Records that can be read as often as needed, always in the same order.

    Attributes:
        name: what it is called in errors.
        columns: the columns it has, or the keys of its first line.
        identity: a string that changes when the contents may have changed; empty for a streamed dataset.
        read: yields the records of one column; raises RetrofitError where one has no such column.
    """

    name: str
    columns: list[str]
    identity: str
    read: Callable[[str], Iterator[Record]]


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
    with reading(source):
        opened = _open(source, name, revision, split, streaming)
    return replace(opened, read=lambda column: _named_records(opened.name, opened.read(column)))


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


def _named_records(name: str, records: Iterator[Record]) -> Iterator[Record]:
    for number in count():
        with reading(f"{name}, row {number}"):
            record = next(records, None)
        if record is None:
            return
        yield record


def _open(source: str, name: str | None, revision: str | None, split: str | None, streaming: bool) -> Source:
    path = at_home(source)
    suffix = path.suffix.lower()
    texts = _texts(path) if path.is_dir() else []
    if path.is_file() or texts:
        what = "a folder of texts" if texts else "a file"
        for key, value in (("data_name", name), ("data_revision", revision)):
            if value is not None:
                raise RetrofitError(f"{key}: {path} is {what} and has none: remove this key")
        if split not in (None, "train"):
            raise RetrofitError(f"data_split: {path} is {what} and has no splits: remove this key")
        if texts:
            return Source(str(path), ["text"], _identity(*texts), lambda _: ((str(t), read_text(t)) for t in texts))
        if suffix == ".json":
            raise RetrofitError(
                f"{path}: a .json file is not supported: write JSON Lines, one object per line, to a .jsonl file"
            )
        if suffix in (".jsonl", ".ndjson"):
            return Source(str(path), _first_keys(path), _identity(path), lambda column: _jsonl(path, column))
        if suffix == ".parquet":
            return Source(str(path), _parquet_columns(path), _identity(path), lambda column: _parquet(path, column))
        if streaming:
            raise RetrofitError(
                f"{path} is one document, which cannot be streamed: give a JSONL or Parquet file, or train without "
                "streaming"
            )
        return Source(str(path), ["text"], _identity(path), lambda _: iter([(str(path), read_text(path))]))
    if path.is_dir():
        if revision is not None:
            raise RetrofitError(f"data_revision: {path} is a local folder and has none: remove this key")
        return _dataset(str(path), _load_folder(path, name, streaming), split)
    if path.exists() or path.is_symlink():
        raise RetrofitError(f"{path} is a pipe, a device or a link that leads nowhere: write the text to a file first")
    if HUB_ID.fullmatch(source) and suffix not in FILE_SUFFIXES:
        import datasets

        with reading(f"{source} is no file or folder here, and the dataset of that name on the Hub"):
            data = datasets.load_dataset(source, name, revision=revision, streaming=streaming)
        return _dataset(source, data, split)
    raise RetrofitError(f"there is no file or folder {source}: give a text or JSONL file, or a dataset")


# ---- files ----


def _texts(folder: Path) -> list[Path]:
    """The texts of a folder that holds no other data."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    texts = [path for path in files if path.suffix.lower() == ".txt"]
    others = [path for path in files if path.suffix.lower() in FILE_SUFFIXES - {".md", ".txt"}]
    return [] if others else texts


def _identity(*paths: Path) -> str:
    """A hash of files' names, sizes and times of change, by which build tools too tell whether one has changed."""
    known = ((path.resolve(), path.stat()) for path in paths)
    parts = "\0".join(f"{path}\0{status.st_size}\0{status.st_mtime_ns}" for path, status in known)
    return sha256(parts.encode(errors="surrogateescape")).hexdigest()


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        yield from json_lines(file, str(path))


def _first_keys(path: Path) -> list[str]:
    return next((list(row) for _, row in _objects(path)), [])


def _jsonl(path: Path, column: str) -> Iterator[Record]:
    for where, row in _objects(path):
        if column not in row:
            raise RetrofitError(f"{where} has no {column!r}, only {_names(row)}: every line needs the same keys")
        yield where, row[column]


def _parquet_columns(path: Path) -> list[str]:
    from pyarrow import parquet

    return list(parquet.ParquetFile(path).schema_arrow.names)


def _parquet(path: Path, column: str) -> Iterator[Record]:
    from pyarrow import parquet

    batches = parquet.ParquetFile(path).iter_batches(columns=[column], batch_size=1024)
    for number, value in enumerate(value for batch in batches for value in batch.column(column).to_pylist()):
        yield f"{path}, row {number}", value


# ---- datasets ----


def _load_folder(path: Path, name: str | None, streaming: bool) -> Any:
    import datasets

    if not ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()):
        return datasets.load_dataset(str(path), name, streaming=streaming)
    if name is not None:
        raise RetrofitError(f"data_name: {path} was saved by datasets and has none: remove this key")
    return datasets.load_from_disk(str(path))


def _dataset(name: str, data: Any, split: str | None) -> Source:
    """One split of what ``datasets`` has loaded."""
    if isinstance(data, dict):
        split = split or ("test" if "test" in data else "train")
        if split not in data:
            hint = nearest(split, data)
            raise RetrofitError(f"{name} has no split {split!r}{hint}, only {_names(data)}: choose one as data_split")
        data = data[split]
    elif split not in (None, "train"):
        raise RetrofitError(f"data_split: {name} was saved without splits: remove this key")
    columns = list(data.column_names or next(iter(data), {}))  # of a stream, which is opened here
    return Source(name, columns, getattr(data, "_fingerprint", ""), lambda column: _rows(name, data, column))


def _rows(name: str, data: Any, column: str) -> Iterator[Record]:
    for number, row in enumerate(data.select_columns(column)):
        value = row[column]
        if isinstance(value, dict):  # older datasets hold a list of messages as a mapping of lists
            value = [dict(zip(value, parts, strict=True)) for parts in zip(*value.values(), strict=True)]
        yield f"{name}, row {number}", value


# ---- words for errors ----


def _names(columns: Any) -> str:
    return ", ".join(map(repr, columns)) or "nothing"

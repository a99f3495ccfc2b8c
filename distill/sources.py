"""Where text comes from: a text, JSONL or Parquet file, a folder written by ``datasets``, or a dataset of the Hub."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from patches.errors import RetrofitError

HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def documents(source: str) -> Iterator[str]:
    """Yield the documents of ``source`` in their order, empty ones left out.

    A ``.jsonl`` file gives one document per line (its ``text``), ``.parquet`` and datasets one per row (the column
    ``text``), any other file is one document.

    Raises:
        RetrofitError: nothing there, not readable as what it is, or without ``text``.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        texts = _dataset_folder(path)
    elif path.is_file() and path.suffix.lower() in (".jsonl", ".ndjson"):
        texts = _jsonl(path)
    elif path.is_file() and path.suffix.lower() == ".parquet":
        texts = _parquet(path)
    elif path.is_file() and path.suffix.lower() == ".json":
        raise RetrofitError(f"{path}: a .json file would be learned brackets and all: give JSON Lines as .jsonl")
    elif path.is_file():
        texts = iter([_decode(path.read_bytes(), str(path))])
    elif HUB_ID.fullmatch(source) and not path.suffix:
        texts = _hub(source)
    else:
        raise RetrofitError(f"there is no file or folder {source}: give a text or JSONL file, or a dataset")
    return (text for text in texts if text.strip())


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise RetrofitError(f"{where} is not UTF-8 text (byte {error.start}): convert it first") from error


def _jsonl(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}, line {number}"
            line = _decode(raw, where)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise RetrofitError(f"{where} is not JSON ({error}): every line must be one object") from error
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                found = f"its keys are {', '.join(map(repr, row))}" if isinstance(row, dict) else "it is no object"
                raise RetrofitError(f"{where} has no string 'text' ({found}): name the text column 'text'")
            yield row["text"]


def _parquet(path: Path) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        _check_columns(file.schema_arrow.names, str(path))
        for batch in file.iter_batches(columns=["text"]):
            yield from _strings(batch.column("text").to_pylist(), str(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise RetrofitError(f"{path} cannot be read as Parquet: {_first_line(error)}") from error


def _dataset_folder(path: Path) -> Iterator[str]:
    import datasets

    saved = (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()
    try:
        data = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except Exception as error:  # datasets raises whatever its readers raise
        raise RetrofitError(f"{path} cannot be read as a dataset: {_first_line(error)}") from error
    return _rows(data, str(path))


def _hub(name: str) -> Iterator[str]:
    import datasets

    try:
        data = datasets.load_dataset(name)
    except Exception as error:  # no network, no such dataset, no access, no such configuration
        raise RetrofitError(
            f"{name} is no file or folder here and could not be loaded from the Hub: {_first_line(error)}"
        ) from error
    return _rows(data, name)


def _rows(data: object, source: str) -> Iterator[str]:
    """The ``text`` column of a ``datasets`` dataset; of a dictionary of splits, the split ``train``."""
    import datasets

    if isinstance(data, datasets.DatasetDict):
        if "train" not in data:
            raise RetrofitError(
                f"{source} has no split 'train', only {', '.join(map(repr, data))}: save one as 'train'"
            )
        data = data["train"]
    assert isinstance(data, datasets.Dataset)
    _check_columns(data.column_names, source)
    return _strings((row["text"] for row in data.select_columns("text")), source)


def _check_columns(names: list[str], source: str) -> None:
    if "text" not in names:
        raise RetrofitError(
            f"{source} has no column 'text', only {', '.join(map(repr, names))}: rename the text column"
        )


def _strings(values: Iterable[object], source: str) -> Iterator[str]:
    for number, value in enumerate(values):
        if not isinstance(value, str):
            raise RetrofitError(f"{source}, row {number}: 'text' holds {type(value).__name__}, not a string")
        yield value


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"

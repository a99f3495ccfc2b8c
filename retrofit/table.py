"""The one table a verb prints, and the same rows as JSON for ``--json FILE``."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from retrofit.files import write_json

Row = Mapping[str, Any]
Columns = Mapping[str, tuple[str, str]]
Item = TypeVar("Item")


def print_table(title: str, rows: Sequence[Row], columns: Columns, console: Console | None = None) -> None:
    """Print ``rows`` under ``columns``, ``{key: (header, format)}``: ``{"kl": ("KL to teacher", ".4f")}``.

    A missing, None or NaN value is shown as a dash. Columns of text (format ``""``) are flush left, others right.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    cells = format_rows(rows, columns)
    for at, (header, spec) in enumerate(columns.values()):
        # headers wrap, figures never do: eight columns of figures fit an ordinary terminal
        width = max(map(len, [*header.split(), *(line[at] for line in cells)]), default=0)
        table.add_column(header, justify="right" if spec else "left", width=width)
    for line in cells:
        table.add_row(*line)
    (console or Console()).print(table)


def markdown(rows: Sequence[Row], columns: Columns) -> str:
    """The same table in Markdown."""
    lines = [[" ".join(header.split()) for header, _ in columns.values()]]
    lines += [["---:" if spec else "---" for _, spec in columns.values()]]
    lines += format_rows(rows, columns)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def show_progress(items: Collection[Item], name: str) -> Iterable[Item]:
    """``items``, with a bar on a terminal's stderr while they are gone through."""
    console = Console(stderr=True)
    return track(items, name, console=console, disable=not console.is_terminal)


def format_rows(rows: Sequence[Row], columns: Columns) -> list[list[str]]:
    """The cells of a table as text, line by line."""
    return [[_cell(row.get(key), spec) for key, (_, spec) in columns.items()] for row in rows]


def write_rows(path: str | Path, rows: Sequence[Row]) -> None:
    """Write ``rows`` as a JSON list in one step; NaN and infinities become null."""
    write_json(path, finite(rows))


def finite(data: Any) -> Any:
    """``data`` (mappings, sequences, values) with None for NaN and infinities, which JSON cannot say."""
    if isinstance(data, Mapping):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if _missing(data) else data


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _cell(value: Any, spec: str) -> str:
    return "-" if _missing(value) else format(value, spec)

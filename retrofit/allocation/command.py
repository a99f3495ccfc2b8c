"""``retrofit allocate``: a window and a memory for each layer, for a number of bytes."""

from pathlib import Path
from typing import Annotated

import typer

from retrofit.options import Base, Json, Memory, Options, Overwrite, Sinks, Verbs, loading, pairs

app = Verbs()


@app.verb(
    "retrofit allocate Qwen/Qwen2.5-0.5B --data corpus.txt --bytes 150000 -o by-need.yaml",
    "retrofit patch Qwen/Qwen2.5-0.5B --recipe by-need.yaml --data corpus.txt -o by-need",
)
def allocate(
    base: Base,
    data: Annotated[str, typer.Option(help="Text to measure on: a file, a folder or a dataset.")],
    budget: Annotated[
        int, typer.Option("--bytes", min=1, help="Bytes that a layer keeps of one sequence on average, besides sinks.")
    ],
    memory: Memory = "expected",
    sinks: Sinks = 4,
    option: Options = None,
    rows: Annotated[
        int, typer.Option(min=1, help="Rows of the text on which sizes are chosen; as many others are scored.")
    ] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 1024,
    dtype: Annotated[
        str,
        typer.Option(help="Dtype of the base and of the bytes: auto (the checkpoint's own), float32 or bfloat16."),
    ] = "auto",
    target: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Recipe to write.")] = Path(
        "allocation.yaml"
    ),
    overwrite: Overwrite = False,
    json_file: Json = None,
) -> None:
    """Give more bytes to the layers of BASE that need them most.

    The command runs forward passes only. It prints what each layer gets, and how near the model comes to full
    attention, beside equal sizes for all layers: with the memory, and with sinks and window alone. It measures this on
    rows on which nothing was chosen. `retrofit patch`, `estimate` and `distill` take the recipe that it writes.
    """
    if target.exists() and not overwrite:
        raise typer.BadParameter(f"{target} exists: choose another name or pass --overwrite")
    options = pairs("--option", option, taken=("base", "memory", "window", "sinks", "layers", "others", "by_layer"))
    loading(base)
    from patches.errors import one_of
    from patches.kinds import find_kind
    from retrofit.evaluation.settings import DTYPES

    one_of("dtype", dtype, *DTYPES)
    find_kind(memory).read_options(options)

    from retrofit.allocation.report import report
    from retrofit.files import write_text
    from retrofit.table import print_table, write_rows

    found = report(
        base, data, budget, memory, sinks, options, rows, length, dtype, lambda text: typer.echo(text, err=True)
    )
    for title, lines, columns in found.tables:
        print_table(title, lines, columns)
    write_text(target, found.recipe)
    typer.echo(f"{target}: {found.said}")
    if json_file is not None:
        write_rows(json_file, [line for _, lines, _ in found.tables for line in lines])

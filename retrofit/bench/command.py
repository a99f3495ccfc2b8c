"""``retrofit bench``: what a memory costs and saves, measured."""

from typing import Annotated, Any

import typer

from retrofit.bench.cases import Run
from retrofit.options import Json, Verbs, flags, loading

app = Verbs()
bench = Verbs(help="Measure what a memory costs and saves, as ratios within one run.")
app.add_typer(bench, name="bench")

Threads = Annotated[int | None, typer.Option(min=1, help="Threads that torch may use (default: torch decides).")]


@bench.verb(
    "retrofit bench run --memory all --length 4096 --length 16384",
    "retrofit bench run --model runs/first/model --length 32768 --device cuda --dtype bfloat16",
)
@flags(Run)
def run(
    repeats: Annotated[int, typer.Option(help="Rounds that are counted; each round runs every form once.")] = 3,
    threads: Threads = None,
    json_file: Json = None,
    **given: Any,
) -> None:
    """Measure reading, decoding, memory and cache beside the roofline.

    It compares memories with the window alone and with full attention.
    """
    loading(given.get("model") or "torch")
    import torch

    from retrofit.bench import run as benchmark
    from retrofit.table import print_table, write_rows

    if threads is not None:
        torch.set_num_threads(threads)
    case = benchmark.Case(**given)
    rows = benchmark.run(case, repeats)
    typer.echo(f"{case}, {torch.get_num_threads()} threads")
    for title, columns in benchmark.TABLES.items():
        print_table(title, rows, columns)
    if json_file is not None:
        write_rows(json_file, rows)

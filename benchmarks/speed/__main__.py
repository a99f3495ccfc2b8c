"""``python -m benchmarks.speed VERB``: parts of a memory and of training, each beside what it replaces."""

import importlib
import sys
from inspect import Parameter, getdoc, signature
from typing import Annotated, Any

import torch
import typer

from benchmarks.speed import cases
from patches.errors import RetrofitError
from retrofit.bench.command import Threads
from retrofit.options import Json, Verbs, flags
from retrofit.table import print_table, write_rows

ROUNDS = "Rounds that are counted; each round runs every form once."
app = Verbs(help="Measure parts of a memory and of training, as ratios within one run.")


def add(name: str, case: Any, count: int, flag: str = "repeats", help: str = ROUNDS) -> None:
    """Make a verb of the module ``name``, which has ``Case`` and ``run``.

    Args:
        case: dataclass of its settings; the docstring is its --help.
        count: how many rounds are counted if ``flag``, with its ``help``, does not say.
    """

    def measure(threads: Threads = None, json_file: Json = None, **given: Any) -> None:
        found, repeats = importlib.import_module(f"benchmarks.speed.{name}"), given.pop(flag)
        if threads is not None:
            torch.set_num_threads(threads)
        chosen = found.Case(**given)
        rows = found.run(chosen, repeats)
        typer.echo(f"{chosen}, {torch.get_num_threads()} threads")
        print_table(name, rows, found.COLUMNS)
        if json_file is not None:
            write_rows(json_file, rows)

    counted = Parameter(flag, Parameter.KEYWORD_ONLY, default=count, annotation=Annotated[int, typer.Option(help=help)])
    threads, json_file, _ = signature(measure).parameters.values()
    measure.__signature__ = signature(measure).replace(  # type: ignore[attr-defined]
        parameters=[part.replace(kind=Parameter.KEYWORD_ONLY) for part in (counted, threads, json_file)]
    )
    measure.__doc__ = getdoc(case)
    app.command(name)(flags(case)(measure))


add("window", cases.Window, count=3)
add("scan", cases.Scan, count=5)
add("decode", cases.Decode, count=64, flag="tokens", help="Tokens decoded at each context.")
add("prefill", cases.Prefill, count=3)
add("capacity", cases.Capacity, count=60, flag="seeds", help="Random memories of each kind.")
add("loss", cases.Loss, count=3)
add("step", cases.Step, count=5)
add("segments", cases.Segments, count=1)

if __name__ == "__main__":
    try:
        app()
    except RetrofitError as error:
        sys.exit(f"error: {error}")

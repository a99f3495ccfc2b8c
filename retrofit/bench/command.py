"""``retrofit bench``: what a memory costs and saves, measured; a verb for each benchmark and its case."""

import importlib
from inspect import Parameter, getdoc, signature
from typing import Annotated, Any

import typer

from retrofit.bench import cases
from retrofit.options import Json, Verbs, flags, loading

app = Verbs()
bench = Verbs(help="Measure what a memory costs and saves, as ratios within one run.")
app.add_typer(bench, name="bench")

ROUNDS = "Rounds that are counted; each round runs every form once."
Threads = Annotated[int | None, typer.Option(min=1, help="Threads that torch may use (default: torch decides).")]


def add(module: str, case: Any, *examples: str, count: int, flag: str = "repeats", help: str = ROUNDS) -> None:
    """Make a verb of the benchmark ``module``, which has ``Case`` and ``run``.

    Args:
        case: dataclass of its settings; the docstring is its --help.
        examples: commands for --help.
        count: how many rounds are counted if ``flag``, with its ``help``, does not say.
    """
    name = module.rpartition(".")[2]

    def measure(threads: Threads = None, json_file: Json = None, **given: Any) -> None:
        loading(given.get("model") or "torch")
        import torch

        from retrofit.table import print_table, write_rows

        found, repeats = importlib.import_module(module), given.pop(flag)
        if threads is not None:
            torch.set_num_threads(threads)
        chosen = found.Case(**given)
        rows = found.run(chosen, repeats)
        typer.echo(f"{chosen}, {torch.get_num_threads()} threads")
        tables = found.TABLES if name == "run" else {f"bench {name}": found.COLUMNS}
        for title, columns in tables.items():
            print_table(title, rows, columns)
        if json_file is not None:
            write_rows(json_file, rows)

    counted = Parameter(flag, Parameter.KEYWORD_ONLY, default=count, annotation=Annotated[int, typer.Option(help=help)])
    threads, json_file, _ = signature(measure).parameters.values()
    measure.__signature__ = signature(measure).replace(  # type: ignore[attr-defined]
        parameters=[part.replace(kind=Parameter.KEYWORD_ONLY) for part in (counted, threads, json_file)]
    )
    measure.__doc__ = getdoc(case)
    bench.verb(*examples, name=name)(flags(case)(measure))


add("retrofit.bench.window", cases.Window, "retrofit bench window --length 16384 --window 1024", count=3)
add("retrofit.bench.scan", cases.Scan, "retrofit bench scan --length 4096", count=5)
add(
    "retrofit.bench.decode",
    cases.Decode,
    "retrofit bench decode --memory ahn-gdn --long 16384",
    count=64,
    flag="tokens",
    help="Tokens decoded at each context.",
)
add(
    "retrofit.bench.prefill",
    cases.Prefill,
    "retrofit bench prefill --memory joint --length 4096 --longest 32768",
    count=3,
)
add(
    "retrofit.bench.run",
    cases.Run,
    "retrofit bench run --memory all --length 4096 --length 16384",
    "retrofit bench run --model runs/first/model --length 32768 --device cuda --dtype bfloat16",
    count=3,
)
add(
    "retrofit.bench.capacity",
    cases.Capacity,
    "retrofit bench capacity --seeds 200",
    count=60,
    flag="seeds",
    help="Random memories of each kind.",
)

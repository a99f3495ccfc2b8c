"""``retrofit report``: one page about a run."""

from pathlib import Path
from typing import Annotated

import typer

from retrofit.options import Verbs

app = Verbs()


@app.verb(
    "retrofit report runs/first",
    "retrofit report runs/first --eval runs/eval --bench bench.json -o first.html",
)
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of `retrofit distill` or `retrofit eval`.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page (default: RUN/report.html).")
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option("--eval", metavar="DIR", help="Folder of `retrofit eval` (default: RUN/eval).")
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The --json file of a benchmark (default: RUN/bench.json).")
    ] = None,
) -> None:
    """Write one HTML page about a run.

    It shows curves, KL by position, tables and the recipe. Its figures are also written to RUN/figures,
    as PNG and SVG.
    """
    from retrofit.report.page import FIGURES
    from retrofit.report.page import report as write

    page, pictures, missing = write(run, output, evaluation, bench)
    for sentence in missing:
        typer.echo(sentence, err=True)
    typer.echo(f"{page}: {len(pictures)} figures, each as PNG and SVG in {run / FIGURES}")

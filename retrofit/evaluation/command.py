"""``retrofit eval``: how much worse than full attention a retrofit is."""

from pathlib import Path
from typing import Annotated, Any

import typer

from retrofit.evaluation.settings import Settings
from retrofit.options import Output, Overwrite, Verbs, flags, loading

app = Verbs()


@app.verb(
    "retrofit eval runs/first/model --data held-out.txt",
    "retrofit eval Qwen/Qwen2.5-0.5B --adapter runs/first/adapter --tasks ruler,longbench --limit 20",
    name="eval",
)
@flags(Settings, leave=("chunk",))
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An exported retrofit, or the base of the adapters.")],
    output: Output = Path("runs/eval"),
    overwrite: Overwrite = False,
    **given: Any,
) -> None:
    """Compare MODEL with full attention and with the window alone.

    An interrupted run continues where it was. DIR/eval.json holds everything that is printed, and more.
    """
    loading(model)
    from retrofit.evaluation.run import run_evaluation
    from retrofit.evaluation.tables import tables
    from retrofit.files import only_writer
    from retrofit.table import print_table

    if "tasks" in given:
        given["tasks"] = [name.strip() for part in given["tasks"] for name in part.split(",") if name.strip()]
    if not given.keys().isdisjoint(("data", "tasks")):
        given.setdefault("probes", ())
    settings = Settings(model, **given)
    with only_writer(output):
        summary = run_evaluation(settings, output, overwrite)
    for title, rows, columns in tables(summary):
        print_table(title, rows, columns)
    if "data" in given and "tasks" not in given and not given["probes"]:
        typer.echo("only the text was scored: add --probe identity, recall or passkey to ask for more", err=True)
    typer.echo(f"{output}: eval.json, results.jsonl")

"""One report from folder to files: the page, and every figure as PNG and SVG beside the run."""

from pathlib import Path

from patches.errors import RetrofitError
from retrofit.files import write_bytes, write_text
from retrofit.report.collect import Run, collect, names
from retrofit.report.costs import cost_pictures
from retrofit.report.heat import heat_pictures
from retrofit.report.page import GENERATOR, page
from retrofit.report.style import Picture, Styles
from retrofit.report.training import evaluation_distances, training_pictures

PAGE, FIGURES = "report.html", "figures"


def report(
    folder: Path, output: Path | None = None, evaluation: Path | None = None, bench: Path | None = None
) -> tuple[Path, list[Picture], list[str]]:
    """Write ``output`` (``folder/report.html`` if None) and ``folder/figures/``.

    Args:
        folder, evaluation, bench: as :func:`retrofit.report.collect.collect`.

    Returns:
        The page's path, its figures, and a sentence about each thing that is missing.

    Raises:
        RetrofitError: there is nothing to report, or ``output`` is something else than a report.
    """
    output = folder / PAGE if output is None else output
    _check(output)
    run = collect(folder, evaluation, bench)
    made = pictures(run)
    text = page(run, made)
    for picture in made:
        write_text(folder / FIGURES / f"{picture.name}.svg", picture.svg())
        write_bytes(folder / FIGURES / f"{picture.name}.png", picture.png())
    write_text(output, text)
    return output, made, run.missing


def pictures(run: Run) -> list[Picture]:
    """All that there are figures for, section by section."""
    # the run's own memory first: it has the first colour, whatever else is beside it
    trained = [run.memory] if run.log or run.metrics else []
    styles = Styles([*trained, *names(run.evaluation.get("rows")), *names(run.bench)])
    found = [*training_pictures(run, styles), *evaluation_distances(run.evaluation, styles)]
    found += [*heat_pictures(run.evaluation), *cost_pictures(run.bench, styles)]
    return found


def _check(output: Path) -> None:
    """Replace an earlier report, and nothing else."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise RetrofitError(f"{output}: a report is an HTML file; give a name that ends in .html")
    if output.is_dir():
        raise RetrofitError(f"{output} is a folder: give the name of a file in it")
    if output.is_file() and GENERATOR.encode() not in output.read_bytes()[:2000]:
        raise RetrofitError(f"{output} is there and is no report of ours: choose another name")

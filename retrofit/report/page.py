"""One report from folder to files: the page, and every figure as PNG and SVG beside the run."""

from collections.abc import Sequence
from pathlib import Path, PurePath

from patches.errors import RetrofitError
from retrofit.files import write_bytes, write_text
from retrofit.report.collect import Run, collect, number
from retrofit.report.drawing import EQUAL, TEACHER, WINDOW_ONLY, Picture
from retrofit.report.figures import pictures
from retrofit.report.tables import tables

try:
    import jinja2
except ImportError as error:
    raise RetrofitError("the report needs jinja2: pip install 'retrofit-lm[report]'") from error

PAGE, FIGURES = "report.html", "figures"
GENERATOR = '<meta name="generator" content="retrofit report">'


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
    drawn = [(picture, picture.saved("svg")) for picture in made]
    text = page(run, drawn)
    for picture, svg in drawn:
        write_bytes(folder / FIGURES / f"{picture.name}.svg", svg)
        write_bytes(folder / FIGURES / f"{picture.name}.png", picture.saved("png"))
    write_text(output, text)
    return output, made, run.missing


def page(run: Run, figures: Sequence[tuple[Picture, bytes]]) -> str:
    """The whole HTML document. Whatever comes from a file is escaped.

    Args:
        figures: each with its SVG.
    """
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = _shown
    title, about = _title(run)
    found = tables(run)
    metrics, evaluated = run.metrics, run.evaluation
    sections = [*(table.section for table in found[:1]), *(picture.section for picture, _ in figures)]
    lists = {
        "Data": metrics["tokens"],
        "Records": metrics["data"],
        "Parameters": metrics["parameters"],
        "Versions": metrics["versions"],
        "Settings of the evaluation": evaluated["settings"],
        "Versions of the evaluation": evaluated["versions"],
    }
    made = [("Command", metrics["command"]), ("Recipe", run.recipe)]
    text = environment.get_template("page.html.j2").render(
        generator=GENERATOR,
        title=title,
        about=about,
        memory=run.memory,
        facts=_facts(run),
        missing=run.missing,
        sections=dict.fromkeys([*sections, *(table.section for table in found)]),
        figures=[(picture, svg.decode().partition("<svg")[2]) for picture, svg in figures],
        tables=found,
        made=made if any(text for _, text in made) or any(lists.values()) else [],
        lists=lists,
    )
    return text.encode("utf-8", "replace").decode() + "\n"  # JSON can name half a character


def _title(run: Run) -> tuple[str, str]:
    """What it is called, and the line under it."""
    recipe = run.metrics["recipe"]
    base = recipe.get("base") or run.evaluation["settings"].get("model")
    if recipe.get("memory"):
        shape = f"window {recipe.get('window')}, sinks {recipe.get('sinks')}, rows of {recipe.get('max_length')} tokens"
        return f"{run.memory} on {PurePath(str(base)).name}", f"{shape}, {recipe.get('max_steps')} steps · {run.folder}"
    return f"Evaluation of {base}" if base else f"Report of {run.folder.name}", str(run.folder)


def _facts(run: Run) -> list[tuple[str, str]]:
    """The figures that answer the first questions, each with what it is."""
    rows = {str(row.get("name")): row for row in run.metrics["rows"]}

    def figure(row: str, key: str) -> float | None:
        return number(rows.get(row, {}).get(key))

    def beside(value: float | None, whose: str, spec: str = ".4f") -> str:
        return "" if value is None else f"; {whose} {value:{spec}}"

    equal = beside(figure(EQUAL, "kl_gap_closed"), "a window of as many bytes", ".0%")
    own = run.memory
    facts = [
        (figure(own, "kl_gap_closed"), ".1%", f"of the KL gap closed{equal}"),
        (figure(own, "kl"), ".4f", f"nats KL to the teacher{beside(figure(WINDOW_ONLY, 'kl'), WINDOW_ONLY)}"),
        (figure(own, "nll"), ".4f", f"nats NLL{beside(figure(TEACHER, 'nll'), TEACHER)}"),
        (figure(own, "kept_bytes"), ",.0f", "bytes per layer beside the window"),
        (number(run.metrics["parameters"].get("memory")), ",.0f", "parameters fitted"),
    ]
    return [(f"{value:{spec}}", what) for value, spec, what in facts if value is not None]


def _shown(value: object) -> str:
    """A value of a settings list."""
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None else str(value)


def _check(output: Path) -> None:
    """Replace an earlier report, and nothing else."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise RetrofitError(f"{output}: a report is an HTML file; give a name that ends in .html")
    if output.is_dir():
        raise RetrofitError(f"{output} is a folder: give the name of a file in it")
    if output.is_file() and GENERATOR.encode() not in output.read_bytes()[:2000]:
        raise RetrofitError(f"{output} exists, and retrofit did not write it: choose another name")

"""The page: tables, figures, recipe, command and versions in one HTML file that asks nothing of any network."""

from collections.abc import Iterable
from html import escape
from pathlib import PurePath

from retrofit.report.collect import Run, number, record, records
from retrofit.report.style import DARK, EQUAL, TEACHER, WINDOW_ONLY, Picture, variable
from retrofit.report.tables import Table, tables

GENERATOR = '<meta name="generator" content="retrofit report">'
# what the browser holds the page to: nothing is fetched, nothing runs
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --soft: #f4f6f8; --muted: #5b6470; LIGHT }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --soft: #1f242a; --muted: #9aa4b0; DARK } }
@media print { :root { color-scheme: light; --paper: #ffffff; --soft: #f4f6f8; --muted: #5b6470; LIGHT } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(INK);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(GRID) }
h3 { font-size: 1rem; margin: 1.25rem 0 .4rem }
p { margin: .25rem 0 }
.muted, figcaption small { color: var(--muted) }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.25rem 0 }
.facts div { background: var(--soft); border-radius: .5rem; padding: .7rem .9rem }
.facts b { display: block; font-size: 1.35rem; line-height: 1.3; font-variant-numeric: tabular-nums }
.facts span { color: var(--muted); font-size: .85rem }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 1.5rem }
figure { margin: 0; min-width: 0 }
figure svg { display: block; width: 100%; max-width: 36rem; height: auto }
figcaption { margin-bottom: .35rem }
figcaption b { display: block }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .75rem .3rem 0; text-align: right; border-bottom: 1px solid var(GRID); vertical-align: bottom }
th { min-width: 4.2rem }
th:first-child { text-align: left; min-width: 7.5rem; position: sticky; left: 0; background: var(--paper) }
thead th { font-weight: 600; color: var(--muted); font-size: .82rem; line-height: 1.3 }
tbody th { font-weight: 400 }
.best { font-weight: 600 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; font-size: .9rem }
dt { color: var(--muted) } dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums }
pre { background: var(--soft); border-radius: .5rem; padding: .8rem 1rem; margin: .25rem 0; font-size: .85rem;
  overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere }
.lists { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); gap: 0 2rem }
.missing { margin: 1rem 0; border-left: 3px solid var(--muted); padding: .1rem 0 .1rem .9rem;
  color: var(--muted); font-size: .9rem }
.missing p { overflow-wrap: anywhere }
@media print { figure, table { break-inside: avoid } pre { font-size: .7rem } }
"""


def page(run: Run, pictures: list[Picture]) -> str:
    """The whole HTML document. Whatever comes from a file is escaped."""
    title, about = _title(run)
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        GENERATOR,
        '<link rel="icon" href="data:,">',
        f"<title>{_safe(title)}</title>",
        f"<style>{_style()}</style>",
        "</head>",
        "<body>",
        f"<header><h1>{_safe(title)}</h1>",
        f'<p class="muted">{_safe(about)}</p></header>',
        *_facts(run),
        *_missing(run.missing),
    ]
    found = list(tables(run))
    sections = [table.section for table in found[:1]]
    sections += [picture.section for picture in pictures] + [table.section for table in found]
    for section in dict.fromkeys(sections):
        figures = [_figure(picture) for picture in pictures if picture.section == section]
        parts += [f"<h2>{_safe(section)}</h2>", *(['<div class="figures">', *figures, "</div>"] if figures else [])]
        parts += [_table(table, run.memory) for table in found if table.section == section]
    parts += [*_made(run), "</body>", "</html>"]
    return "\n".join(parts) + "\n"


def _safe(text: object) -> str:
    """Escaped, and encodable: JSON can name half a character."""
    return escape(str(text).encode("utf-8", "replace").decode())


def _style() -> str:
    ink, grid = list(DARK)[:2]
    light = "; ".join(f"{variable(colour)}: {colour}" for colour in DARK)
    dark = "; ".join(f"{variable(colour)}: {other}" for colour, other in DARK.items())
    named = STYLE.replace("LIGHT", light).replace("DARK", dark)
    return named.replace("(INK)", f"({variable(ink)})").replace("(GRID)", f"({variable(grid)})")


def _title(run: Run) -> tuple[str, str]:
    """What it is called, and the line under it."""
    settings, evaluated = run.settings, record(run.evaluation.get("settings"))
    base = settings.get("base") or evaluated.get("model")
    if settings.get("memory"):
        title = f"{run.memory} on {PurePath(str(base)).name}"
        shape = (
            f"window {settings.get('window')}, sinks {settings.get('sinks')}, rows of {settings.get('seq_len')} tokens"
        )
        return title, f"{shape}, {settings.get('steps')} steps · {run.folder}"
    return f"Evaluation of {base}" if base else f"Report of {run.folder.name}", str(run.folder)


def _facts(run: Run) -> list[str]:
    """The figures that answer the first questions."""
    rows = {str(row.get("name")): row for row in records(run.metrics.get("rows"))}
    own, teacher = rows.get(run.memory, {}), rows.get(TEACHER, {})
    count = number(record(run.metrics.get("parameters")).get("memory"))
    equal = number(rows.get(EQUAL, {}).get("kl_gap_closed"))
    facts = [
        (
            own.get("kl_gap_closed"),
            ".1%",
            "of the KL gap closed",
            "" if equal is None else f"; a window of as many bytes {equal:.0%}",
        ),
        (own.get("kl"), ".4f", "nats KL to the teacher", _beside(rows.get(WINDOW_ONLY, {}).get("kl"), "window-only")),
        (own.get("nll"), ".4f", "nats NLL", _beside(teacher.get("nll"), "teacher")),
        (own.get("state_bytes"), ",.0f", "bytes of state per layer", ""),
        (count, ",.0f", "parameters fitted", ""),
    ]
    shown = [
        f"<div><b>{number(value):{spec}}</b><span>{what}{beside}</span></div>"
        for value, spec, what, beside in facts
        if number(value) is not None
    ]
    return ['<div class="facts">', *shown, "</div>"] if shown else []


def _beside(value: object, whose: str) -> str:
    figure = number(value)
    return "" if figure is None else f"; {whose} {figure:.4f}"


def _missing(sentences: Iterable[str]) -> list[str]:
    lines = [f"<p>{_safe(sentence)}</p>" for sentence in sentences]
    return ['<div class="missing" role="note">', *lines, "</div>"] if lines else []


def _table(table: Table, memory: str) -> str:
    head = "".join(f'<th scope="col">{_safe(cell)}</th>' for cell in table.header)
    unique = len({row[0] for row in table.rows}) == len(table.rows)
    body = []
    for first, *rest in table.rows:
        cells = f'<th scope="row">{_safe(first)}</th>' + "".join(f"<td>{_safe(cell)}</td>" for cell in rest)
        body.append(f"<tr{' class=best' if first == memory and unique else ''}>{cells}</tr>")
    rows = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<h3>{_safe(table.title)}</h3><div class="wide" tabindex="0"><table>{rows}</table></div>'


def _figure(picture: Picture) -> str:
    note = f"<small>{_safe(picture.note)}</small>" if picture.note else ""
    drawn = picture.svg(page=True).replace("<svg", f'<svg role="img" aria-label="{_safe(picture.alt)}"', 1)
    return f"<figure><figcaption><b>{_safe(picture.title)}</b>{note}</figcaption>{drawn}</figure>"


def _made(run: Run) -> list[str]:
    """Command, recipe, data, parameters, versions, settings: what it takes to do it again."""
    command = run.metrics.get("command")
    lists = {
        "Data": record(run.metrics.get("tokens")),
        "Records": record(run.metrics.get("data")),
        "Parameters": record(run.metrics.get("parameters")),
        "Versions": record(run.metrics.get("versions")),
        "Settings of the evaluation": record(run.evaluation.get("settings")),
        "Versions of the evaluation": record(run.evaluation.get("versions")),
    }
    parts: list[str] = []
    listed = []
    if command:
        parts += ["<h3>Command</h3>", f"<pre>{_safe(command)}</pre>"]
    for title, values in lists.items():
        if values:
            items = "".join(f"<dt>{_safe(key)}</dt><dd>{_safe(_value(value))}</dd>" for key, value in values.items())
            listed.append(f"<div><h3>{title}</h3><dl>{items}</dl></div>")
    if listed:
        parts += ['<div class="lists">', *listed, "</div>"]
    if run.recipe:
        parts += ["<h3>Recipe</h3>", f"<pre>{_safe(run.recipe)}</pre>"]
    return ["<h2>How it was made</h2>", *parts] if parts else []


def _value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None else str(value)

"""Heat maps of an evaluation: what share was recalled or found, by length and by depth or number of bindings."""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure

from retrofit.report.collect import Row, names, number, records
from retrofit.report.style import PAPER, TEACHER, WIDTH, Picture, plain, styled, tokens

SECTION = "Recall and needles"
COLOURS = "cividis"  # even steps for colour-blind readers and on paper


def heat_pictures(evaluation: Row) -> Iterator[Picture]:
    """Keyed recall by bindings and length, then each needle task by depth and length."""
    rows = names(evaluation.get("rows"))
    recall = records(evaluation.get("recall"))
    yield from _picture("recall", "Keyed recall", recall, rows, ("bindings", "bindings", 1), "recalled")
    grid = records(evaluation.get("needle_grid"))
    for task in dict.fromkeys(str(entry.get("task")) for entry in grid):
        cells = [entry for entry in grid if str(entry.get("task")) == task]
        safe = "".join(c if c.isascii() and c.isalnum() else "-" for c in task)[:60]
        yield from _picture(f"needles-{safe}", f"Needles: {task}", cells, rows, ("depth", "depth, %", 100), "found")


def _picture(
    name: str, title: str, cells: list[Row], rows: Sequence[str], down: tuple[str, str, int], verb: str
) -> Iterator[Picture]:
    """A panel per row of the evaluation; nothing if no panel has a figure."""
    key, label, scale = down
    whole = [cell for cell in cells if number(cell.get("length")) is not None and number(cell.get(key)) is not None]
    lengths = sorted({float(cell["length"]) for cell in whole})
    depths = sorted({float(cell[key]) for cell in whole})
    panels: dict[str, list[list[float]]] = {}
    for row in rows:
        found = {(float(cell[key]), float(cell["length"])): number(cell.get(row)) for cell in whole}
        table = [[_percent(found.get((depth, length))) for length in lengths] for depth in depths]
        if any(value == value for line in table for value in line):  # NaN is unequal to itself
            panels[row] = table
    if not panels:
        return
    samples = sorted({int(number(cell.get("samples")) or 0) for cell in whole})
    note = f"{samples[0]}{f' to {samples[-1]}' if len(samples) > 1 else ''} samples per cell; k = 1,024 tokens."
    if TEACHER in panels and not _mean(panels[TEACHER]):
        note += " The teacher itself does none of it: where the base cannot, no memory can."
    means = {row: _mean(table) for row, table in panels.items()}
    alt = f"Heat maps of the share {verb} by length and {key}; means: " + "; ".join(
        f"{plain(row)} {mean:.0f} %" for row, mean in means.items()
    )
    yield Picture(name, SECTION, title, f"{alt}.", _draw(panels, lengths, depths, label, scale, verb), note)


def _draw(
    panels: dict[str, list[list[float]]],
    lengths: list[float],
    depths: list[float],
    label: str,
    scale: int,
    verb: str,
) -> Figure:
    across = max(1, min(3, len(panels), 12 // len(lengths)))
    down = -(-len(panels) // across)
    with styled({"axes.grid": False, "font.size": 8.5}):
        figure = Figure(figsize=(WIDTH, 0.7 + down * (0.62 + 0.27 * len(depths))), layout="constrained")
        grid: Any = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        image: Any = None
        for index, (axes, (row, table)) in enumerate(zip(grid.flat, panels.items(), strict=False)):
            image = axes.pcolormesh(table, cmap=COLOURS, vmin=0, vmax=100, edgecolors=PAPER, linewidth=0.6)
            for at, line in enumerate(table):
                for to, value in enumerate(line):
                    shown = "–" if value != value else f"{value:.0f}"
                    # on the dark half of the colours in white; an empty cell is the paper's colour
                    colour = {"color": "white" if value < 55 else "black"} if value == value else {}
                    axes.text(to + 0.5, at + 0.5, shown, ha="center", va="center", fontsize=8, **colour)
            axes.set_title(plain(row, 54 // across), fontsize=9)
            axes.set_xticks([at + 0.5 for at in range(len(lengths))], [tokens(length) for length in lengths])
            axes.set_yticks([at + 0.5 for at in range(len(depths))], [f"{depth * scale:g}" for depth in depths])
            axes.tick_params(length=0, labelbottom=index + across >= len(panels))
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        grid[0, 0].invert_yaxis()  # the beginning of the text on top; shared by all panels
        figure.supxlabel("length, tokens", fontsize=9)
        figure.supylabel(label, fontsize=9)
        figure.colorbar(image, ax=grid, label=f"{verb}, %", aspect=28, pad=0.02).outline.set_visible(False)
    return figure


def _percent(share: float | None) -> float:
    return float("nan") if share is None else 100 * share


def _mean(table: list[list[float]]) -> float:
    values = [value for line in table for value in line if value == value]
    return sum(values) / len(values)

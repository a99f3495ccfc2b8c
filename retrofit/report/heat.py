"""Heat maps of an evaluation: what share was recalled or found, by length and by depth or number of bindings."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from retrofit.report.collect import Row, number
from retrofit.report.drawing import TEACHER, WIDTH, Picture, plain, styled, tokens

NAN = float("nan")


def heat_map(
    name: str, title: str, cells: list[Row], rows: Sequence[str], down: tuple[str, str, int], verb: str
) -> Iterator[Picture]:
    """A panel per row of the evaluation; nothing if no panel has a figure.

    Args:
        cells: with ``length``, the key named in ``down``, and a share for each row.
        down: key, label and scale of the vertical axis.
    """
    key, label, scale = down
    whole = [cell for cell in cells if number(cell.get("length")) is not None and number(cell.get(key)) is not None]
    lengths = sorted({float(cell["length"]) for cell in whole})
    depths = sorted({float(cell[key]) for cell in whole})
    panels: dict[str, list[list[float]]] = {}
    for row in rows:
        shares = {(float(cell[key]), float(cell["length"])): number(cell.get(row)) for cell in whole}
        found = {place: 100 * share for place, share in shares.items() if share is not None}
        table = [[found.get((depth, length), NAN) for length in lengths] for depth in depths]
        if found:
            panels[row] = table
    if not panels:
        return
    samples = sorted({int(number(cell.get("samples")) or 0) for cell in whole})
    note = f"{samples[0]}{f' to {samples[-1]}' if len(samples) > 1 else ''} samples per cell; k = 1,024 tokens."
    means = {row: fmean(value for line in table for value in line if value == value) for row, table in panels.items()}
    if means.get(TEACHER) == 0:
        note += " The teacher itself does none of it: where the base cannot, no memory can."
    alt = f"Heat maps of the share {verb} by length and {key}; means: " + "; ".join(
        f"{plain(row)} {mean:.0f} %" for row, mean in means.items()
    )
    yield Picture(
        name, "Recall and needles", title, f"{alt}.", _draw(panels, lengths, depths, label, scale, verb), note
    )


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
            image = axes.pcolormesh(table, cmap="cividis", vmin=0, vmax=100, edgecolors="white", linewidth=0.6)
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

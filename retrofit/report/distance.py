"""The figure of something by distance past the window: buckets on the x axis, a line per row."""

from itertools import pairwise

from retrofit.report.style import Picture, Styles, canvas, legend, logarithmic, plain

SECTION = "By position"


def by_distance(
    name: str, title: str, unit: str, found: dict[str, dict[int, float]], styles: Styles, note: str
) -> Picture | None:
    """Lines of ``{row: {first token of a bucket: mean}}``; None if there is no figure at all.

    Buckets double in width, so they are drawn at equal distances: a log axis that can show zero.
    """
    found = {row: values for row, values in found.items() if values}
    edges = sorted({edge for values in found.values() for edge in values})
    if not edges:
        return None
    place = {edge: at for at, edge in enumerate(edges)}
    figure, axes = canvas()
    for row, values in found.items():
        points = sorted((place[edge], value) for edge, value in values.items())
        axes.plot(*zip(*points, strict=True), **styles.line(row), label=plain(row))
    labels = [f"{edge:,}–{after - 1:,}" for edge, after in pairwise(edges)] + [f"{edges[-1]:,}+"]
    turned = {"rotation": 30, "ha": "right"} if sum(map(len, labels)) > 46 else {}
    axes.set_xticks(range(len(edges)), labels, **turned)
    axes.set_xlim(-0.25, len(edges) - 0.75)
    axes.set(xlabel="tokens past the window", ylabel=unit)
    every = [value for row in found.values() for value in row.values()]
    if min(every) > 0 and max(every) / min(every) > 3:
        logarithmic(axes.yaxis, every)
    legend(axes)
    said = [
        f"{plain(row)} from {values[min(values)]:.3g} to {values[max(values)]:.3g}" for row, values in found.items()
    ]
    alt = f"{unit}, from the nearest to the farthest of {len(edges)} distances past the window: {'; '.join(said)}."
    return Picture(name, SECTION, title, alt, figure, note)

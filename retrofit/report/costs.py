"""Cost curves from a benchmark's rows: reading, decoding, memory and cache, each by length of the context."""

from collections.abc import Iterator

from retrofit.report.collect import Row, names, number
from retrofit.report.style import ALIASES, WINDOW_ONLY, Picture, Styles, at_lengths, canvas, legend, logarithmic, plain

SECTION = "Costs"
# key of the rows (quartiles under key_low and key_high): name of the figure, title, axis, divisor
CURVES = {
    "prefill_seconds": ("prefill", "Reading a prompt", "seconds", 1),
    "decode_tokens_per_second": ("decode", "Decoding", "tokens per second", 1),
    "cache_bytes": ("cache", "Cache of one sequence", "MiB", 2**20),
    "peak_mib": ("peak-memory", "Peak memory beyond the weights, reading", "MiB", 1),
}


def cost_pictures(rows: list[Row], styles: Styles) -> Iterator[Picture]:
    """A figure for each key of :data:`CURVES` that the rows have, over ``length`` (or ``context``)."""
    for key, (name, title, unit, divisor) in CURVES.items():
        curves = {row: _curve(rows, row, key, divisor) for row in names(rows)}
        curves = {row: points for row, points in curves.items() if points}
        if curves:
            yield _picture(name, title, unit, curves, styles)


def shown(name: str) -> str:
    """A benchmark's name as the figures have it: its `none` is the window alone."""
    return WINDOW_ONLY if ALIASES.get(name) == WINDOW_ONLY else plain(name)


Point = tuple[float, float, float, float]


def _curve(rows: list[Row], name: str, key: str, divisor: int) -> list[Point]:
    """``(length, median, low, high)``; without quartiles these are the median."""
    points = []
    for row in rows:
        length, middle = number(row.get("length", row.get("context"))), number(row.get(key))
        if str(row.get("name")) == name and length is not None and middle is not None and length > 0:
            low, high = (number(row.get(f"{key}{end}")) for end in ("_low", "_high"))
            found = (middle, middle if low is None else low, middle if high is None else high)
            points.append((length, *(value / divisor for value in found)))
    return sorted(points)  # type: ignore[arg-type]


def _picture(name: str, title: str, unit: str, curves: dict[str, list[Point]], styles: Styles) -> Picture:
    figure, axes = canvas()
    for row, points in curves.items():
        lengths, middle, low, high = zip(*points, strict=True)
        axes.plot(lengths, middle, **styles.line(row), label=shown(row))
        axes.fill_between(lengths, low, high, color=styles.line(row)["color"], alpha=0.18, linewidth=0)
    at_lengths(axes.xaxis, sorted({point[0] for points in curves.values() for point in points}))
    axes.set(xlabel="context, tokens", ylabel=unit)
    logarithmic(axes.yaxis, [value for points in curves.values() for point in points for value in point[1:]])
    legend(axes)
    said = [f"{shown(row)} {points[-1][1]:.3g} at {points[-1][0]:,.0f} tokens" for row, points in curves.items()]
    alt = f"{title}, {unit} by length of the context: {'; '.join(said)}."
    spread = any(low < high for points in curves.values() for *_, low, high in points)
    note = "Medians, quartiles shaded; k = 1,024 tokens." if spread else "k = 1,024 tokens."
    return Picture(name, SECTION, title, alt, figure, note)

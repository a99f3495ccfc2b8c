"""How all figures look: who has which colour and marker, charts of lines, axes that show their units; SVG and PNG."""

import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from patches.errors import RetrofitError
from retrofit.evaluation.settings import EQUAL, TEACHER, WINDOW_ONLY

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
except ImportError as error:
    raise RetrofitError("the figures need matplotlib: pip install 'retrofit-lm[report]'") from error

INK, ORANGE = "#1f2328", "#d55e00"
# Okabe and Ito's colours, which colour-blind readers tell apart; their yellow and sky blue are too pale for white paper
OTHERS = ("#0072b2", "#008060", "#b5518a", "#8a6d00", "#5b4bb5", "#2a7f9e")
MARKERS = "oDvP*X<>"
WIDTH, HEIGHT = 4.8, 3.1  # inches: drawn small, letters stay readable on a phone
LETTERS_ACROSS = 68  # of a legend
MOST = 400  # points of a line; more are averaged: nobody sees them, and the page stays small

STYLE: Any = {
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # names come from files: a dollar sign is a dollar sign
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#c9ced4",
    "grid.linewidth": 0.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "svg.fonttype": "path",  # looks the same whatever fonts the reader has
}


@dataclass(frozen=True)
class Picture:
    """A figure and what is said about it.

    Attributes:
        name: of its files.
        section: heading it stands under.
        title: what it shows.
        alt: the same for who cannot see it, with the figures that matter.
        note: what it was measured on; may be empty.
    """

    name: str
    section: str
    title: str
    alt: str
    figure: Figure
    note: str = ""

    def saved(self, kind: str) -> bytes:
        """The figure as ``"svg"``, or as ``"png"`` with twice as many pixels as a page shows."""
        target = io.BytesIO()
        how: dict[str, Any] = {"metadata": {"Date": None, "Creator": None}} if kind == "svg" else {"dpi": 192}
        self.figure.patch.set_gid("paper")  # the page takes its white away
        # ids in the SVG are hashed from this: no two figures of a page share one, and a second report is the same
        with styled({"svg.hashsalt": self.name}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a name in a script that the font lacks
            self.figure.savefig(target, format=kind, **how)
        self.figure.set_layout_engine("none")  # it is laid out: the next format need not do it again
        return target.getvalue()


@dataclass(frozen=True)
class Curve:
    """A line of a chart: its points ``(x, y)``, and how it is drawn."""

    label: str
    points: Sequence[tuple[float, float]]
    line: dict[str, Any]


class Styles:
    """The same line for the same name in all figures: the teacher in ink, the window alone in orange, memories after.

    Without colours they differ by marker and by the teacher's and the window's dashes.
    """

    def __init__(self, found: Iterable[str]) -> None:
        """``found``: all names there are, in the order in which memories get their colours."""
        own = [name for name in dict.fromkeys(found) if name not in (TEACHER, WINDOW_ONLY, EQUAL)]
        self._place = {name: place for place, name in enumerate(own)}

    def line(self, name: str) -> dict[str, Any]:
        """Keyword arguments of a plotted line."""
        if name in (WINDOW_ONLY, EQUAL):
            dashes = (0, (5, 2)) if name == WINDOW_ONLY else (0, (1, 1.5))
            return {"color": ORANGE, "marker": "s" if name == WINDOW_ONLY else "x", "linestyle": dashes, "zorder": 3}
        if name == TEACHER:
            return {"color": INK, "marker": "^", "linestyle": (0, (6, 2, 1, 2)), "zorder": 5, "linewidth": 1.4}
        place = self._place.get(name, 0)
        marker = MARKERS[place % len(MARKERS)]
        return {"color": OTHERS[place % len(OTHERS)], "marker": marker, "linestyle": "-", "zorder": 4}


def chart(
    name: str,
    section: str,
    title: str,
    curves: Sequence[Curve],
    *,
    x: str,
    y: str,
    note: str = "",
    logarithmic: bool = True,
    finish: Callable[[Any], object] = lambda axes: None,
) -> Picture:
    """Lines over labelled axes.

    Args:
        curves: at least one, each with a point.
        logarithmic: whether the y axis is, if all values are positive.
        finish: called with the axes before the legend is made.
    """
    with styled():
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.subplots()
        for curve in curves:
            xs, ys = zip(*curve.points, strict=True)
            axes.plot(xs, ys, **curve.line, label=curve.label)
        values = [value for curve in curves for _, value in curve.points]
        axes.set(xlabel=x, ylabel=y)
        if logarithmic and min(values) > 0:
            _plain_log(axes, values)
        finish(axes)
        longest = max(len(text) for text in axes.get_legend_handles_labels()[1])
        columns = max(1, LETTERS_ACROSS // (8 + longest))  # the sample of a line takes as much as eight letters
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2, handlelength=2.4)
    said = [f"{curve.label} from {curve.points[0][1]:.3g} to {curve.points[-1][1]:.3g}" for curve in curves]
    return Picture(name, section, title, f"{title}, {y}, by {x}: {'; '.join(said)}.", figure, note)


def styled(more: dict[str, Any] | None = None) -> Any:
    """A block in which matplotlib follows the settings above, and ``more``."""
    return matplotlib.rc_context(STYLE | (more or {}))


def plain(name: object, longest: int = 30) -> str:
    """A name for a label: printable, on one line, not too long."""
    text = "".join(c if c.isprintable() else "?" for c in str(name)) or "(no name)"
    text = f" {text}" if text.startswith("_") else text  # matplotlib's legends leave such names out
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def thinned(points: Sequence[tuple[float, float]]) -> tuple[list[tuple[float, float]], int]:
    """At most :data:`MOST` points, each the mean of as many neighbours as the second value says."""
    size = max(1, -(-len(points) // MOST))
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts], size


def _plain_log(axes: Any, values: Sequence[float]) -> None:
    """A log scale on the y axis with plain figures on it."""
    wide = max(values) / min(values)
    between = (1.0,) if wide > 1e3 else (1.0, 2.0, 5.0) if wide > 10 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, subs=between, numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())

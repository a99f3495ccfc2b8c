"""How all figures look: who has which colour, the two themes, axes that show their units; SVG and PNG."""

import io
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from patches.errors import RetrofitError

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
except ImportError as error:
    raise RetrofitError("the figures need matplotlib: pip install 'retrofit-lm[report]'") from error

TEACHER, WINDOW_ONLY, EQUAL = "teacher", "window-only", "window-only, equal memory"
# what benchmarks call the same two
ALIASES = {"full attention": TEACHER, "none": WINDOW_ONLY}

INK, GRID, PAPER = "#1f2328", "#c9ced4", "#fefefe"
BLUE, ORANGE = "#0072b2", "#d55e00"
# Okabe and Ito's colours, which colour-blind readers tell apart; their yellow and sky blue are too pale for white paper
OTHERS = (BLUE, "#008060", "#b5518a", "#8a6d00", "#5b4bb5", "#2a7f9e")
# the page replaces each by a variable, so that a dark page has a lighter one
DARK = {
    INK: "#e8eaed",
    GRID: "#454b52",
    PAPER: "#15181c",
    BLUE: "#5cb8f2",
    ORANGE: "#ff8f45",
    **dict(zip(OTHERS[1:], ("#35cfa0", "#ee9acb", "#e3c04b", "#b3a6ff", "#7fd3ee"), strict=True)),
}
MARKERS = "oDvP*X<>"
WIDTH = 4.8  # inches: drawn small, letters stay readable on a phone
LETTERS = 9.0  # points
LETTERS_ACROSS = 68  # of a legend

RC: Any = {
    "font.size": LETTERS,
    "text.color": INK,
    "text.parse_math": False,  # names come from files: a dollar sign is a dollar sign
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
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

    def svg(self, page: bool = False) -> str:
        """The figure alone, on white; for the page on nothing, its colours variables of the page's theme."""
        head, root, rest = self._drawn.partition("<svg")
        if not page:
            tag, _, content = rest.partition(">")
            return f'{head}{root}{tag}><rect width="100%" height="100%" fill="#ffffff"/>{content}'
        text = root + rest
        for colour in DARK:
            text = text.replace(colour, f"var({variable(colour)})")
        return text

    def png(self) -> bytes:
        """The figure on white, twice as many pixels as a page shows."""
        return self._saved("png", facecolor="white", dpi=192)

    @cached_property
    def _drawn(self) -> str:
        return self._saved("svg", transparent=True, metadata={"Date": None, "Creator": None}).decode()

    def _saved(self, kind: str, **how: Any) -> bytes:
        target = io.BytesIO()
        # ids in the SVG are hashed from this: no two figures of a page share one, and a second report is the same
        with styled({"svg.hashsalt": self.name}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a name in a script that the font lacks
            self.figure.savefig(target, format=kind, **how)
        self.figure.set_layout_engine("none")  # it is laid out: the next format need not do it again
        return target.getvalue()


def styled(more: dict[str, Any] | None = None) -> Any:
    """A block in which matplotlib follows the settings above, and ``more``."""
    return matplotlib.rc_context(RC | (more or {}))


def variable(colour: str) -> str:
    """The page's name for a colour."""
    return f"--c{colour[1:]}"


def plain(name: object, longest: int = 30) -> str:
    """A name for a label: printable, on one line, not too long."""
    text = "".join(c if c.isprintable() else "?" for c in str(name)) or "(no name)"
    text = f" {text}" if text.startswith("_") else text  # matplotlib's legends leave such names out
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


class Styles:
    """The same line for the same name in all figures: the teacher in ink, the window alone in orange, memories after.

    Without colours they differ by marker and by the teacher's and the window's dashes.
    """

    def __init__(self, found: Iterable[str]) -> None:
        """``found``: all names there are, in the order in which memories get their colours."""
        own = [name for name in dict.fromkeys(found) if ALIASES.get(name, name) not in (TEACHER, WINDOW_ONLY, EQUAL)]
        self._place = {name: place for place, name in enumerate(own)}

    def line(self, name: str) -> dict[str, Any]:
        """Keyword arguments of a plotted line."""
        name = ALIASES.get(name, name)
        if name in (WINDOW_ONLY, EQUAL):
            dashes = (0, (5, 2)) if name == WINDOW_ONLY else (0, (1, 1.5))
            return {"color": ORANGE, "marker": "s" if name == WINDOW_ONLY else "x", "linestyle": dashes, "zorder": 3}
        if name == TEACHER:
            return {"color": INK, "marker": "^", "linestyle": (0, (6, 2, 1, 2)), "zorder": 5, "linewidth": 1.4}
        place = self._place.get(name, 0)
        marker = MARKERS[place % len(MARKERS)]
        return {"color": OTHERS[place % len(OTHERS)], "marker": marker, "linestyle": "-", "zorder": 4}


def canvas(height: float = 3.1, **how: Any) -> Any:
    """A figure and its axes, in the style above."""
    with styled():
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.subplots(**how)


def legend(axes: Any) -> None:
    """Above the axes, where it covers nothing, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        with styled():
            axes.legend(
                handles,
                labels,
                loc="lower left",
                bbox_to_anchor=(-0.02, 1.0),
                ncols=next(
                    columns for columns in (4, 3, 2, 1) if columns == 1 or _width(labels, columns) < LETTERS_ACROSS
                ),
                borderaxespad=0.2,
                handlelength=2.4,
                columnspacing=1.2,
            )


def _width(labels: Sequence[str], columns: int) -> int:
    """Letters of a legend's line; it is filled column by column, and the sample of a line takes as much as eight."""
    rows, more = divmod(len(labels), columns)
    starts = [at * rows + min(at, more) for at in range(columns + 1)]
    return sum(8 + max(map(len, labels[start:stop]), default=0) for start, stop in pairwise(starts))


def logarithmic(axis: Any, values: Sequence[float]) -> None:
    """A log scale with plain figures on it, if all ``values`` are positive."""
    if not values or min(values) <= 0:
        return
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    wide = max(values) / min(values)
    between = (1.0,) if wide > 1e3 else (1.0, 2.0, 5.0) if wide > 10 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axis.set_major_locator(LogLocator(10, subs=between, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def at_lengths(axis: Any, lengths: Sequence[float]) -> None:
    """The x axis as a log scale in tokens, with ticks at ``lengths`` (all positive), or at as many as fit."""
    axis.axes.set_xscale("log", base=2)
    step = -(-len(lengths) // 7)
    axis.set_ticks(list(lengths)[::step], [tokens(length) for length in lengths][::step])
    axis.set_minor_locator(NullLocator())


def tokens(count: float) -> str:
    """8192 as 8k (k = 1,024), 1000 as 1,000."""
    return f"{count / 1024:,.0f}k" if count >= 1024 and count % 1024 == 0 else f"{count:,.0f}"

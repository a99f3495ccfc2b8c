"""Draws quality against bytes from quality.json, as quality-light.svg and quality-dark.svg: run it after a change.

Named a run of ``make real``, it takes the figures from there first: ``python docs/pictures/quality.py runs/real``.
"""

import json
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

HERE = Path(__file__).parent
FULL = 1024 * 2 * 3 * 64 * 2 / 1024  # KiB of the full cache of 1,024 tokens in one layer of SmolLM2-135M, in bfloat16
THEMES = {  # ink, grid, paper; then the series
    "light": ("#1f2328", "#d0d7de", "#ffffff", ("#d55e00", "#a66a00", "#0072b2", "#008060", "#b5518a")),
    "dark": ("#e8eaed", "#454b52", "#15181c", ("#ff8f45", "#d9a441", "#5cb8f2", "#35cfa0", "#ee9acb")),
}
# what the names in a run's table begin with
SERIES = {
    "sinks + window": "window, ",
    "window in few bits": "window in few bits, ",
    "chosen tokens (expected)": "expected, ",
}


def take(run: Path) -> dict:
    """The figures of a run: KiB of cache in one layer, and KL to full attention."""
    lines = json.loads((run / "table-means.json").read_text())
    return {
        "x": "KiB of cache in one layer (sinks, window and kept tokens, bfloat16)",
        "y": "KL to full attention, nats per token",
        "series": {
            name: [[line["bytes"] / 1024, line["nats"]] for line in lines if line["name"].startswith(begin)]
            for name, begin in SERIES.items()
        },
    }


def draw(figures: dict, theme: str) -> Figure:
    """One figure: a line with markers and its name for each series."""
    ink, grid, paper, colours = THEMES[theme]
    look = {"font.size": 9, "text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink}
    with rc_context(look | {"axes.edgecolor": grid, "axes.facecolor": paper}):
        figure = Figure(figsize=(7.2, 3.1), layout="constrained", facecolor=paper)
        axes = figure.subplots()
        axes.set(yscale="log", xlabel=figures["x"], ylabel=figures["y"])
        for at, (name, points) in enumerate(figures["series"].items()):
            style = "s--" if "window" in name else "o-"
            axes.plot(*zip(*points, strict=True), style, color=colours[at], markersize=6, linewidth=1.6)
            weight = "normal" if "window" in name else "bold"
            axes.annotate(
                name, points[-1], xytext=(8, -3), textcoords="offset points", color=colours[at], weight=weight
            )
        axes.set(xlim=(40, 195), xticks=[50, 75, 100, 125, 150], yticks=[0.001, 0.003, 0.01, 0.03, 0.1, 0.3])
        parts = axes.secondary_xaxis("top", functions=(lambda size: 100 * size / FULL, lambda part: part * FULL / 100))
        parts.set(xticks=[5, 10, 15, 20], xlabel="percent of the full cache of 1,024 tokens")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        axes.grid(color=grid, linewidth=0.5)
        axes.spines[["right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    if len(sys.argv) > 1:
        (HERE / "quality.json").write_text(json.dumps(take(Path(sys.argv[1])), indent=2) + "\n")
    for name in THEMES:
        with rc_context({"svg.hashsalt": "quality"}):  # the same figures give the same file
            figure = draw(json.loads((HERE / "quality.json").read_text()), name)
            figure.savefig(HERE / f"quality-{name}.svg", metadata={"Date": None, "Creator": None})

"""Draws quality against bytes from quality.json, as quality-light.svg and quality-dark.svg: run it after a change."""

import json
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

HERE = Path(__file__).parent
THEMES = {  # ink, grid, paper, window-only, memories
    "light": ("#1f2328", "#d0d7de", "#ffffff", "#d55e00", ("#008060", "#0072b2", "#b5518a")),
    "dark": ("#e8eaed", "#454b52", "#15181c", "#ff8f45", ("#35cfa0", "#5cb8f2", "#ee9acb")),
}


def draw(figures: dict, theme: str) -> Figure:
    """One figure: a line for window-only, a marker with its name for each memory, the full cache as an edge."""
    ink, grid, paper, orange, colours = THEMES[theme]
    look = {"font.size": 9, "text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink}
    with rc_context(look | {"axes.edgecolor": grid, "axes.facecolor": paper}):
        figure = Figure(figsize=(7.2, 3.1), layout="constrained", facecolor=paper)
        axes = figure.subplots()
        axes.set(xscale="log", yscale="log", xlabel=figures["x"], ylabel=figures["y"])
        axes.plot(*zip(*figures["window-only"], strict=True), "s--", color=orange, markersize=4, linewidth=1.6)
        x, y = figures["window-only"][-2]
        axes.annotate("sinks + window only", (x, y), xytext=(8, 2), textcoords="offset points", color=orange)
        for (name, (x, y)), colour in zip(figures["memories"].items(), colours, strict=True):
            axes.plot(x, y, "o", color=colour, markersize=8)
            axes.annotate(name, (x, y), xytext=(9, -3), textcoords="offset points", color=colour, weight="bold")
        axes.axvline(figures["full"], color=ink, linewidth=1, linestyle=":")
        axes.annotate(
            "full cache",
            (figures["full"], 0.96),
            xytext=(-5, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right",
            va="top",
        )
        axes.set(xticks=[16, 32, 64, 128, 256], yticks=[0.003, 0.01, 0.03, 0.1])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        axes.grid(color=grid, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    for name in THEMES:
        with rc_context({"svg.hashsalt": "quality"}):  # the same figures give the same file
            figure = draw(json.loads((HERE / "quality.json").read_text()), name)
            figure.savefig(HERE / f"quality-{name}.svg", metadata={"Date": None, "Creator": None})

"""Draws serving.json, the rows of benchmarks/serving.py, as serving-light.svg and serving-dark.svg."""

import json

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from quality import HERE, THEMES

NAMES = {"SmolLM2-135M": "full attention", "ahn-gdn": "retrofit"}
PANELS = {"room_for": "sequences in 400 MiB", "per_minute": "requests per minute of one core"}


def draw(rows: list[dict], theme: str) -> Figure:
    """A panel for each figure, a line for each model over the length of a request."""
    ink, grid, paper, colours = THEMES[theme]
    look = {"font.size": 9, "text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink}
    with rc_context(look | {"axes.edgecolor": grid, "axes.facecolor": paper}):
        figure = Figure(figsize=(7.2, 2.7), layout="constrained", facecolor=paper)
        for axes, (key, label) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
            axes.set(xscale="log", yscale="log", xlabel="tokens of prompt and answer", title=label)
            for (model, name), colour in zip(NAMES.items(), (colours[0], colours[2]), strict=True):
                points = [(row["length"], row[key]) for row in rows if row["model"] == model]
                axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=5, linewidth=1.6, label=name)
            lengths, ticks = [length for length, _ in points], [1, 2, 4, 8, 16]
            axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axes.set_yticks(ticks, [str(tick) for tick in ticks])
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_formatter(NullFormatter())
            axes.minorticks_off()
            axes.grid(color=grid, linewidth=0.5)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, labelcolor=ink)
    return figure


if __name__ == "__main__":
    for name in THEMES:
        with rc_context({"svg.hashsalt": "serving"}):  # the same figures give the same file
            figure = draw(json.loads((HERE / "serving.json").read_text()), name)
            figure.savefig(HERE / f"serving-{name}.svg", metadata={"Date": None, "Creator": None})

"""The figures of a run: training, and KL by distance past the window."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

from retrofit.report.collect import Row, Run, number
from retrofit.report.drawing import EQUAL, TEACHER, WINDOW_ONLY, Curve, Picture, Styles, chart, plain, thinned

KL = "KL to the teacher, nats per token"
STEPS = "optimizer steps"
BEYOND = re.compile(r"eval_kl_(window_only_)?beyond_(\d{1,12})")


def pictures(run: Run) -> list[Picture]:
    """All that there are figures for, section by section; ``run.missing`` gets a sentence for each that fails."""
    names = [str(row.get("name")) for row in run.evaluation["rows"]]
    # the run's own memory first: it has the first colour, whatever else is beside it
    styles = Styles([*([run.memory] if run.log or run.metrics["rows"] else []), *names])
    makers: tuple[Callable[[Run, Styles], Iterator[Picture]], ...] = (_training, _evaluated)
    made: list[Picture] = []
    for make in makers:
        try:
            made.extend(make(run, styles))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            run.missing.append(f"Some figures are missing: a file holds something unexpected ({error!r}).")
    return made


def _training(run: Run, styles: Styles) -> Iterator[Picture]:
    line, memory = styles.line(run.memory), plain(run.memory)
    trained, size = thinned(_series(run.log, "loss"))
    pale = {"color": line["color"], "alpha": 0.45, "linewidth": 1, "zorder": 1}
    averaged = f", means of {size} steps" if size > 1 else ""
    curves = [
        Curve(f"{memory}, training{averaged}", trained, pale),
        Curve(f"{memory}, held out", _series(run.log, "eval_kl"), line),
        Curve("window-only, held out", _series(run.log, "eval_kl_window_only"), styles.line(WINDOW_ONLY)),
    ]
    recipe = run.metrics["recipe"]
    pure = recipe.get("loss", "kl") == "kl" and not number(recipe.get("mse_weight"))
    if curves := [curve for curve in curves if curve.points]:
        unit = KL if pure else "training loss; held-out KL, nats"
        yield chart("loss", "Training", "Loss", curves, x=STEPS, y=unit)

    if closed := [(step, 100 * share) for step, share in _series(run.log, "eval_kl_gap_closed")]:
        yield _gap(run, closed, styles)

    last: Row = next((entry for entry in reversed(run.log) if any(BEYOND.fullmatch(key) for key in entry)), {})
    found: dict[str, dict[int, float]] = {WINDOW_ONLY: {}, run.memory: {}}
    for key, value in last.items():
        match, kl = BEYOND.fullmatch(key), number(value)
        if match and kl is not None:
            found[WINDOW_ONLY if match[1] else run.memory][int(match[2])] = kl
    step = number(last.get("step"))
    note = f"Held-out rows{'' if step is None else f', after {step:,.0f} steps'}."
    yield from _by_distance("kl-by-position", "KL by distance past the window", found, styles, note)


def _gap(run: Run, closed: list[tuple[float, float]], styles: Styles) -> Picture:
    levels = [(100.0, TEACHER, TEACHER), (0.0, WINDOW_ONLY, WINDOW_ONLY)]
    equal: Row = next((row for row in run.metrics["rows"] if row.get("name") == EQUAL), {})
    share = number(equal.get("kl_gap_closed"))
    if share is not None:
        levels.insert(1, (100 * share, EQUAL, f"window-only of as many bytes, {100 * share:.0f} %"))
    low = min(0.0, *(value for _, value in closed))

    def finish(axes: Any) -> None:
        for level, name, label in levels:
            axes.axhline(level, **{**styles.line(name), "marker": "", "linewidth": 1.3}, label=label)
        axes.set_ylim(max(low, -100) - 5, 105)

    note = "Held-out rows; below -100 % is cut off." if low < -100 else "Held-out rows."
    curves = [Curve(plain(run.memory), closed, styles.line(run.memory))]
    how: dict[str, Any] = {"x": STEPS, "y": "gap closed, %", "note": note, "logarithmic": False, "finish": finish}
    return chart("gap-closed", "Training", "KL gap closed", curves, **how)


def _evaluated(run: Run, styles: Styles) -> Iterator[Picture]:
    """KL by distance on the text of an evaluation."""
    buckets = [entry for entry in run.evaluation["text"] if number(entry.get("beyond")) is not None]
    positions = sum(int(entry["positions"]) for entry in buckets)
    note = f"The evaluation's text, {positions:,} positions past the window."
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for entry in buckets:
        for name, value in entry["kl"].items():
            if name != TEACHER and (mean := number(value)) is not None:
                found[name][int(entry["beyond"])] = mean
    title = "KL by distance past the window, evaluation"
    yield from _by_distance("text-kl-by-position", title, found, styles, note)


def _by_distance(
    name: str, title: str, found: dict[str, dict[int, float]], styles: Styles, note: str
) -> Iterator[Picture]:
    """Lines of ``{row: {first token of a bucket: mean}}``, if there is a figure at all.

    Buckets double in width, so they are drawn at equal distances: a log axis that can show zero.
    """
    found = {row: values for row, values in found.items() if values}
    edges = sorted({edge for values in found.values() for edge in values})
    if not edges:
        return
    labels = [f"{edge:,}–{after - 1:,}" for edge, after in pairwise(edges)] + [f"{edges[-1]:,}+"]

    def finish(axes: Any) -> None:
        turned = {"rotation": 30, "ha": "right"} if sum(map(len, labels)) > 46 else {}
        axes.set_xticks(range(len(edges)), labels, **turned)
        axes.set_xlim(-0.25, len(edges) - 0.75)

    curves = [
        Curve(plain(row), sorted((edges.index(edge), value) for edge, value in values.items()), styles.line(row))
        for row, values in found.items()
    ]
    every = [value for values in found.values() for value in values.values()]
    wide = min(every) > 0 and max(every) / min(every) > 3
    how: dict[str, Any] = {"x": "tokens past the window", "y": KL, "note": note, "logarithmic": wide}
    yield chart(name, "By position", title, curves, **how, finish=finish)


def _series(log: Iterable[Row], key: str) -> list[tuple[float, float]]:
    """``(step, value)`` of every entry that has both."""
    pairs = [(number(entry.get("step")), number(entry.get(key))) for entry in log]
    return [(step, value) for step, value in pairs if step is not None and value is not None]

"""Figures of a run's log: loss, held-out KL, share of the gap closed, learning rate, and KL by distance at the end."""

import re
from collections.abc import Iterator

from retrofit.report.collect import Row, Run, number, record, records
from retrofit.report.distance import by_distance
from retrofit.report.style import EQUAL, INK, TEACHER, WINDOW_ONLY, Picture, Styles, canvas, legend, logarithmic, plain

SECTION = "Training"
MOST = 400  # points of a line; more are averaged: nobody sees them, and the page stays small
KL = "KL to the teacher, nats per token"
BEYOND = re.compile(r"eval_kl_(window_only_)?beyond_(\d{1,12})")

Points = list[tuple[float, float]]


def training_pictures(run: Run, styles: Styles) -> Iterator[Picture]:
    """Those that the log has the figures for."""
    for make in (_loss, _gap, _rate, _distance):
        picture = make(run, styles)
        if picture is not None:
            yield picture


def series(log: list[Row], key: str) -> Points:
    """``(step, value)`` of every entry that has both."""
    pairs = [(number(entry.get("step")), number(entry.get(key))) for entry in log]
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def thinned(points: Points) -> tuple[Points, int]:
    """At most :data:`MOST` points, each the mean of as many neighbours as the second value says."""
    size = max(1, -(-len(points) // MOST))
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [tuple(sum(one) / len(part) for one in zip(*part, strict=True)) for part in parts], size


def _loss(run: Run, styles: Styles) -> Picture | None:
    trained, size = thinned(series(run.log, "loss"))
    held, bare = series(run.log, "eval_kl"), series(run.log, "eval_kl_window_only")
    if not trained and not held:
        return None
    pure = run.settings.get("loss", "kl") == "kl" and not number(run.settings.get("mse_weight"))
    line, memory = styles.line(run.memory), plain(run.memory)
    figure, axes = canvas()
    averaged = f", means of {size} steps" if size > 1 else ""
    if trained:
        label = f"{memory}, training{averaged}"
        axes.plot(*zip(*trained, strict=True), color=line["color"], alpha=0.45, linewidth=1, label=label, zorder=1)
    if held:
        axes.plot(*zip(*held, strict=True), **line, label=f"{memory}, held out")
    if bare:
        axes.plot(*zip(*bare, strict=True), **styles.line(WINDOW_ONLY), label="window-only, held out")
    axes.set(xlabel="optimizer steps", ylabel=KL if pure else "training loss; held-out KL, nats")
    logarithmic(axes.yaxis, [value for _, value in trained + held + bare])
    legend(axes)
    said = (
        _from_to("training loss", trained) + _from_to("held-out KL", held) + _from_to("window-only held-out KL", bare)
    )
    return Picture("loss", SECTION, "Loss", f"Lines over optimizer steps: {'; '.join(said)}.", figure)


def _gap(run: Run, styles: Styles) -> Picture | None:
    closed = [(step, 100 * share) for step, share in series(run.log, "eval_kl_gap_closed")]
    if not closed:
        return None
    figure, axes = canvas()
    axes.plot(*zip(*closed, strict=True), **styles.line(run.memory), label=plain(run.memory))
    levels = [(100.0, TEACHER, TEACHER), (0.0, WINDOW_ONLY, WINDOW_ONLY)]
    equal = next((row for row in records(run.metrics.get("rows")) if row.get("name") == EQUAL), {})
    share = number(equal.get("kl_gap_closed"))
    if share is not None:
        levels.insert(1, (100 * share, EQUAL, f"window-only of as many bytes, {100 * share:.0f} %"))
    for level, name, label in levels:
        axes.axhline(level, **{**styles.line(name), "marker": "", "linewidth": 1.3}, label=label)
    axes.set(xlabel="optimizer steps", ylabel="gap closed, %")
    low = min(0.0, *(value for _, value in closed))
    axes.set_ylim(max(low, -100) - 5, 105)
    legend(axes)
    alt = f"Share of the KL between window-only (0 %) and teacher (100 %): {_from_to('held out', closed, ' %')[0]}."
    note = "Held-out rows; below -100 % is cut off." if low < -100 else "Held-out rows."
    return Picture("gap-closed", SECTION, "KL gap closed", alt, figure, note)


def _rate(run: Run, styles: Styles) -> Picture | None:
    rates, _ = thinned(series(run.log, "learning_rate"))
    if not rates:
        return None
    figure, axes = canvas(2.5)
    axes.plot(*zip(*rates, strict=True), color=INK)
    axes.set(xlabel="optimizer steps", ylabel="learning rate")
    axes.set_ylim(bottom=0)
    top = max(rates, key=lambda point: point[1])
    alt = f"Learning rate over optimizer steps: {top[1]:.3g} at most, at step {top[0]:.0f}; {rates[-1][1]:.3g} at last."
    return Picture("learning-rate", SECTION, "Learning rate", alt, figure)


def _distance(run: Run, styles: Styles) -> Picture | None:
    """The last evaluation's KL by distance."""
    last: Row = next((entry for entry in reversed(run.log) if any(BEYOND.fullmatch(key) for key in entry)), {})
    found: dict[str, dict[int, float]] = {WINDOW_ONLY: {}, run.memory: {}}
    for key, value in last.items():
        match, kl = BEYOND.fullmatch(key), number(value)
        if match and kl is not None:
            found[WINDOW_ONLY if match[1] else run.memory][int(match[2])] = kl
    step = number(last.get("step"))
    note = f"Held-out rows{'' if step is None else f', after {step:,.0f} steps'}."
    return by_distance("kl-by-position", "KL by distance past the window", KL, found, styles, note)


def evaluation_distances(evaluation: Row, styles: Styles) -> Iterator[Picture]:
    """KL, and NLL beside the teacher's, by distance on the text of an evaluation."""
    buckets = [entry for entry in records(evaluation.get("text")) if number(entry.get("beyond")) is not None]
    positions = sum(int(number(entry.get("positions")) or 0) for entry in buckets)
    note = f"The evaluation's text, {positions:,} positions past the window."
    kl: dict[str, dict[int, float]] = {}
    nll: dict[str, dict[int, float]] = {}
    for entry in buckets:
        edge = int(entry["beyond"])
        teacher = number(record(entry.get("nll")).get(TEACHER))
        for name, value in record(entry.get("kl")).items():
            if name != TEACHER and (mean := number(value)) is not None:
                kl.setdefault(name, {})[edge] = mean
        for name, value in record(entry.get("nll")).items():
            if teacher is not None and (mean := number(value)) is not None:
                nll.setdefault(name, {})[edge] = mean - teacher
    for name, title, unit, found in (
        ("text-kl-by-position", "KL by distance past the window, evaluation", KL, kl),
        ("text-nll-by-position", "NLL by distance past the window, evaluation", "NLL above the teacher's, nats", nll),
    ):
        picture = by_distance(name, title, unit, found, styles, note)
        if picture is not None:
            yield picture


def _from_to(what: str, points: Points, unit: str = "") -> list[str]:
    """``["held-out KL from 0.09 to 0.02"]``, or nothing."""
    return [f"{what} from {points[0][1]:.3g}{unit} to {points[-1][1]:.3g}{unit}"] if points else []

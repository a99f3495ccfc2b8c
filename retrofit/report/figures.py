"""The figures of a run: training, KL by distance past the window, recall and needles, costs."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from retrofit.report.collect import Row, Run, number
from retrofit.report.drawing import (
    ALIASES,
    EQUAL,
    TEACHER,
    WINDOW_ONLY,
    Curve,
    Picture,
    Styles,
    at_lengths,
    chart,
    plain,
    thinned,
)
from retrofit.report.heat import heat_map

KL = "KL to the teacher, nats per token"
STEPS = "optimizer steps"
BEYOND = re.compile(r"eval_kl_(window_only_)?beyond_(\d{1,12})")
LAYER = re.compile(r"eval_layer_error_(\d{1,6})")
# key of a benchmark's rows (quartiles under key_low and key_high): name of the figure, title, axis, divisor
COSTS = {
    "prefill_seconds": ("prefill", "Reading a prompt", "seconds", 1),
    "decode_tokens_per_second": ("decode", "Decoding", "tokens per second", 1),
    "cache_bytes": ("cache", "Cache of one sequence", "MiB", 2**20),
    "peak_mib": ("peak-memory", "Peak memory beyond the weights, reading", "MiB", 1),
}


def pictures(run: Run) -> list[Picture]:
    """All that there are figures for, section by section; ``run.missing`` gets a sentence for each that fails."""
    names = [str(row.get("name")) for row in (*run.evaluation["rows"], *run.bench)]
    # the run's own memory first: it has the first colour, whatever else is beside it
    styles = Styles([*([run.memory] if run.log or run.metrics["rows"] else []), *names])
    makers: tuple[Callable[[Run, Styles], Iterator[Picture]], ...] = (_training, _evaluated, _probes, _costs)
    made: list[Picture] = []
    for make in makers:
        try:
            made.extend(make(run, styles))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            run.missing.append(f"Some figures are missing: a file holds something unexpected ({error!r}).")
    return made


def shown(name: str) -> str:
    """A benchmark's name as the figures have it: its `none` is the window alone."""
    return WINDOW_ONLY if ALIASES.get(name) == WINDOW_ONLY else plain(name)


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

    yield from _layers(run, styles)

    last: Row = next((entry for entry in reversed(run.log) if any(BEYOND.fullmatch(key) for key in entry)), {})
    found: dict[str, dict[int, float]] = {WINDOW_ONLY: {}, run.memory: {}}
    for key, value in last.items():
        match, kl = BEYOND.fullmatch(key), number(value)
        if match and kl is not None:
            found[WINDOW_ONLY if match[1] else run.memory][int(match[2])] = kl
    step = number(last.get("step"))
    note = f"Held-out rows{'' if step is None else f', after {step:,.0f} steps'}."
    yield from _by_distance("kl-by-position", "KL by distance past the window", KL, found, styles, note)


def _layers(run: Run, styles: Styles) -> Iterator[Picture]:
    """Each layer's error on the held-out rows, after the local steps and at the end."""
    found = []
    for entry in run.log:
        matches = [(LAYER.fullmatch(key), number(value)) for key, value in entry.items()]
        errors = sorted((float(match[1]), value) for match, value in matches if match and value is not None)
        if errors and (step := number(entry.get("step"))) is not None:
            found.append((step, errors))
    local = number(run.metrics["recipe"].get("local_steps"))
    after = [(f"after {step:,.0f} steps", errors) for step, errors in found if step in (local, found[-1][0])]
    if not after:
        return
    line = styles.line(run.memory)
    looks = [{**line, "alpha": 0.45}, line][-len(after) :]
    curves = [Curve(name, errors, look) for (name, errors), look in zip(after, looks, strict=True)]
    how: dict[str, Any] = {"x": "layer", "y": "squared error, share of the window's", "logarithmic": False}
    note = "Held-out rows; what each layer makes of full attention's own input."
    yield chart("layers", "Training", "Error of each layer", curves, **how, note=note)


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
    """KL, and NLL beside the teacher's, by distance on the text of an evaluation."""
    buckets = [entry for entry in run.evaluation["text"] if number(entry.get("beyond")) is not None]
    positions = sum(int(entry["positions"]) for entry in buckets)
    note = f"The evaluation's text, {positions:,} positions past the window."
    kl: dict[str, dict[int, float]] = defaultdict(dict)
    nll: dict[str, dict[int, float]] = defaultdict(dict)
    for entry in buckets:
        edge, teacher = int(entry["beyond"]), number(entry["nll"].get(TEACHER))
        for name, value in entry["kl"].items():
            if name != TEACHER and (mean := number(value)) is not None:
                kl[name][edge] = mean
        for name, value in entry["nll"].items():
            if teacher is not None and (mean := number(value)) is not None:
                nll[name][edge] = mean - teacher
    title, above = "by distance past the window, evaluation", "NLL above the teacher's, nats"
    yield from _by_distance("text-kl-by-position", f"KL {title}", KL, kl, styles, note)
    yield from _by_distance("text-nll-by-position", f"NLL {title}", above, nll, styles, note)


def _by_distance(
    name: str, title: str, unit: str, found: dict[str, dict[int, float]], styles: Styles, note: str
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
    how: dict[str, Any] = {"x": "tokens past the window", "y": unit, "note": note, "logarithmic": wide}
    yield chart(name, "By position", title, curves, **how, finish=finish)


def _probes(run: Run, styles: Styles) -> Iterator[Picture]:
    """Keyed recall by bindings and length, pass keys by depth and length."""
    found = run.evaluation
    rows = [str(row.get("name")) for row in found["rows"]]
    yield from heat_map("recall", "Keyed recall", found["recall"], rows, ("bindings", "bindings", 1), "recalled")
    yield from heat_map("passkey", "Pass key", found["passkey"], rows, ("depth", "depth, %", 100), "found")


def _costs(run: Run, styles: Styles) -> Iterator[Picture]:
    """A figure for each key of :data:`COSTS` that the rows have, by length of the context."""
    for key, (name, title, unit, divisor) in COSTS.items():
        curves = []
        for row in dict.fromkeys(row["name"] for row in run.bench):
            found = sorted(_quartiles(entry, key, divisor) for entry in run.bench if entry["name"] == row)
            found = [point for point in found if point]
            if found:
                points, band = [(x, y) for x, y, *_ in found], [(low, high) for *_, low, high in found]
                curves.append(Curve(shown(row), points, styles.line(row), band))
        if curves:
            lengths = sorted({length for curve in curves for length, _ in curve.points})
            spread = any(low < high for curve in curves for low, high in curve.band)
            note = "Medians, quartiles shaded; k = 1,024 tokens." if spread else "k = 1,024 tokens."
            how: dict[str, Any] = {"x": "context, tokens", "y": unit, "note": note}
            yield chart(name, "Costs", title, curves, **how, finish=partial(at_lengths, lengths=lengths))


def _quartiles(entry: Row, key: str, divisor: int) -> tuple[float, ...]:
    """``(length, median, low, high)``, without quartiles the median for them; empty if there is no figure."""
    length, middle = number(entry["length"]), number(entry.get(key))
    if middle is None or length is None or length <= 0:
        return ()
    low, high = (number(entry.get(f"{key}{end}")) for end in ("_low", "_high"))
    found = (middle, middle if low is None else low, middle if high is None else high)
    return (length, *(value / divisor for value in found))


def _series(log: Iterable[Row], key: str) -> list[tuple[float, float]]:
    """``(step, value)`` of every entry that has both."""
    pairs = [(number(entry.get("step")), number(entry.get(key))) for entry in log]
    return [(step, value) for step, value in pairs if step is not None and value is not None]

"""The tables of a report: what training, the evaluation and the benchmark found, in words and figures as shown."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from retrofit.report.collect import Row, Run, number
from retrofit.report.figures import shown

Columns = Mapping[str, tuple[str, str]]

TRAINING = {
    "window": ("window, tokens", ",.0f"),
    "kl": ("KL to teacher, nats", ".4f"),
    "kl_gap_closed": ("KL gap closed", ".1%"),
    "nll": ("NLL, nats", ".4f"),
    "kept_bytes": ("bytes per layer beside the window", ",.0f"),
    "seconds": ("fitted in, s", ",.0f"),
}
EVALUATION = {
    "window": TRAINING["window"],
    "sinks": ("sinks", ",.0f"),
    "kept_bytes": TRAINING["kept_bytes"],
}
EVALUATION |= {key: TRAINING[key] for key in ("kl", "kl_gap_closed", "nll")} | {
    "recall": ("keyed recall", ".1%"),
    "passkey": ("pass key", ".1%"),
}
COSTS = {
    "length": ("context, tokens", ",.0f"),
    "prefill_seconds": ("prefill, s", ",.3f"),
    "prefill_to_full": ("× full's speed", ".2f"),
    "decode_tokens_per_second": ("decode, tokens/s", ",.1f"),
    "decode_to_full": ("× full's speed", ".2f"),
    "peak_mib": ("peak, MiB", ",.1f"),
    "cache_bytes": ("cache, bytes", ",.0f"),
    "cache_share": ("of full's cache", ".1%"),
}


@dataclass(frozen=True)
class Table:
    """Text under a title, in a section; the first column names the row, the others are figures."""

    section: str
    title: str
    header: list[str]
    rows: list[list[str]]


def tables(run: Run) -> Iterator[Table]:
    """Every table there is something for."""
    yield from _table("Results", "Held-out rows, after training", run.metrics["rows"], TRAINING)
    yield from _evaluation(run.evaluation)
    scores = run.evaluation["harness"]
    lines = [{**line, "name": " ".join(str(line[k]) for k in ("task", "metric") if line.get(k))} for line in scores]
    figures = {str(row.get("name")): (str(row.get("name")), ".3f") for row in run.evaluation["rows"]}
    yield from _table("Results", "lm-evaluation-harness", lines, figures)
    yield from _table("Costs", "All lengths", [{**row, "name": shown(row["name"])} for row in run.bench], COSTS)


def _table(section: str, title: str, rows: Iterable[Row], columns: Columns) -> Iterator[Table]:
    """``rows``, if there are any, under those of ``columns`` for which any has a figure."""
    rows = list(rows)
    there = {key: how for key, how in columns.items() if any(number(row.get(key)) is not None for row in rows)}
    body = [
        [str(row.get("name", "")), *(_cell(row.get(key), spec) for key, (_, spec) in there.items())] for row in rows
    ]
    if rows:
        yield Table(section, title, ["", *(header for header, _ in there.values())], body)


def _evaluation(evaluation: Row) -> Iterator[Table]:
    """A row per contender: what it is, the text, the probes."""
    whole: Row = next((entry for entry in evaluation["text"] if entry.get("beyond") is None), {})
    rows = []
    for contender in evaluation["rows"]:
        name = str(contender.get("name"))
        row = {**contender, **{key: whole.get(key, {}).get(name) for key in ("kl", "kl_gap_closed", "nll")}}
        for probe in ("recall", "passkey"):
            shares = [value for entry in evaluation[probe] if (value := number(entry.get(name))) is not None]
            row[probe] = sum(shares) / len(shares) if shares else None
        rows.append(row)
    for table in _table("Results", "Evaluation", rows, EVALUATION):
        same = evaluation["identity"]
        if same:
            table.header.append("equals its base up to S + W")
            for line in table.rows:
                line.append("–" if line[0] not in same else "yes" if same[line[0]] is True else "NO")
        yield table


def _cell(value: object, spec: str) -> str:
    figure = number(value)
    return "–" if figure is None else format(figure, spec)

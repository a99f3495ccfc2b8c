"""The tables of a report: what training, the evaluation and the benchmark found, in words and figures as shown."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from retrofit.report.collect import Row, Run, names, number, record, records
from retrofit.report.costs import SECTION, shown

TRAINING = {
    "window": ("window, tokens", ",.0f"),
    "kl": ("KL to teacher, nats", ".4f"),
    "kl_gap_closed": ("KL gap closed", ".1%"),
    "nll": ("NLL, nats", ".4f"),
    "state_bytes": ("state bytes per layer", ",.0f"),
    "seconds": ("fitted in, s", ",.0f"),
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
    trained = records(run.metrics.get("rows"))
    if trained:
        yield _table("Results", "Held-out rows, after training", trained, TRAINING)
    yield from _evaluation(run.evaluation)
    rows = [
        {**row, "name": shown(str(row.get("name"))), "length": row.get("length", row.get("context"))}
        for row in run.bench
    ]
    if rows:
        yield _table(SECTION, "All lengths", rows, COSTS)


def _table(section: str, title: str, rows: list[Row], columns: Mapping[str, tuple[str, str]]) -> Table:
    """``rows`` under those of ``columns`` for which any has a figure."""
    there = {key: how for key, how in columns.items() if any(number(row.get(key)) is not None for row in rows)}
    body = [
        [str(row.get("name", "")), *(_cell(row.get(key), spec) for key, (_, spec) in there.items())] for row in rows
    ]
    return Table(section, title, ["", *(header for header, _ in there.values())], body)


def _evaluation(evaluation: Row) -> Iterator[Table]:
    """A row per contender: what it is, the text, the probes; then the tasks, if there were any."""
    contenders = records(evaluation.get("rows"))
    found = names(contenders)
    whole = next((entry for entry in records(evaluation.get("text")) if entry.get("beyond") is None), {})
    same = record(evaluation.get("identity"))
    recall, needles = records(evaluation.get("recall")), records(evaluation.get("needles"))
    columns = {"window": ("window, tokens", ",.0f"), "sinks": ("sinks", ",.0f"), "state_bytes": TRAINING["state_bytes"]}
    columns |= {key: TRAINING[key] for key in ("kl", "kl_gap_closed", "nll")} | {"recall": ("keyed recall", ".1%")}
    columns |= {f"needle {at}": (str(entry.get("task")), ".1%") for at, entry in enumerate(needles)}
    rows = []
    for contender in contenders:
        name = str(contender.get("name"))
        row = {**contender, **{key: record(whole.get(key)).get(name) for key in ("kl", "kl_gap_closed", "nll")}}
        recalled = [value for entry in recall if (value := number(entry.get(name))) is not None]
        row["recall"] = sum(recalled) / len(recalled) if recalled else None
        rows.append(row | {f"needle {at}": entry.get(name) for at, entry in enumerate(needles)})
    if rows:
        table = _table("Results", "Evaluation", rows, columns)
        if same:
            table.header.append("equals its base up to S + W")
            for line in table.rows:
                line.append("–" if line[0] not in same else "yes" if same[line[0]] is True else "NO")
        yield table
    tasks = {name: records(record(part).get("scores")) for name, part in record(evaluation.get("benchmarks")).items()}
    tasks["lm-evaluation-harness"] = records(evaluation.get("harness"))
    for title, scores in tasks.items():
        if scores:
            lines = [
                {**entry, "name": " ".join(str(entry[k]) for k in ("task", "metric") if entry.get(k))}
                for entry in scores
            ]
            yield _table("Results", str(title), lines, {name: (name, ".3f") for name in found})


def _cell(value: object, spec: str) -> str:
    figure = number(value)
    return "–" if figure is None else format(figure, spec)

"""The tables of a report: what training, the evaluation and the benchmark found, as the page shows them."""

from collections.abc import Iterator
from dataclasses import dataclass

from retrofit.evaluation.settings import WINDOW_ONLY
from retrofit.evaluation.tables import tables as tables_of_evaluation
from retrofit.report.collect import Row, Run
from retrofit.table import format_rows

TRAINING = {
    "name": ("", ""),
    "window": ("window, tokens", ",.0f"),
    "kl": ("KL to teacher, nats", ".4f"),
    "kl_gap_closed": ("KL gap closed", ".1%"),
    "nll": ("NLL, nats", ".4f"),
    "kept_bytes": ("bytes per layer beside the window", ",.0f"),
    "seconds": ("fitted in, s", ",.0f"),
}
COSTS = {
    "name": ("", ""),
    "length": ("context, tokens", ",.0f"),
    "prefill_seconds": ("prefill, s", ",.3f"),
    "prefill_to_full": ("× full's speed", ".2f"),
    "decode_tokens_per_second": ("decode, tokens/s", ",.1f"),
    "decode_to_full": ("× full's speed", ".2f"),
    "peak_mib": ("peak, MiB", ",.1f"),
    "cache_bytes": ("cache, bytes", ",.0f"),
    "cache_share": ("of full's cache", ".1%"),
}

Described = tuple[str, str, list[Row], dict[str, tuple[str, str]]]  # section, title, rows, columns


@dataclass(frozen=True)
class Table:
    """Text under a title, in a section; the first column names the row, the others are figures."""

    section: str
    title: str
    header: list[str]
    rows: list[list[str]]


def tables(run: Run) -> list[Table]:
    """Every table there is something for; ``run.missing`` gets a sentence for each that cannot be made."""
    bench = [{**row, "name": WINDOW_ONLY if row["name"] == "none" else row["name"]} for row in run.bench]
    found: list[Described] = [("Results", "Held-out rows, after training", run.metrics["rows"], TRAINING)]
    try:
        evaluated = tables_of_evaluation(run.evaluation)
        found += [("Results", f"Evaluation: {title}", rows, columns) for title, rows, columns in evaluated]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        run.missing.append(f"The evaluation's tables are missing: eval.json holds something unexpected ({error!r}).")
    return [table for part in (*found, ("Costs", "All lengths", bench, COSTS)) for table in _make_table(run, *part)]


def _make_table(
    run: Run, section: str, title: str, rows: list[Row], columns: dict[str, tuple[str, str]]
) -> Iterator[Table]:
    """``rows``, if there are any, under those of ``columns`` that any of them has."""
    there = {key: how for key, how in columns.items() if any(row.get(key) is not None for row in rows)}
    try:
        cells = format_rows(rows, there)
    except (TypeError, ValueError) as error:
        run.missing.append(f"The table {title!r} is missing: a file holds something unexpected ({error}).")
        return
    if cells:
        yield Table(section, title, [header for header, _ in there.values()], cells)

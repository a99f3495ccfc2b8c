"""The tables of an evaluation's summary, for the terminal and for the report."""

from typing import Any

from retrofit.evaluation.settings import TEACHER

Printed = tuple[str, list[dict[str, Any]], dict[str, tuple[str, str]]]


def tables(summary: dict[str, Any]) -> list[Printed]:
    """``(title, rows, columns)`` of each table of a summary, for :func:`retrofit.table.print_table`."""
    names = [str(row["name"]) for row in summary["rows"]]
    shares, values = ({name: (name, spec) for name in names} for spec in (".1%", ".3f"))
    columns = {
        "name": ("", ""),
        "window": ("window", ",d"),
        "sinks": ("sinks", ",d"),
        "kept_bytes": ("bytes beside the window", ",d"),
    }
    found: list[Printed] = [("what is compared", summary["rows"], columns)]
    if summary["identity"]:
        lines = [{"name": name, "same": "yes" if same else "NO"} for name, same in summary["identity"].items()]
        found.append(("bit-identical to the base below the window", lines, {"name": ("", ""), "same": ("", "")}))
    if summary["text"]:
        whole = summary["text"][-1]
        lines = [
            {"name": name} | {key: whole[key].get(name) for key in ("kl", "kl_gap_closed", "nll")} for name in names
        ]
        columns = {
            "name": ("", ""),
            "kl": ("KL to teacher", ".4f"),
            "kl_gap_closed": ("KL gap closed", ".1%"),
            "nll": ("NLL", ".4f"),
        }
        found.append((f"text, {whole['positions']:,} positions past the window", lines, columns))
        lines = [{"beyond": f"{part['beyond']:,}", **part["kl"]} for part in summary["text"][:-1]]
        columns = {"beyond": ("tokens past it", "")} | {name: (name, ".4f") for name in names if name != TEACHER}
        found.append(("KL by distance past the window", lines, columns))
    if summary["recall"]:
        columns = {"length": ("tokens", ",d"), "bindings": ("bindings", "d")} | shares
        found.append(("keyed recall", summary["recall"], columns))
    if summary["passkey"]:
        columns = {"length": ("tokens", ",d"), "depth": ("depth", ".0%")} | shares
        found.append(("pass keys found", summary["passkey"], columns))
    if summary["harness"]:
        found.append(("harness", summary["harness"], {"task": ("", ""), "metric": ("", "")} | values))
    return found

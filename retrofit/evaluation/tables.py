"""The tables that `retrofit eval` prints of its summary."""

from typing import Any

from retrofit.evaluation.contenders import TEACHER


def tables(summary: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]], dict[str, tuple[str, str]]]]:
    """``(title, rows, columns)`` of each table of a summary, for :func:`retrofit.table.print_table`."""
    names = [row["name"] for row in summary["rows"]]
    found = []
    if summary["identity"] is not None:
        lines = [{"name": name, "same": "yes" if same else "NO"} for name, same in summary["identity"].items()]
        found.append(("bit-identical to the base below the window", lines, {"name": ("", ""), "same": ("", "")}))
    if summary["text"] is not None:
        whole = summary["text"][-1]
        lines = [
            {"name": name, "kl": whole["kl"][name], "closed": whole["kl_gap_closed"][name], "nll": whole["nll"][name]}
            for name in names
        ]
        columns = {
            "name": ("", ""),
            "kl": ("KL to teacher", ".4f"),
            "closed": ("KL gap closed", ".1%"),
            "nll": ("NLL", ".4f"),
        }
        found.append((f"text, {whole['positions']:,} positions past the window", lines, columns))
        lines = [
            {"beyond": f"{entry['beyond']:,}", **entry["kl"]}
            for entry in summary["text"]
            if entry["beyond"] is not None
        ]
        columns = {"beyond": ("tokens past it", "")} | {name: (name, ".4f") for name in names if name != TEACHER}
        found.append(("KL by distance past the window", lines, columns))
    scores = {name: (name, ".1%") for name in names}
    if summary["recall"] is not None:
        columns = {"length": ("tokens", ",d"), "bindings": ("bindings", "d")} | scores
        found.append(("keyed recall", summary["recall"], columns))
    if summary["passkey"] is not None:
        columns = {"length": ("tokens", ",d"), "depth": ("depth", ".0%")} | scores
        found.append(("pass keys found", summary["passkey"], columns))
    if summary["harness"] is not None:
        values = {name: (name, ".3f") for name in names}
        found.append(("harness", summary["harness"], {"task": ("", ""), "metric": ("", "")} | values))
    if summary["sizes"] is not None:
        sizes = {str(size): (str(size), ".2f") for size in summary["settings"]["sizes"]}
        found.append(("perplexity by size of state", summary["sizes"], {"policy": ("", "")} | sizes))
    return found

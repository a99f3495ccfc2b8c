"""`retrofit allocate` from a checkpoint and a text to tables and a recipe."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from patches.errors import RetrofitError
from patches.kinds import find_kind
from retrofit.evaluation.scores import gap_closed
from retrofit.families import refuse_retrofit
from retrofit.loading import load_base, load_tokenizer
from retrofit.texts.tokens import read_sequences

from .allocate import Allocation, allocate
from .recipe import write_memory

LAYERS = {
    "layer": ("layer", "d"),
    "share": ("share of the gap", ".1%"),
    "window": ("window", ",d"),
    "rows": ("rows", ",d"),
    "bytes": ("bytes", ",d"),
}
GAPS = {
    "name": ("", ""),
    "sizes": ("sizes", ""),
    "kl": ("KL, chosen on", ".4f"),
    "kl_held_out": ("KL, held out", ".4f"),
    "gap_closed": ("gap closed", ".1%"),
}
WINDOW = "window alone"


@dataclass(frozen=True)
class Found:
    """Tables for the terminal as (title, rows, columns), the recipe's text, and what it says in short."""

    tables: list[tuple[str, list[dict[str, Any]], dict[str, tuple[str, str]]]]
    recipe: str
    said: str


def report(
    source: str,
    data: str,
    budget: int,
    kind: str,
    sinks: int,
    options: dict[str, Any],
    rows: int,
    length: int,
    dtype: str,
    say: Callable[[str], None],
) -> Found:
    """Read ``rows`` rows of ``length`` tokens to choose on and as many others, allocate, and put it into tables.

    Args:
        source: the base's checkpoint.
        data: anything :func:`read_sequences` takes.
        dtype: in which the base runs and bytes are counted; ``"auto"`` is the checkpoint's own.
        others: as for :func:`retrofit.allocation.allocate.allocate`.

    Raises:
        RetrofitError: too little text, a base that has a memory already, or as :func:`allocate`.
    """
    texts = read_sequences(data, load_tokenizer(source), length=length)
    if len(texts) < 2 * rows:
        raise RetrofitError(
            f"{data} holds {len(texts)} rows of {length} tokens, and {2 * rows} are wanted, half of them to report on: "
            "give more text, fewer --rows or a shorter --length"
        )
    texts = texts[torch.linspace(0, len(texts) - 1, 2 * rows).round().long()]
    base = load_base(source, dtype=dtype).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    refuse_retrofit(base.config, source)
    how: dict[str, Any] = {"sinks": sinks, "options": options, "say": say}
    found = allocate(base, kind, budget, texts[::2], texts[1::2], **how)
    layers, gaps = layer_rows(found), gap_rows(found, kind)
    precision = str(base.dtype).removeprefix("torch.")
    said = "equal sizes, which nothing beat on the rows to choose on" if found.chosen.even else "sizes by need"
    if find_kind(kind).trainable:
        said += f", chosen without the memory: now fit {kind} with `retrofit distill`"
    title = f"{source}: {budget:,} bytes per layer in {precision}, sinks left out"
    notes = (
        f"retrofit allocate {source} --data {data} --bytes {budget} --memory {kind}\n{said}; KL to full attention:\n"
    )
    notes += "\n".join(f"{row['name']}, {row['sizes']}: {row['kl_held_out']:.4f} on held-out rows" for row in gaps)
    tables = [
        (title, layers, LAYERS),
        (f"{rows} rows of {length} tokens to choose on, {rows} others held out", gaps, GAPS),
    ]
    return Found(tables, write_memory(found.recipe, notes), said)


def layer_rows(found: Allocation) -> list[dict[str, Any]]:
    """The recipe, layer by layer."""
    return [
        {"layer": layer, "share": found.share[layer], "window": size.window, "rows": size.rows, "bytes": size.bytes}
        for layer, size in found.chosen.sizes.items()
    ]


def gap_rows(found: Allocation, kind: str) -> list[dict[str, Any]]:
    """KLs, and how much of that of the even window each closes."""
    rows = []
    for name, plans in ((WINDOW, found.window), (kind, found.memory)):
        for key, plan in (plans or {}).items():
            size = next(iter(plan.sizes.values()))
            rows_too = "" if size.rows is None else f", {size.rows:,} rows"
            alike = f"even: window {size.window:,}{rows_too}"
            sizes = alike if key == "even" else "by need" if not plan.even else "by need: even"
            closed = gap_closed(plan.kl_held_out, found.window["even"].kl_held_out)
            figures = {"kl": plan.kl, "kl_held_out": plan.kl_held_out, "gap_closed": closed}
            rows.append({"name": name, "sizes": sizes, **figures})
    return rows

"""KL to the teacher and NLL by position on a text of the user's, every row read chunk by chunk."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from patches.errors import RetrofitError
from retrofit.evaluation.contenders import Contender, lossless, ready
from retrofit.evaluation.scores import CHUNK, cached_readers, scored_pieces
from retrofit.evaluation.store import ResultStore
from retrofit.table import show_progress


def score_text(
    rows: Sequence[Contender],
    sequences: Tensor,
    store: ResultStore,
    *,
    chunk: int = CHUNK,
) -> None:
    """Score every row on the same positions of each sequence that ``store`` has no scores of.

    Args:
        sequences: (N, T) token ids, without padding.
        store: gets one result of ``kind="text"`` per sequence: ``kl`` and ``nll``, for each row the sums over the
            positions of each of :func:`distances`, and their ``counts``.

    Raises:
        RetrofitError: the sequences end within the narrowest window.
    """
    check_length(rows, sequences.shape[1])
    start = lossless(rows)
    edges = distances(rows, sequences.shape[1])
    with ready(rows):
        for number, ids in enumerate(show_progress(sequences, "text")):
            key = f"text/{number}"
            if key not in store:
                store.add(key, kind="text", **_score(rows, ids[None].to(rows[0].model.device), start, edges, chunk))


def check_length(rows: Sequence[Contender], length: int) -> None:
    """Refuse sequences of which no position can be scored.

    Raises:
        RetrofitError: they end within the narrowest window.
    """
    start = lossless(rows)
    if length < start + 2:
        raise RetrofitError(f"rows of {length} tokens never leave a window of {start}: score {start + 2} or more")


def distances(rows: Sequence[Contender], length: int) -> list[int]:
    """Where the buckets begin, in tokens past the narrowest window: 0, W, 2 W, 4 W, ... below ``length``."""
    window = min(row.window for row in rows if row.window is not None)
    edges, edge = [0], window
    while edge < length - lossless(rows) - 1:
        edges.append(edge)
        edge *= 2
    return edges


def _score(rows: Sequence[Contender], ids: Tensor, start: int, edges: list[int], chunk: int) -> dict[str, Any]:
    sums = torch.zeros(len(rows), 2, len(edges), dtype=torch.float64)  # NLL and KL of each row
    counts = torch.zeros(len(edges), dtype=torch.long)
    readers = cached_readers({row.name: row.model for row in rows})
    for where, scores in scored_pieces(readers, rows[0].model.get_output_embeddings(), ids, start, chunk):
        past = torch.arange(where.start, where.stop) - start
        bucket = torch.bucketize(past, torch.tensor(edges), right=True) - 1
        counts += torch.bincount(bucket, minlength=len(edges))
        for one, row in zip(sums, rows, strict=True):
            one.index_add_(1, bucket, torch.stack(scores[row.name][:2]).double().cpu())
    named = {
        what: {row.name: sums[i, j].tolist() for i, row in enumerate(rows)} for j, what in enumerate(("nll", "kl"))
    }
    return {"counts": counts.tolist(), **named}


def by_distance(store: ResultStore, rows: Sequence[Contender], length: int) -> list[dict[str, Any]]:
    """Means over all scored sequences: one dictionary per bucket, the last over all of them (``beyond`` is None).

    Keys: ``beyond`` (tokens past the window), ``positions``, and for each row ``kl`` and ``nll`` as ``{row: nats}``.
    """
    lines = store.results(kind="text")
    counts = torch.tensor([line["counts"] for line in lines]).sum(0)
    edges = distances(rows, length)
    parts: list[tuple[int | None, slice]] = [(edge, slice(at, at + 1)) for at, edge in enumerate(edges)]
    table = []
    for edge, part in [*parts, (None, slice(None))]:
        count = int(counts[part].sum())
        if count:
            means = {
                what: {row.name: sum(sum(line[what][row.name][part]) for line in lines) / count for row in rows}
                for what in ("kl", "nll")
            }
            table.append({"beyond": edge, "positions": count, **means})
    return table

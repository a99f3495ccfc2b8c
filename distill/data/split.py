"""Data in, rows out: open a source, tokenise it once, keep a part held out. The one entry point is ``load_rows``."""

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from distill.data.chat import IGNORED
from distill.data.counts import Counts
from distill.data.rows import ChatRows, PackedRows, PaddingCollator
from distill.data.sources import open_source
from distill.data.streaming import Stream, StreamedRows
from distill.data.tokens import TokenRows, find_column
from patches.errors import RetrofitError


@dataclass(frozen=True)
class Split:
    """What a run trains on and what it is measured on.

    Attributes:
        held_out_part: the held-out part in words, for model cards.
        counts: what was read and left out; of a stream, so far.
        tokens: in ``all``, ``train`` and ``held_out``; None where a stream does not know.
        row_tokens: tokens of a row, of conversations their mean.
        collator: how rows become a batch; None where they all have one length.
        source, min_length: what was read, and what had to be longer.
    """

    train: PackedRows | ChatRows | StreamedRows
    held_out: PackedRows | ChatRows
    held_out_part: str
    counts: Counts
    tokens: dict[str, int | None]
    row_tokens: float
    collator: PaddingCollator | None
    source: TokenRows
    min_length: int

    def check_scored(self, start: int, count: int) -> None:
        """Refuse to measure on ``count`` held-out rows of which nothing from position ``start`` on is labelled.

        Raises:
            RetrofitError: that is the case.
        """
        ids, labels = self.held_out.head(count).batch()
        if labels is not None and not (labels[:, start + 1 :] != IGNORED).any():
            raise RetrofitError(
                f"none of the {len(ids)} held-out conversations has an answer beyond {start} tokens (window and "
                "sinks), so nothing could be measured: set a larger holdout or a smaller window"
            )

    def sentence(self) -> str:
        """What was read, left out and cut, in one line."""
        unit = "conversations" if self.source.format == "chat" else "documents"
        return self.counts.sentence(unit, self.source.seq_len, self.min_length, self.source.max_samples)


def load_rows(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    holdout: float = 0.1,
    eval_rows: int = 48,
    name: str | None = None,
    revision: str | None = None,
    split: str = "train",
    data_format: str = "auto",
    min_length: int = 0,
    max_samples: int | None = None,
    streaming: bool = False,
) -> Split:
    """Read ``source``, tokenise it and hold a part of it out: of packed text the last tokens, of conversations the last
    ones, of a stream the first rows.

    Args:
        source: anything :func:`distill.data.sources.open_source` opens; ``name``, ``revision`` and ``split`` are its.
        seq_len: tokens per packed row, and the most that are kept of a conversation.
        holdout: share of the tokens or conversations held out.
        eval_rows: rows held out of a stream, which has no known end to take a share of.
        data_format: ``text`` (packed), ``chat`` (a row per conversation, answers labelled) or ``auto``.
        min_length: records of at most so many tokens are left out, and counted.
        max_samples: read only so many records, the first ones.
        streaming: read and tokenise while training instead of before.

    Raises:
        RetrofitError: the source cannot be read, holds a malformed record, or too little for both parts.
    """
    opened = open_source(source, name=name, revision=revision, split=split, streaming=streaming)
    rows = TokenRows(opened, find_column(opened, data_format), tokenizer, seq_len, max_samples)
    collator = None
    if rows.format == "chat":
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        collator = PaddingCollator(next(token for token in pads if token is not None))
    if streaming:
        return _stream(rows, min_length, eval_rows, collator)

    data = rows.cached()
    if rows.format == "chat":
        return _chat(rows, data, min_length, holdout, collator)
    return _packed(rows, data, min_length, holdout)


def _kept(data: Any, min_length: int) -> tuple[np.ndarray, np.ndarray, Counts]:
    """The rows that are long enough, how many tokens each has, and the counts of all rows."""
    import pyarrow.compute as pc

    table = data.with_format("arrow")[:]
    counts = Counts()
    sizes = pc.list_value_length(table["input_ids"]).to_numpy()
    pairs = zip(table["length"].to_pylist(), sizes.tolist(), strict=True)
    kept = np.flatnonzero([counts.add(length, size, min_length) for length, size in pairs])
    return kept, sizes[kept], counts


def _packed(rows: TokenRows, data: Any, min_length: int, holdout: float) -> Split:
    kept, _, counts = _kept(data, min_length)
    where, seq_len = rows.source.name, rows.seq_len
    if not len(kept):
        raise RetrofitError(f"{where} is empty: there is no text in it to learn from{_only_short(counts, min_length)}")
    table = (data if len(kept) == len(data) else data.select(kept)).with_format("arrow")[:]
    parts = [chunk.flatten().to_numpy() for chunk in table["input_ids"].chunks]
    tokens = torch.from_numpy(np.concatenate(parts))
    cut = len(tokens) - round(len(tokens) * holdout)
    train, held_out = PackedRows(tokens[:cut], seq_len), PackedRows(tokens[cut:], seq_len)
    if not len(train) or not len(held_out):
        needed = math.ceil(max(seq_len / holdout, seq_len / (1 - holdout)))
        raise RetrofitError(
            f"{where} is too short: it holds {len(tokens)} tokens, and at least {needed} are needed for rows of "
            f"{seq_len} with {holdout:.0%} held out{_only_short(counts, min_length)}"
        )
    counts.tokens_left_over = len(tokens) - train.tokens - held_out.tokens
    sizes: dict[str, int | None] = {"all": len(tokens), "train": train.tokens, "held_out": held_out.tokens}
    return Split(
        train, held_out, f"the last {holdout:.0%} of its tokens", counts, sizes, seq_len, None, rows, min_length
    )


def _chat(rows: TokenRows, data: Any, min_length: int, holdout: float, collator: PaddingCollator | None) -> Split:
    kept, sizes, counts = _kept(data, min_length)
    cut = len(kept) - round(len(kept) * holdout)
    if not 0 < cut < len(kept):
        raise RetrofitError(
            f"{rows.source.name} is too short: with {holdout:.0%} of {len(kept)} conversations held out, one part is "
            f"empty{_only_short(counts, min_length)}"
        )
    data = data.with_format("numpy")
    train, held_out = ChatRows(data.select(kept[:cut])), ChatRows(data.select(kept[cut:]))
    parts = {"all": sizes, "train": sizes[:cut], "held_out": sizes[cut:]}
    tokens: dict[str, int | None] = {name: int(part.sum()) for name, part in parts.items()}
    part = f"the last {holdout:.0%} of its conversations"
    return Split(train, held_out, part, counts, tokens, float(sizes[:cut].mean()), collator, rows, min_length)


def _stream(rows: TokenRows, min_length: int, eval_rows: int, collator: PaddingCollator | None) -> Split:
    stream = Stream(rows, min_length)
    first = list(islice(stream.items(Counts()), eval_rows))
    held_out: PackedRows | ChatRows
    if not first:
        raise RetrofitError(f"{rows.source.name} is too short: it does not fill one row")
    if rows.format == "chat":
        held_out = ChatRows([{"input_ids": row["input_ids"], "answer": row["labels"] >= 0} for row in first])
    else:
        held_out = PackedRows(torch.cat([row["input_ids"] for row in first]), rows.seq_len)
    train = StreamedRows(stream.items, len(first), rows.source.name)
    total = sum(len(row["input_ids"]) for row in first)
    tokens = {"all": None, "train": None, "held_out": total}
    part = f"its first {len(first)} rows"
    return Split(train, held_out, part, train.counts, tokens, total / len(first), collator, rows, min_length)


def _only_short(counts: Counts, min_length: int) -> str:
    return f"; {counts.short} records of at most min_length {min_length} tokens were left out" if counts.short else ""

"""Data in, rows out: open a source, tokenise it once, keep a part held out. The one entry point is ``load_rows``."""

import filecmp
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from distill.data.counts import Counts
from distill.data.rows import ChatRows, DocumentRows, MixedRows, PackedRows, PaddingCollator, Rows
from distill.data.streaming import Stream, StreamedRows
from patches.errors import RetrofitError
from retrofit.texts.chat import IGNORED
from retrofit.texts.sources import Source, open_source
from retrofit.texts.tokens import TokenRows, find_column


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

    train: Rows | StreamedRows
    held_out: Rows
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
                f"none of the {len(ids)} held-out {self.unit} has {self.learned} beyond {start} tokens (window and "
                "sinks), so nothing could be measured: set a larger holdout or a smaller window"
            )

    @property
    def unit(self) -> str:
        """What is read, in the plural."""
        return "conversations" if self.source.format == "chat" else "documents"

    @property
    def learned(self) -> str:
        """What of it is learned and scored."""
        return "answers" if self.source.format == "chat" else "text"

    def sentence(self) -> str:
        """What was read, left out and cut, in one line."""
        return self.counts.sentence(self.unit, self.source.seq_len, self.min_length, self.source.max_samples)


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
    packing: bool = True,
    mix: Mapping[str, float] | None = None,
    eval_data: str | None = None,
) -> Split:
    """Read ``source``, tokenise it and hold a part of it out: of packed text the last tokens, of conversations and
    documents the last ones, of a stream the first rows.

    Args:
        source: anything :func:`retrofit.texts.sources.open_source` opens; ``name``, ``revision`` and ``split`` are its.
        seq_len: tokens per packed row, and the most that are kept of a conversation.
        holdout: share of the tokens or conversations held out.
        eval_rows: rows held out of a stream, which has no known end to take a share of.
        data_format: ``text`` (packed), ``chat`` (a row per conversation, answers labelled) or ``auto``.
        min_length: records of at most so many tokens are left out, and counted.
        max_samples: read only so many records of each source, the first ones.
        streaming: read and tokenise while training instead of before.
        packing: join documents and cut the stream into rows; otherwise each document has rows of its own.
        mix: further sources, and how often each of their rows is read in a pass.
        eval_data: a source that is held out as a whole, instead of a part of the others.

    Raises:
        RetrofitError: the source cannot be read, holds a malformed record, or too little for both parts; what is to be
            scored is trained on.
    """
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    collator = PaddingCollator(next(token for token in pads if token is not None))

    def read(source: str, holdout: float, **where: Any) -> Split:
        opened = open_source(source, streaming=streaming and holdout < 1, **where)
        column = find_column(opened, data_format)
        rows = TokenRows(opened, column, tokenizer, seq_len, max_samples, apart=not packing and column == "text")
        if streaming and holdout < 1:
            return _stream(rows, min_length, eval_rows if holdout else 0, None if rows.packed else collator)
        if rows.packed:
            return _packed(rows, rows.cached(), min_length, holdout)
        return _apart(rows, rows.cached(), min_length, holdout, collator)

    share = 0.0 if eval_data else holdout
    found = read(source, share, name=name, revision=revision, split=split)
    others = mix or {}
    parts = [found, *(read(other, share) for other in others)]
    if others:
        found = _mixed(parts, [1.0, *others.values()], collator)
    if eval_data:
        other = read(eval_data, 1.0)
        by_name = [*others, *([source] if (name, revision, split) == (None, None, "train") else [])]
        if eval_data in by_name or any(_alike(part.source.source, other.source.source) for part in parts):
            raise RetrofitError(
                f"eval_data: {eval_data} is trained on, too: give another text, or leave eval_data out, so that a part "
                "of the data is held out"
            )
        tokens = found.tokens | {"held_out": other.tokens["all"]}
        if not streaming:
            found = replace(found, counts=_sum([found.counts, other.counts]))
        found = replace(
            found,
            held_out=other.held_out,
            held_out_part=f"all of {other.source.source.name}",
            tokens=tokens,
            collator=found.collator or other.collator,
        )
    return found


def _alike(one: Source, other: Source) -> bool:
    """Whether two sources are one, or files with the same content."""
    if Path(one.name).is_file() and Path(other.name).is_file():
        return filecmp.cmp(one.name, other.name, shallow=False)
    return one.identity == other.identity != ""


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
    shares = [share for share in (holdout, 1 - holdout) if share]
    if min(len(part) for part, share in ((train, 1 - holdout), (held_out, holdout)) if share) == 0:
        needed = math.ceil(max(seq_len / share for share in shares))
        raise RetrofitError(
            f"{where} is too short: it holds {len(tokens)} tokens, and at least {needed} are needed for rows of "
            f"{seq_len} with {holdout:.0%} held out{_only_short(counts, min_length)}"
        )
    counts.tokens_left_over = len(tokens) - train.tokens - held_out.tokens
    sizes: dict[str, int | None] = {"all": len(tokens), "train": train.tokens, "held_out": held_out.tokens}
    return Split(
        train, held_out, f"the last {holdout:.0%} of its tokens", counts, sizes, seq_len, None, rows, min_length
    )


def _apart(rows: TokenRows, data: Any, min_length: int, holdout: float, collator: PaddingCollator) -> Split:
    """Conversations, or documents that are not packed: each is a row, or several."""
    kept, sizes, counts = _kept(data, min_length)
    unit = "conversations" if rows.format == "chat" else "documents"
    cut = len(kept) - round(len(kept) * holdout)
    if not (cut or holdout == 1) or not (cut < len(kept) or holdout == 0) or not len(kept):
        raise RetrofitError(
            f"{rows.source.name} is too short: with {holdout:.0%} of {len(kept)} {unit} held out, one part is "
            f"empty{_only_short(counts, min_length)}"
        )
    data = data.with_format("numpy")

    def part(taken: slice) -> Rows:
        records, lengths = data.select(kept[taken]), sizes[taken].tolist()
        return ChatRows(records, lengths) if rows.format == "chat" else DocumentRows(records, lengths, rows.seq_len)

    train, held_out = part(slice(cut)), part(slice(cut, None))
    parts = {"all": sizes, "train": sizes[:cut], "held_out": sizes[cut:]}
    tokens: dict[str, int | None] = {name: int(part.sum()) for name, part in parts.items()}
    return Split(
        train,
        held_out,
        f"the last {holdout:.0%} of its {unit}",
        counts,
        tokens,
        (tokens["train"] or 0) / max(1, len(train)),
        collator,
        rows,
        min_length,
    )


def _mixed(splits: Sequence[Split], weights: Sequence[float], collator: PaddingCollator) -> Split:
    """Several sources as one, each row of the training parts read as often as its weight says."""
    train = MixedRows([split.train for split in splits], weights)
    held_out = MixedRows([split.held_out for split in splits], [1.0] * len(splits))
    names = [split.source.source.name for split in splits]
    empty = [name for name, count in zip(names, train.counts, strict=True) if not count]
    if empty:
        raise RetrofitError(f"mix: {empty[0]} has too few rows to be read so seldom: give it a larger weight")
    counts = _sum([split.counts for split in splits])
    tokens: dict[str, int | None] = {
        part: sum(split.tokens[part] or 0 for split in splits) for part in ("all", "train", "held_out")
    }
    of_row = sum(count * split.row_tokens for count, split in zip(train.counts, splits, strict=True)) / len(train)
    padded = any(split.collator for split in splits) or len({split.row_tokens for split in splits}) > 1
    return replace(
        splits[0],
        train=train,
        held_out=held_out,
        held_out_part=f"{splits[0].held_out_part}, likewise of {', '.join(names[1:])}",
        counts=counts,
        tokens=tokens,
        row_tokens=of_row,
        collator=collator if padded else None,
    )


def _sum(counts: Sequence[Counts]) -> Counts:
    return Counts(*(sum(getattr(one, field.name) for one in counts) for field in fields(Counts)))


def _stream(rows: TokenRows, min_length: int, eval_rows: int, collator: PaddingCollator | None) -> Split:
    stream = Stream(rows, min_length)
    first = list(islice(stream.items(Counts()), eval_rows))
    sizes = [len(row["input_ids"]) for row in first]
    held_out: Rows
    if eval_rows and not first:
        raise RetrofitError(f"{rows.source.name} is too short to fill one row: give more text or a smaller max_length")
    if rows.format == "text" and rows.apart:
        held_out = DocumentRows(first, sizes, rows.seq_len)
    elif rows.format == "chat":
        held_out = ChatRows([{"input_ids": row["input_ids"], "answer": row["labels"] >= 0} for row in first], sizes)
    else:
        held_out = PackedRows(torch.cat([row["input_ids"] for row in first] or [torch.empty(0)]), rows.seq_len)
    train = StreamedRows(stream.items, len(first), rows.source.name)
    total = sum(sizes)
    tokens = {"all": None, "train": None, "held_out": total}
    part = f"its first {len(first)} rows"
    return Split(
        train,
        held_out,
        part,
        train.counts,
        tokens,
        total / len(first) if first else rows.seq_len,
        collator,
        rows,
        min_length,
    )


def _only_short(counts: Counts, min_length: int) -> str:
    return f"; {counts.short} records of at most min_length {min_length} tokens were left out" if counts.short else ""

"""Data in, rows out: open a source, tokenise it once, keep a part held out. The one entry point is ``load_rows``."""

import filecmp
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from distill.data.rows import Counts, PaddingCollator, Rows, cut_records, mix_rows, pack_tokens
from distill.data.streaming import StreamedRows
from distill.recipe import DistillKeys
from patches.errors import RetrofitError
from retrofit.texts.chat import IGNORED
from retrofit.texts.sources import Source
from retrofit.texts.tokens import TokenRows, read_tokens


@dataclass(frozen=True)
class Split:
    """What a run trains on and what it is measured on.

    Attributes:
        held_out_part: the held-out part in words, for model cards.
        counts: what was read and left out; of a stream, so far.
        collator: how rows become a batch; None where they all have one length.
        source, keys: what was read, and the recipe.
    """

    train: Rows | StreamedRows
    held_out: Rows
    held_out_part: str
    counts: Counts
    collator: PaddingCollator | None
    source: TokenRows
    keys: DistillKeys

    def check_scored(self, start: int, count: int) -> None:
        """Refuse to measure on ``count`` held-out rows of which nothing from position ``start`` on is labelled.

        Raises:
            RetrofitError: that is the case.
        """
        _, labels = self.held_out.select(slice(count)).batch()
        if not (labels[:, start + 1 :] != IGNORED).any():
            raise RetrofitError(
                f"none of the {len(labels)} held-out {self.unit} has {self.learned} beyond {start} tokens (window and "
                "sinks), so nothing could be measured: set a larger holdout or a smaller window"
            )

    @property
    def tokens(self) -> dict[str, int | None]:
        """Tokens in ``all``, ``train`` and ``held_out``; None where a stream does not know."""
        held_out = sum(self.held_out.lengths())
        if isinstance(self.train, StreamedRows):
            return {"all": None, "train": None, "held_out": held_out}
        train = sum(self.train.lengths())
        return {"all": train + held_out + self.counts.tokens_left_over, "train": train, "held_out": held_out}

    @property
    def row_tokens(self) -> float:
        """Tokens of a row in training, on average; of a stream, of a held-out one."""
        rows = self.held_out if isinstance(self.train, StreamedRows) else self.train
        return sum(rows.lengths()) / len(rows) if len(rows) else self.source.seq_len

    @property
    def unit(self) -> str:
        """What is read, in the plural."""
        return _unit(self.source)

    @property
    def learned(self) -> str:
        """What of it is learned and scored."""
        return "answers" if self.source.format == "chat" else "text"

    def sentence(self) -> str:
        """What was read, left out and cut, in one line."""
        counts, least = self.counts, self.keys.min_length
        limit = self.keys.max_samples
        parts = [f"{counts.read:,} {self.unit} read"]
        if limit is not None and counts.read >= limit:
            parts[0] += f" (max_samples: {limit:,})"
        if counts.empty:
            parts.append(f"{counts.empty:,} empty, left out")
        if least:
            parts.append(f"{counts.short:,} of at most {least:,} tokens, left out")
        if counts.truncated:
            cut = f"{counts.truncated:,} cut to {self.keys.max_length:,} tokens"
            parts.append(f"{cut}, {counts.tokens_cut:,} tokens lost")
        if counts.tokens_left_over:
            parts.append(f"{counts.tokens_left_over:,} tokens left over that fill no row")
        return "; ".join(parts)


def load_rows(keys: DistillKeys, tokenizer: PreTrainedTokenizerBase) -> Split:
    """Read and tokenise ``data`` and hold a part of it out: of packed text the last rows, of conversations and
    documents the last ones, of a stream the first rows.

    Args:
        keys: a recipe, of which those of the data are read.

    Raises:
        RetrofitError: the source cannot be read, holds a malformed record, or too little for both parts; what is to be
            scored is trained on.
    """
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    collator = PaddingCollator(next(token for token in pads if token is not None))

    def read(source: str, holdout: float, **where: Any) -> Split:
        stream = keys.streaming and holdout < 1
        how = {"data_format": keys.data_format, "max_samples": keys.max_samples, "streaming": stream, **where}
        rows = read_tokens(source, tokenizer, seq_len=keys.max_length, **how)
        packed = keys.packing and rows.format == "text"
        parts: tuple[Any, Rows, str, Counts] = (_stream if stream else _hold_out)(rows, packed, keys, holdout)
        return Split(*parts, None if packed else collator, rows, keys)

    share = 0.0 if keys.eval_data else keys.holdout
    where = {"name": keys.data_name, "revision": keys.data_revision, "split": keys.data_split}
    found = read(str(keys.data), share, **where)
    parts = [found, *(read(other, share) for other in keys.mix)]
    if keys.mix:
        found = _mixed(parts, [1.0, *keys.mix.values()], collator)
    if keys.eval_data:
        other = read(keys.eval_data, 1.0)
        by_name = [*keys.mix, *([keys.data] if [*where.values()] == [None, None, "train"] else [])]
        if keys.eval_data in by_name or any(_alike(part.source.source, other.source.source) for part in parts):
            raise RetrofitError(
                f"eval_data: {keys.eval_data} is trained on, too: give another text, or leave eval_data out, so that a "
                "part of the data is held out"
            )
        found = replace(
            found,
            held_out=other.held_out,
            held_out_part=f"all of {keys.eval_data}",
            counts=found.counts if keys.streaming else _sum([found.counts, other.counts]),
            collator=found.collator or other.collator,
        )
    return found


def _alike(one: Source, other: Source) -> bool:
    """Whether two sources are one, or files with the same content."""
    if Path(one.name).is_file() and Path(other.name).is_file():
        return filecmp.cmp(one.name, other.name, shallow=False)
    return one.identity == other.identity


def _hold_out(rows: TokenRows, packed: bool, keys: DistillKeys, holdout: float) -> tuple[Rows, Rows, str, Counts]:
    """Rows to train on and those held out, the last ones; a record that is not packed stays in one of the two."""
    import pyarrow.compute as pc

    records = rows.cached()
    table = records.with_format("arrow")[:]
    sizes, counts = pc.list_value_length(table["input_ids"]).to_numpy(), Counts()
    pairs = zip(table["length"].to_pylist(), sizes.tolist(), strict=True)
    kept = np.flatnonzero([counts.add(length, size, keys.min_length) for length, size in pairs])
    data = records if len(kept) == len(records) else records.select(kept)
    if packed and len(kept):
        parts = [chunk.flatten().to_numpy() for chunk in data.with_format("arrow")[:]["input_ids"].chunks]
        tokens = torch.from_numpy(np.concatenate(parts))
        found, unit = pack_tokens(tokens, rows.seq_len), f"rows of {rows.seq_len} tokens"
        numbers = np.arange(len(found))
        counts.tokens_left_over = len(tokens) % rows.seq_len
    else:
        found, unit = cut_records(data, sizes[kept], rows.seq_len), _unit(rows)
        numbers = found.places[:, 1]  # of the record of each row
    count = int(numbers[-1]) + 1 if len(found) else 0
    cut = count - round(count * holdout)
    if not count or not (cut or holdout == 1) or not (cut < count or holdout == 0):
        short = f"; {counts.short} of at most min_length {keys.min_length} tokens were left out" if counts.short else ""
        if not len(kept):
            raise RetrofitError(f"{rows.source.name} is empty: there is nothing in it to learn from{short}")
        raise RetrofitError(
            f"{rows.source.name} is too short: with {holdout:.0%} of {count} {unit} held out, one part is empty{short}"
            ": give more text, or set another holdout or max_length"
        )
    part = f"the last {holdout:.0%} of its {'tokens' if packed else unit}"
    return found.select(numbers < cut), found.select(numbers >= cut), part, counts


def _stream(rows: TokenRows, packed: bool, keys: DistillKeys, holdout: float) -> tuple[StreamedRows, Rows, str, Counts]:
    """A stream of rows to train on, and its first ones, held out if any are."""
    count = keys.eval_rows if holdout else 0
    first = list(islice(StreamedRows(rows, packed, keys.min_length).read_once(), count))
    if count and not first:
        raise RetrofitError(f"{rows.source.name} is too short to fill one row: give more text or a smaller max_length")
    train = StreamedRows(rows, packed, keys.min_length, len(first))
    held_out = cut_records(first, [len(row["input_ids"]) for row in first], rows.seq_len)
    return train, held_out, f"its first {len(first)} rows", train.counts


def _mixed(splits: Sequence[Split], weights: Sequence[float], collator: PaddingCollator) -> Split:
    """Several sources as one, each row of the training parts read as often as its weight says."""
    train: list[Any] = [split.train for split in splits]
    names = [split.source.source.name for split in splits]
    for name, rows, weight in zip(names, train, weights, strict=True):
        if not round(len(rows) * weight):
            raise RetrofitError(f"mix: {name} has too few rows to be read so seldom: give it a larger weight")
    mixed = mix_rows(train, weights)
    padded = any(split.collator for split in splits)
    return replace(
        splits[0],
        train=mixed,
        held_out=mix_rows([split.held_out for split in splits], [1.0] * len(splits)),
        held_out_part=f"{splits[0].held_out_part}, likewise of {', '.join(names[1:])}",
        counts=_sum([split.counts for split in splits]),
        collator=collator if padded else None,
    )


def _sum(counts: Sequence[Counts]) -> Counts:
    return Counts(*(sum(getattr(one, field.name) for one in counts) for field in fields(Counts)))


def _unit(rows: TokenRows) -> str:
    return "conversations" if rows.format == "chat" else "documents"

"""What the trainer reads: rows cut out of tokenised records, what was left out, and the collator that pads them."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import ConcatDataset, Dataset
from transformers.trainer_pt_utils import LengthGroupedSampler

from retrofit.texts.chat import IGNORED


class Rows(Dataset):
    """Rows with ``input_ids`` and ``labels``, each a piece of a record.

    Attributes:
        parts: of each source its records, with ``input_ids`` (n,) and, where not all of it is learned, ``labels``.
        places: (N, 4) int64, of each row its part, its record, and where it begins and ends there.
    """

    def __init__(self, records: Any, places: np.ndarray) -> None:
        """``records``: those of one source. ``places``: (N, 3), without the part."""
        self.parts = [records]
        self.places = np.insert(places, 0, 0, axis=1)

    def select(self, chosen: Any) -> "Rows":
        """The rows with these numbers, or of this slice."""
        some = copy(self)
        some.places = self.places[chosen]
        return some

    def lengths(self) -> list[int]:
        """Tokens of each row, known without reading one."""
        found: list[int] = (self.places[:, 3] - self.places[:, 2]).tolist()
        return found

    def batch(self) -> tuple[Tensor, Tensor]:
        """All rows, right-padded to the longest: ids (N, T) and labels (N, T)."""
        padded = PaddingCollator(0, multiple=1)([self[index] for index in range(len(self))])
        return padded["input_ids"], padded["labels"]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        part, number, start, end = self.places[index].tolist()
        row = cut_row(self.parts[part][number], start, end)
        # its number travels along, so that the trainer can name a row whose loss is not finite
        return {**row, "row": torch.tensor(index)}


def cut_row(record: Any, start: int, end: int) -> dict[str, Tensor]:
    """``input_ids`` and ``labels`` (n,) int64 of a piece of a record."""
    ids = torch.as_tensor(record["input_ids"][start:end]).long()
    labels = torch.as_tensor(record["labels"][start:end]).long() if "labels" in record else ids
    return {"input_ids": ids, "labels": labels}


def pack_tokens(tokens: Tensor, seq_len: int) -> Rows:
    """Rows of ``seq_len`` consecutive ``tokens`` (n,); the rest that fills no row is left out."""
    starts = np.arange(0, len(tokens) - seq_len + 1, seq_len)
    return Rows([{"input_ids": tokens}], np.stack([starts * 0, starts, starts + seq_len], 1))


def cut_records(records: Any, sizes: Any, seq_len: int) -> Rows:
    """Each record of so many tokens cut into rows of ``seq_len`` tokens and a rest.

    >>> cut_records(["abcde", "fg"], [5, 2], 4).places[:, 1:].tolist()
    [[0, 0, 4], [0, 4, 5], [1, 0, 2]]
    """
    sizes = np.array(sizes, dtype=np.int64)
    rows = -(-sizes // seq_len)  # of each record
    numbers = np.repeat(np.arange(len(sizes)), rows)
    starts = (np.arange(len(numbers)) - (rows.cumsum() - rows)[numbers]) * seq_len
    return Rows(records, np.stack([numbers, starts, np.minimum(starts + seq_len, sizes[numbers])], 1))


def mix_rows(parts: Sequence[Rows], weights: Sequence[float]) -> Rows:
    """Rows of several sources, each read as often as its weight says, evenly spread over the pass.

    Args:
        weights: 2 reads every row of its part twice, 0.5 every second row once.

    >>> one, two = (pack_tokens(torch.arange(count), 1) for count in (4, 2))
    >>> mix_rows([one, two], [0.5, 1.0]).places[:, [0, 2]].tolist()
    [[0, 0], [1, 0], [0, 2], [1, 1]]
    """
    order, places = [], []
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        count, size = round(len(part) * weight), len(part)
        rows = np.arange(count) % size if count > size else np.arange(count) * size // max(count, 1)
        order.append((np.arange(count) + 0.5) / max(count, 1))
        places.append(np.insert(part.places[rows, 1:], 0, number, axis=1))
    mixed = copy(parts[0])
    mixed.parts = [part.parts[0] for part in parts]
    mixed.places = np.concatenate(places)[np.argsort(np.concatenate(order), kind="stable")]
    return mixed


@dataclass
class Counts:
    """Records of a source, and what was not trained on or held out of them."""

    read: int = 0
    empty: int = 0  # left out: no text
    short: int = 0  # left out: not longer than min_length tokens
    truncated: int = 0  # conversations cut to seq_len
    tokens_cut: int = 0  # tokens they lost
    tokens_left_over: int = 0  # at the end of the packed stream: they fill no row

    def add(self, length: int, kept: int, min_length: int) -> bool:
        """Count a record of ``length`` tokens cut to ``kept``; returns whether it is used."""
        self.read += 1
        if length <= min_length:
            self.empty += not length
            self.short += bool(length)
            return False
        self.truncated += kept < length
        self.tokens_cut += length - kept
        return True

    def clear(self) -> None:
        """Set all counts to 0."""
        for field in fields(self):
            setattr(self, field.name, 0)


class ByLength(LengthGroupedSampler):
    """Rows of like length one after the other, in an order that the seed and the number of the pass decide."""

    def __init__(self, batch: int, rows: Any, seed: int) -> None:
        known = getattr(rows, "lengths", None)
        lengths = known() if known else [len(rows[index]["input_ids"]) for index in range(len(rows))]
        super().__init__(batch, lengths=lengths)
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """accelerate says which pass begins: a resumed run must find its order again."""
        self.generator = torch.Generator().manual_seed(self.seed + epoch)


def even_rows(rows: Any, by: int) -> Dataset:
    """``rows`` with copies of the first one at the end, up to a multiple of ``by``; the copies score nothing.

    So each of several processes gets as many rows. A sampler would fill up with rows that count twice.
    """
    filler = {**rows[0], "labels": torch.full_like(torch.as_tensor(rows[0]["labels"]), IGNORED)}
    return ConcatDataset([rows, [filler] * (-len(rows) % by)])  # type: ignore[list-item]


@dataclass(frozen=True)
class PaddingCollator:
    """Pads rows on the right to the longest of the batch, rounded up to a multiple of ``multiple`` (8, as AHN's).

    Returns:
        ``input_ids``, ``labels`` (-100 in the padding) and ``attention_mask``, each (B, T) int64; ``row`` (B,), if
        the rows have one.
    """

    pad_token_id: int
    multiple: int = 8

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        width = -(-width // self.multiple) * self.multiple
        fill = {"input_ids": self.pad_token_id, "labels": IGNORED, "attention_mask": 0}
        rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
        batch = {
            key: torch.stack([pad(row[key], (0, width - len(row[key])), value=value) for row in rows])
            for key, value in fill.items()
        }
        if all("row" in row for row in rows):
            batch["row"] = torch.stack([row["row"] for row in rows])
        return batch


def longer_than(batch: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """``batch`` with (B, T > ``length``) tokens, padded on the right if it was shorter.

    Up to S + W tokens a layer does not use its memory, so the memory would get no gradient, and processes that reduce
    gradients (DDP, ZeRO) would wait for it for ever.
    """
    missing = length + 1 - batch["input_ids"].shape[1]
    if missing <= 0:
        return batch
    fill = {"input_ids": 0, "labels": IGNORED, "attention_mask": 0}
    return batch | {key: pad(batch[key], (0, missing), value=value) for key, value in fill.items() if key in batch}

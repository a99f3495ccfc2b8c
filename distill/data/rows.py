"""What the trainer reads: packed rows of one length, conversations of many, and the collator that pads these."""

from collections.abc import Generator, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset
from transformers.trainer_pt_utils import LengthGroupedSampler

from retrofit.texts.chat import IGNORED


class Rows(Dataset):
    """Rows with ``input_ids`` and ``labels``; a subclass says what is at each of its ``places``, one for a row."""

    places: Any

    def row(self, place: Any) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` (n,) int64 of the row at ``place``."""
        raise NotImplementedError

    def lengths(self) -> list[int]:
        """Tokens of each row, known without reading one."""
        raise NotImplementedError

    def head(self, count: int) -> "Rows":
        """The first ``count`` rows, or all if there are fewer."""
        some = copy(self)
        some.places = self.places[:count]
        return some

    def batch(self) -> tuple[Tensor, Tensor | None]:
        """All rows, right-padded to the longest: ids (N, T) and labels (N, T), None if every token counts."""
        padded = PaddingCollator(0, multiple=1)([self[index] for index in range(len(self))])
        return padded["input_ids"], padded["labels"]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # its number travels along, so that the trainer can name a row whose loss is not finite
        return {**self.row(self.places[index]), "row": torch.tensor(index)}


class PackedRows(Rows):
    """Rows of ``seq_len`` consecutive tokens of one long stream; the rest that fills no row is left out."""

    def __init__(self, tokens: Tensor, seq_len: int) -> None:
        """``tokens``: (n,) token ids, in order."""
        count = len(tokens) // seq_len
        self.places = tokens[: count * seq_len].view(count, seq_len)

    def row(self, place: Tensor) -> dict[str, Tensor]:
        return text_item(place)

    def batch(self) -> tuple[Tensor, None]:
        return self.places.long(), None

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return self.places.numel()

    def lengths(self) -> list[int]:
        return [self.places.shape[1]] * len(self)


class ChatRows(Rows):
    """Conversations of different lengths, each a row, labelled where the assistant speaks and -100 elsewhere."""

    def __init__(self, rows: Any, sizes: Sequence[int]) -> None:
        """``rows``: of :class:`~retrofit.texts.tokens.TokenRows`, of ``sizes`` tokens; a list, or a
        ``datasets.Dataset`` in numpy format."""
        self.rows, self.sizes, self.places = rows, sizes, range(len(rows))

    def row(self, place: int) -> dict[str, Tensor]:
        return chat_item(self.rows[place])

    def lengths(self) -> list[int]:
        return list(self.sizes[: len(self)])


class DocumentRows(Rows):
    """Documents that are not packed, each cut into rows of ``seq_len`` tokens and a rest."""

    def __init__(self, documents: Sequence[Any], sizes: Sequence[int], seq_len: int) -> None:
        """``documents``: of :class:`~retrofit.texts.tokens.TokenRows`, of ``sizes`` tokens."""
        self.documents = documents
        # the document, and where in it a row begins and ends
        self.places = [
            (number, at, min(at + seq_len, size)) for number, size in enumerate(sizes) for at in range(0, size, seq_len)
        ]

    def row(self, place: tuple[int, int, int]) -> dict[str, Tensor]:
        number, start, end = place
        return text_item(torch.as_tensor(self.documents[number]["input_ids"])[start:end])

    def lengths(self) -> list[int]:
        return [end - start for _, start, end in self.places]


class MixedRows(Rows):
    """Rows of several sources, each read as often as its weight says, evenly spread over the pass.

    >>> MixedRows([["a", "b", "c", "d"], ["x", "y"]], [0.5, 1.0]).places
    [(0, 0), (1, 0), (0, 2), (1, 1)]
    """

    def __init__(self, parts: Sequence[Any], weights: Sequence[float]) -> None:
        """``weights``: 2 reads every row of its part twice, 0.5 every second row once."""
        self.parts = parts
        self.counts = [round(len(part) * weight) for part, weight in zip(parts, weights, strict=True)]
        places = (
            ((i + 0.5) / count, number, i % size if count > size else i * size // count)
            for number, (count, size) in enumerate(zip(self.counts, map(len, parts), strict=True))
            for i in range(count)
        )
        self.places = [(number, index) for _, number, index in sorted(places)]

    def row(self, place: tuple[int, int]) -> dict[str, Tensor]:
        part, row = place
        found: dict[str, Tensor] = self.parts[part][row]
        return found

    def lengths(self) -> list[int]:
        found = [part.lengths() for part in self.parts]
        return [found[part][row] for part, row in self.places]


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


class EvenRows(Dataset):
    """``rows`` with copies of the first one at the end, up to a multiple of ``by``; the copies score nothing.

    So each of several processes gets as many rows. A sampler would fill up with rows that count twice.
    """

    def __init__(self, rows: Any, by: int) -> None:
        self.rows, self.count = rows, -(-len(rows) // by) * by

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < len(self.rows):
            return self.rows[index]
        row = self.rows[0]
        return {**row, "labels": torch.full_like(torch.as_tensor(row["labels"]), IGNORED)}


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
        shape = (len(rows), -(-width // self.multiple) * self.multiple)
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id),
            "labels": torch.full(shape, IGNORED),
            "attention_mask": torch.zeros(shape, dtype=torch.long),
        }
        for number, row in enumerate(rows):
            length = len(row["input_ids"])
            batch["input_ids"][number, :length] = row["input_ids"]
            batch["labels"][number, :length] = row["labels"]
            batch["attention_mask"][number, :length] = 1
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


def text_item(ids: Tensor) -> dict[str, Tensor]:
    """``input_ids`` and ``labels`` (n,) int64 of a text, all of which is learned."""
    return {"input_ids": ids.long(), "labels": ids.long()}


def chat_item(row: Any) -> dict[str, Tensor]:
    """``input_ids`` and ``labels`` (n,) int64 of one conversation."""
    ids = torch.as_tensor(row["input_ids"]).long()
    return {"input_ids": ids, "labels": ids.masked_fill(~torch.as_tensor(row["answer"]), IGNORED)}


def pack(documents: Iterable[np.ndarray], seq_len: int) -> Generator[dict[str, Tensor], None, int]:
    """``input_ids`` and ``labels`` (seq_len,) int64 of consecutive tokens, as rows fill.

    Returns:
        How many tokens are left over at the end, which fill none.
    """
    parts: list[np.ndarray] = []
    waiting = 0
    for tokens in documents:
        parts.append(tokens)
        waiting += len(tokens)
        if waiting >= seq_len:
            stream = torch.from_numpy(np.concatenate(parts)).long()
            whole = waiting // seq_len * seq_len
            for row in stream[:whole].view(-1, seq_len):
                yield {"input_ids": row, "labels": row}
            parts, waiting = [stream[whole:].numpy()], waiting - whole
    return waiting

"""Rows read while they are trained on, for what fits neither memory nor disk."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from distill.data.counts import Counts
from distill.data.rows import chat_item, pack, text_item
from patches.errors import RetrofitError
from retrofit.texts.tokens import Row, TokenRows

Item = dict[str, Tensor]


@dataclass(frozen=True)
class Stream:
    """The rows of a source in its order, tokenised on the way.

    Attributes:
        min_length: records of at most so many tokens are left out.
    """

    rows: TokenRows
    min_length: int

    def items(self, counts: Counts) -> Iterator[Item]:
        """What the trainer reads: conversations, or documents packed or not. ``counts`` is kept up as they pass."""
        if self.rows.format == "chat":
            yield from map(chat_item, self._kept(counts))
        elif self.rows.apart:
            for row in self._kept(counts):
                yield from map(text_item, torch.as_tensor(row["input_ids"]).split(self.rows.seq_len))
        else:
            left_over = yield from pack((row["input_ids"] for row in self._kept(counts)), self.rows.seq_len)
            counts.tokens_left_over += left_over

    def _kept(self, counts: Counts) -> Iterator[Row]:
        for row in self.rows:
            if counts.add(row["length"], len(row["input_ids"]), self.min_length):
                yield row


class StreamedRows(IterableDataset):
    """A stream without its first ``skip`` rows, over and over.

    It does not end, so that the number of a batch says where it stands: a resumed run passes over as many batches as
    it had read and goes on exactly there. All processes read the whole stream and take their batches from it in turn
    (accelerate's ``IterableDatasetShard``), so that any number of them sees the rows that one would.

    Attributes:
        counts: what has been read and left out since iteration began, the skipped rows included.
    """

    def __init__(self, items: Callable[[Counts], Iterator[Item]], skip: int, name: str) -> None:
        self.items, self.skip, self.name = items, skip, name
        self.counts = Counts()

    def __iter__(self) -> Iterator[Item]:
        self.counts.clear()
        while True:
            row = None
            for row in islice(self.items(self.counts), self.skip, None):
                yield row
            if row is None:
                raise RetrofitError(
                    f"{self.name} is too short: it has no row besides the {self.skip} that are held out: set "
                    "smaller eval_rows"
                )

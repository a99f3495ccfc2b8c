"""Rows read while they are trained on, for what fits neither memory nor disk."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from distill.data.rows import Counts, cut_row
from patches.errors import RetrofitError
from retrofit.texts.tokens import TokenRows


class StreamedRows(IterableDataset):
    """A stream without its first ``skip`` rows, over and over.

    It does not end, so that the number of a batch says where it stands: a resumed run passes over as many batches as
    it had read and goes on exactly there. All processes read the whole stream and take their batches from it in turn
    (accelerate's ``IterableDatasetShard``), so that any number of them sees the rows that one would.

    Attributes:
        counts: what has been read and left out since iteration began, the skipped rows included.
    """

    def __init__(self, rows: TokenRows, packed: bool, min_length: int, skip: int = 0) -> None:
        """``packed``: whether documents are joined and cut; ``min_length``: shorter ones are left out."""
        self.rows, self.packed, self.min_length, self.skip = rows, packed, min_length, skip
        self.counts = Counts()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.counts.clear()
        while True:
            row = None
            for row in islice(self.read_once(), self.skip, None):
                yield row
            if row is None:
                name = self.rows.source.name
                raise RetrofitError(
                    f"{name} is too short: it has no row besides the {self.skip} that are held out: set "
                    "smaller eval_rows"
                )

    def read_once(self) -> Iterator[dict[str, Tensor]]:
        """The rows of one pass, the first ones included."""
        length = self.rows.seq_len
        waiting = np.empty(0, dtype=np.int64)
        for record in self._kept():
            if self.packed:
                tokens = np.concatenate([waiting, record["input_ids"]])
                whole = len(tokens) // length * length
                record, waiting = {"input_ids": tokens[:whole]}, tokens[whole:]
            for start in range(0, len(record["input_ids"]), length):
                yield cut_row(record, start, start + length)
        self.counts.tokens_left_over += len(waiting)

    def _kept(self) -> Iterator[dict[str, Any]]:
        for record in self.rows:
            if self.counts.add(record["length"], len(record["input_ids"]), self.min_length):
                yield record

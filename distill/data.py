"""Text in, rows of token ids out: read, tokenise once, pack into rows of ``seq_len``, keep the last part held out."""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from distill.sources import documents
from patches.errors import RetrofitError

TOKENIZER_BATCH = 1000  # documents handed to the tokenizer at once


class PackedRows(Dataset):
    """Rows of ``seq_len`` consecutive tokens of one long stream; the rest that fills no row is left out."""

    def __init__(self, tokens: Tensor, seq_len: int) -> None:
        """``tokens``: (n,) token ids, in order."""
        count = len(tokens) // seq_len
        self.rows = tokens[: count * seq_len].view(count, seq_len)

    def head(self, count: int) -> "PackedRows":
        """The first ``count`` rows, or all if there are fewer."""
        return PackedRows(self.rows[:count].flatten(), self.rows.shape[1])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index].long()
        # its number travels along, so that the trainer can name a row whose loss is not finite
        return {"input_ids": row, "labels": row, "row": torch.tensor(index)}


@dataclass(frozen=True)
class Split:
    """What a run trains on and what it is measured on."""

    train: PackedRows
    held_out: PackedRows
    tokens: int  # in the whole stream


def load_rows(source: str, tokenizer: PreTrainedTokenizerBase, *, seq_len: int, holdout: float = 0.1) -> Split:
    """Read ``source``, tokenise it and split it: the last ``holdout`` of the tokens is never trained on.

    Args:
        source: anything :func:`distill.sources.documents` reads: a text, JSONL or Parquet file, a folder written by
            ``datasets``, a dataset id of the Hub.
        seq_len: tokens per row.
        holdout: share of the tokens held out, from the end.

    Raises:
        RetrofitError: the source cannot be read, or holds too few tokens for one row on each side.
    """
    tokens = tokenize(source, tokenizer)
    cut = len(tokens) - round(len(tokens) * holdout)
    split = Split(PackedRows(tokens[:cut], seq_len), PackedRows(tokens[cut:], seq_len), len(tokens))
    if not len(split.train) or not len(split.held_out):
        needed = int(np.ceil(max(seq_len / holdout, seq_len / (1 - holdout))))
        raise RetrofitError(
            f"{source} is too short: it holds {len(tokens)} tokens, and at least {needed} are needed for rows of "
            f"{seq_len} with {holdout:.0%} held out"
        )
    return split


def tokenize(source: str, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """All documents of ``source`` as one (n,) int32 stream, an end-of-sequence token after each if there is one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts: list[np.ndarray] = []
    stream = documents(source)
    while texts := list(islice(stream, TOKENIZER_BATCH)):
        # verbose=False: a document longer than the model's context is no mistake here, rows are cut from it
        encoded: Any = tokenizer(texts, return_attention_mask=False, verbose=False)
        parts.extend(np.asarray([*ids, *end], dtype=np.int32) for ids in encoded["input_ids"])
    if not parts:
        raise RetrofitError(f"{source} is empty: there is no text in it to distil on")
    return torch.from_numpy(np.concatenate(parts))

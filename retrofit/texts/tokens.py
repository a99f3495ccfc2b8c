"""Records in, token ids out: documents and conversations tokenised, once, and kept in the cache of ``datasets``."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from patches.errors import RetrofitError
from retrofit.files import at_home
from retrofit.texts.chat import ChatTokenizer, cut
from retrofit.texts.sources import Source, open_source, reading
from retrofit.untrusted import checked_text

COLUMNS = {"text": ["text"], "chat": ["messages", "conversations"]}
BESIDE = ("system", "tools")  # what some ShareGPT data keep beside a conversation; it is not read, and that is said
BATCH = {"text": 1000, "chat": 64}  # records handed to the tokenizer at once
LAYOUT = 1  # to be raised when the rows written for the same input change

Row = dict[str, Any]


@dataclass(frozen=True)
class TokenRows:
    """The records of a source as rows of token ids, in the source's order, none left out.

    Iterating reads and tokenises. A row holds ``input_ids`` (n,) int32; of a conversation, cut to ``seq_len``, also
    ``answer`` (n,) bool, the assistant's tokens; and ``length``, its tokens before it was cut (0 for an empty text).

    Attributes:
        column: ``text``, ``messages`` or ``conversations``.
        seq_len: most tokens of a conversation; documents are not cut.
        max_samples: how many records are read; all by default.
        apart: whether documents are to become rows of their own, instead of being packed.
        batch: records handed to the tokenizer at once; by default many.
    """

    source: Source
    column: str
    tokenizer: PreTrainedTokenizerBase
    seq_len: int
    max_samples: int | None = None
    apart: bool = False
    batch: int | None = None

    @property
    def packed(self) -> bool:
        """Whether the rows are still to be joined and cut."""
        return self.format == "text" and not self.apart

    @property
    def format(self) -> str:
        """``text`` or ``chat``."""
        return "text" if self.column in COLUMNS["text"] else "chat"

    @cached_property
    def chat(self) -> ChatTokenizer:
        """The tokenizer with its chat template; raises RetrofitError if it has none."""
        return ChatTokenizer(self.tokenizer)

    def __iter__(self) -> Iterator[Row]:
        records = islice(self.source.read(self.column), self.max_samples)
        while batch := list(islice(records, self.batch or BATCH[self.format])):
            yield from self._conversations(batch) if self.format == "chat" else self._documents(batch)

    def _documents(self, batch: list[Any]) -> Iterator[Row]:
        """An end-of-sequence token, if there is one, ends every document but empty ones."""
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        texts = [checked_text(value, where, repr(self.column)) for where, value in batch]
        # verbose=False: a document longer than the model's context is no mistake here, rows are cut from it
        encoded: Any = self.tokenizer(texts, return_attention_mask=False, verbose=False)
        for text, ids in zip(texts, encoded["input_ids"], strict=True):
            row = np.asarray([*ids, *end] if text.strip() else [], dtype=np.int32)
            yield {"input_ids": row, "length": len(row)}

    def _conversations(self, batch: list[Any]) -> Iterator[Row]:
        for ids, answer in self.chat.encode(batch):
            keep = cut(answer, self.seq_len)
            yield {"input_ids": ids[keep], "answer": answer[keep], "length": len(ids)}

    def cached(self) -> Any:
        """All rows as a ``datasets.Dataset`` on disk, written by the first call and found again by later ones.

        It lies in the cache of ``datasets`` (``HF_DATASETS_CACHE``) under a fingerprint of the source, the tokenizer,
        its chat template and the options; half-written ones are not taken for whole.

        Raises:
            RetrofitError: a record cannot be read.
        """
        import datasets

        if next(self.source.read(self.column), None) is None:
            raise RetrofitError(f"{self.source.name} is empty: there is nothing in it to learn from")
        columns = {"input_ids": datasets.List(datasets.Value("int32")), "length": datasets.Value("int32")}
        if self.format == "chat":
            columns["answer"] = datasets.List(datasets.Value("bool"))
        features = datasets.Features(columns)
        with _bars_on_a_terminal_only():
            try:
                return datasets.Dataset.from_generator(
                    self.__iter__, features=features, fingerprint=self._fingerprint()
                )
            except (OSError, datasets.exceptions.DatasetGenerationError) as error:
                cause = error.__cause__ or error
                if isinstance(cause, OSError):
                    with reading(self.source.name):
                        raise cause from None
                raise cause from None

    def _fingerprint(self) -> str:
        parts: list[Any] = [LAYOUT, self.source.identity, self.column, self.max_samples, _identity(self.tokenizer)]
        if self.format == "chat":
            parts += [self.seq_len, self.chat.template, sorted(self.tokenizer.special_tokens_map.items())]
        return sha256(json.dumps(parts).encode()).hexdigest()[:32]


def find_column(source: Source, data_format: str) -> str:
    """The column of ``source`` that is learned: the text's or the conversations'.

    Args:
        data_format: ``text``, ``chat``, or ``auto``, by the columns there are.

    Raises:
        RetrofitError: there is no such column, or with ``auto`` both.
    """
    found = {kind: [name for name in names if name in source.columns] for kind, names in COLUMNS.items()}
    kinds = [kind for kind in found if found[kind]] if data_format == "auto" else [data_format]
    if len(kinds) > 1:
        both = " and ".join(repr(found[kind][0]) for kind in kinds)
        raise RetrofitError(f"{source.name} has both {both}: set data_format to text or chat")
    if not kinds or not found[kinds[0]]:
        wanted = [repr(name) for kind in kinds or COLUMNS for name in COLUMNS[kind]]
        there = ", ".join(map(repr, source.columns))
        if not there:
            raise RetrofitError(f"{source.name} is empty: there is nothing in it to learn from")
        raise RetrofitError(
            f"{source.name} has no column {' or '.join(wanted)}, only {there}: rename the column to learn from"
        )
    unread = [name for name in BESIDE if kinds[0] == "chat" and name in source.columns]
    if unread:
        names = " and ".join(map(repr, unread))
        print(f"note: {source.name} also has {names}, which is not read", file=sys.stderr)
    return found[kinds[0]][0]


def read_sequences(source: str, tokenizer: Any, *, length: int = 4096, count: int | None = None) -> Tensor:
    """(N, ``length``) rows of the texts of ``source``, cut one after the other; what is left of a text is left out.

    They are the tokens that `retrofit distill` reads: an end-of-sequence token, if there is one, ends each document.

    Args:
        source: anything :func:`retrofit.texts.sources.open_source` opens, documents or conversations; of a dataset the
            split ``test``, if there is one. PG-19's ``test`` as published is a folder of texts.
        length: tokens per row.
        count: rows at most.

    Raises:
        RetrofitError: nothing there, it cannot be read, or no text is as long as one row.
    """
    opened = open_source(source, split=None, streaming=not at_home(source).exists())
    column = find_column(opened, "text" if "text" in opened.columns else "auto")
    rows: list[Tensor] = []
    for text in TokenRows(opened, column, tokenizer, seq_len=sys.maxsize, batch=1):
        pieces = torch.from_numpy(text["input_ids"]).long().split(length)
        rows += (piece for piece in pieces if len(piece) == length)
        if count is not None and len(rows) >= count:
            break
    if not rows:
        raise RetrofitError(f"{source} holds no text of {length} tokens: give longer texts, or read shorter rows")
    return torch.stack(rows[:count])


def _identity(tokenizer: Any) -> Any:
    """What a tokenizer does to a text; not how it would pad or cut, which changes with every call."""
    if not tokenizer.is_fast:
        from datasets.fingerprint import Hasher

        return Hasher.hash(tokenizer)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    return {**backend, "truncation": None, "padding": None}, tokenizer.eos_token_id


@contextmanager
def _bars_on_a_terminal_only() -> Iterator[None]:
    import datasets

    hide = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            datasets.enable_progress_bars()

"""Records in, token ids out: documents and conversations tokenised, once, and kept in the cache of ``datasets``."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patches.errors import RetrofitError
from retrofit.texts.chat import IGNORED, ChatTokenizer, Record, cut
from retrofit.texts.sources import WHERE, Source, open_source, reading
from retrofit.untrusted import checked_text

COLUMNS = {"text": ["text"], "chat": ["messages", "conversations"]}
BESIDE = ("system", "tools")  # what some ShareGPT data keep beside a conversation; it is not read, and that is said
BATCH = {"text": 1000, "chat": 64}  # records handed to the tokenizer at once
LAYOUT = 2  # to be raised when the rows written for the same input change


@dataclass(frozen=True)
class TokenRows:
    """The records of a source as rows of token ids, in the source's order, none left out.

    A row holds ``input_ids`` (n,); of a conversation, cut to ``seq_len``, also ``labels`` (n,), -100 but for the
    assistant's tokens; and ``length``, its tokens before it was cut (0 for an empty text).

    Attributes:
        source: where they come from.
        format: ``text`` or ``chat``.
        seq_len: most tokens of a conversation; documents are not cut.
        data: the rows, an ``IterableDataset`` that tokenises while it is read.
        identity: what it is a function of, besides the source.
    """

    source: Source
    format: str
    seq_len: int
    data: Any
    identity: list[Any]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = iter(self.data)
        while True:
            with reading(self.source.name):
                row = next(rows, None)
            if row is None:
                return
            yield row

    def cached(self) -> Any:
        """All rows as a ``datasets.Dataset`` on disk, written by the first call and found again by later ones.

        It lies in the cache of ``datasets`` (``HF_DATASETS_CACHE``) under a fingerprint of the source, the tokenizer,
        its chat template and the options; half-written ones are not taken for whole.

        Raises:
            RetrofitError: a record cannot be read.
        """
        import datasets

        key = sha256(json.dumps([LAYOUT, self.source.identity, self.identity]).encode()).hexdigest()[:32]
        numbers = datasets.List(datasets.Value("int32"))
        columns = {"input_ids": numbers, "length": datasets.Value("int32")}
        columns |= {"labels": numbers} if self.format == "chat" else {}
        with reading(self.source.name):
            try:
                return datasets.Dataset.from_generator(
                    self.__iter__, features=datasets.Features(columns), fingerprint=key
                ).with_format("numpy")
            except datasets.exceptions.DatasetGenerationError as error:
                raise error.__cause__ or error from None
            except ValueError as error:
                if "corresponds to no data" not in str(error):
                    raise
                raise RetrofitError(f"{self.source.name} is empty: there is nothing in it to learn from") from None


def read_tokens(
    source: str,
    tokenizer: Any,
    *,
    seq_len: int,
    data_format: str = "auto",
    max_samples: int | None = None,
    batch: int | None = None,
    **where: Any,
) -> TokenRows:
    """The rows of ``source``, which is opened.

    Args:
        source: anything :func:`retrofit.texts.sources.open_source` opens; ``where`` are its other arguments.
        data_format: ``text``, ``chat``, ``auto``, by the columns there are, or ``any``: text where there is some.
        max_samples: how many records are read; all by default.
        batch: records handed to the tokenizer at once; by default many.

    Raises:
        RetrofitError: the source cannot be read, or has no column to learn from.
    """
    opened = open_source(source, **where)
    with reading(source):
        columns = list(opened.data.column_names or next(iter(opened.data), {}))
    column = find_column(source, columns, data_format)
    kind = "text" if column in COLUMNS["text"] else "chat"
    known = [column, max_samples, _identity(tokenizer)]
    encode = partial(_documents, tokenizer)
    if kind == "chat":
        chat = ChatTokenizer(tokenizer)
        known += [seq_len, chat.template, sorted(tokenizer.special_tokens_map.items())]
        encode = partial(_conversations, chat, seq_len)

    def rows(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        places = batch.get(WHERE) or [f"{source}, row {index}" for index in indices]
        return encode(column, list(zip(places, batch[column], strict=True)))

    taken = [name for name in columns if name in (column, WHERE)]
    data = opened.data.select_columns(taken)
    data = data if max_samples is None else data.take(max_samples)
    data = data.map(rows, batched=True, with_indices=True, batch_size=batch or BATCH[kind], remove_columns=taken)
    return TokenRows(opened, kind, seq_len, data, known)


def _documents(tokenizer: Any, column: str, records: list[Record]) -> dict[str, list[Any]]:
    """An end-of-sequence token, if there is one, ends every document but empty ones."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = [checked_text(value, where, repr(column)) for where, value in records]
    # verbose=False: a document longer than the model's context is no mistake here, rows are cut from it
    encoded = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
    rows = [[*ids, *end] if text.strip() else [] for text, ids in zip(texts, encoded, strict=True)]
    return {"input_ids": [np.array(row, dtype=np.int32) for row in rows], "length": [len(row) for row in rows]}


def _conversations(chat: ChatTokenizer, seq_len: int, _: str, records: list[Record]) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {"input_ids": [], "labels": [], "length": []}
    for ids, answer in chat.encode(records):
        keep = cut(answer, seq_len)
        rows["input_ids"].append(ids[keep])
        rows["labels"].append(np.where(answer, ids, IGNORED)[keep])
        rows["length"].append(len(ids))
    return rows


def find_column(name: str, columns: list[str], data_format: str) -> str:
    """The one of ``columns`` that is learned: the text's or the conversations'.

    Raises:
        RetrofitError: there is no such column, or with ``auto`` both.
    """
    found = {kind: [one for one in names if one in columns] for kind, names in COLUMNS.items()}
    kinds = [kind for kind in found if found[kind]] if data_format in ("auto", "any") else [data_format]
    if len(kinds) > 1 and data_format == "auto":
        both = " and ".join(repr(found[kind][0]) for kind in kinds)
        raise RetrofitError(f"{name} has both {both}: set data_format to text or chat")
    if not kinds or not found[kinds[0]]:
        wanted = [repr(one) for kind in kinds or COLUMNS for one in COLUMNS[kind]]
        there = ", ".join(repr(one) for one in columns if one != WHERE)
        if not there:
            raise RetrofitError(f"{name} is empty: there is nothing in it to learn from")
        named = " or ".join(wanted)
        raise RetrofitError(f"{name} has no column {named}, only {there}: rename the column to learn from")
    unread = [one for one in BESIDE if kinds[0] == "chat" and one in columns]
    if unread:
        print(f"note: {name} also has {' and '.join(map(repr, unread))}, which is not read", file=sys.stderr)
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
    how: dict[str, Any] = {"streaming": True, "split": None, "data_format": "any", "batch": 1}
    rows: list[Tensor] = []
    for text in read_tokens(source, tokenizer, seq_len=sys.maxsize, **how):
        pieces = torch.as_tensor(text["input_ids"]).long().split(length)
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

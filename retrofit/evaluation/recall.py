"""Keyed recall with several bindings outstanding, on any tokenizer: tokens bound at random, asked for after filler.

``k1 v1 k2 v2 ... kn vn``, filler, then the pairs again in another order: at each key of the second half the model
should predict the value it was bound to. Random tokens keep the text itself from helping: nothing but memory is asked.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from patches.errors import RetrofitError
from retrofit.evaluation.contenders import Contender, plain_tokens, ready
from retrofit.evaluation.scores import CHUNK, cached_readers, scored_pieces
from retrofit.evaluation.store import ResultStore
from retrofit.table import show_progress


def score_recall(
    rows: Sequence[Contender],
    tokenizer: Any,
    store: ResultStore,
    *,
    lengths: Sequence[int],
    bindings: Sequence[int] = (1, 4, 16),
    samples: int = 5,
    seed: int = 0,
    chunk: int = CHUNK,
) -> None:
    """Score every row on the same sequences; ``store`` gets ``kind="recall"`` with the share of values recalled.

    Args:
        lengths: tokens of a sequence, bindings, filler and questions together.
        bindings: how many pairs are outstanding when the questions begin.
        samples: sequences per length and number of bindings.

    Raises:
        RetrofitError: a length too short for that many bindings, or too few tokens to draw from.
    """
    vocabulary = check_bindings(rows, tokenizer, lengths, bindings)
    with ready(rows):
        for length, count, number in show_progress(list(product(lengths, bindings, range(samples))), "recall"):
            key = f"recall/{length}-{count}-{number}"
            if key not in store:
                generator = torch.Generator().manual_seed(hash((seed, length, count, number)) % 2**63)
                ids, asked = sequence(vocabulary, length, count, generator)
                scores = _recalled(rows, ids, asked, chunk)
                store.add(key, kind="recall", length=length, bindings=count, scores=scores)


def check_bindings(
    rows: Sequence[Contender], tokenizer: Any, lengths: Sequence[int], bindings: Sequence[int]
) -> Tensor:
    """The ids that are bound and fill up, if there are enough of them for every sequence.

    Raises:
        RetrofitError: there are not, or a length is too short for that many bindings.
    """
    vocabulary = plain_tokens(tokenizer, rows[0].model.config.vocab_size)
    for length, count in product(lengths, bindings):
        if length < 4 * count + 1 or len(vocabulary) < 3 * count:
            raise RetrofitError(
                f"{count} bindings do not fit into {length} tokens of {len(vocabulary)} different ones: ask for fewer, "
                "or for a greater length"
            )
    return vocabulary


def sequence(vocabulary: Tensor, length: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``(length,)`` ids, and the positions ``(count,)`` of the keys whose next token is to be recalled."""
    drawn = vocabulary[torch.randperm(len(vocabulary), generator=generator)]
    pairs, rest = drawn[: 2 * count].view(count, 2), drawn[2 * count :]  # filler repeats none of the bound tokens
    filler = rest[torch.randint(len(rest), (length - 4 * count,), generator=generator)]
    again = pairs[torch.randperm(count, generator=generator)]
    ids = torch.cat([pairs.flatten(), filler, again.flatten()])
    return ids, torch.arange(length - 2 * count, length, 2)


def _recalled(rows: Sequence[Contender], ids: Tensor, asked: Tensor, chunk: int) -> dict[str, float]:
    """For each row, the share of the positions ``asked`` after which the likeliest token is the right one."""
    head, ids = rows[0].model.get_output_embeddings(), ids[None].to(rows[0].model.device)
    where = torch.zeros_like(ids[:, 1:], dtype=torch.bool)
    where[0, asked] = True
    right = {row.name: 0 for row in rows}
    readers = cached_readers({row.name: row.model for row in rows})
    for _, scores in scored_pieces(readers, head, ids, 0, chunk, where):
        for name, (_, _, correct) in scores.items():
            right[name] += int(correct.sum())
    return {name: count / len(asked) for name, count in right.items()}

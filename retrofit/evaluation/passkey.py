"""Passkey retrieval: a number of five digits hidden in repeated noise (Landmark Attention, arXiv 2305.16300, 4.2)."""

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from patches.errors import RetrofitError
from retrofit.chat import chat_prompt
from retrofit.evaluation.contenders import Contender, ready
from retrofit.evaluation.scores import CHUNK, prefill
from retrofit.evaluation.store import ResultStore
from retrofit.generation import respond
from retrofit.table import show_progress

OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you about "
    "the important information there."
)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ANSWER_TOKENS = 16
SAMPLE = 64  # lines of noise from which the tokens of one are estimated


def make_prompt(tokenizer: Any, length: int, depth: float, dice: random.Random, chat: bool = False) -> tuple[str, str]:
    """The longest prompt that leaves room for its answer in ``length`` tokens, and the key that it hides.

    Args:
        tokenizer: counts tokens, and applies its chat template if ``chat``.
        length: tokens of prompt and answer together.
        depth: where the key is hidden, 0 (beginning) to 1 (end).
        dice: draws the key.

    Raises:
        RetrofitError: the question alone is longer than that, or there is no chat template.
    """
    key = str(dice.randrange(10_000, 100_000))
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."

    def prompt(lines: int) -> str:
        filler = [NOISE] * lines
        filler.insert(round(depth * lines), needle)
        question, begun = f"{OPENING}\n{' '.join(filler)}\nWhat is the pass key?", "The pass key is"
        return chat_prompt(tokenizer, question, begun) if chat else f"{question} {begun}"

    def count_tokens(lines: int) -> int:
        return len(tokenizer(prompt(lines), verbose=False)["input_ids"])

    bare, room = count_tokens(0), length - ANSWER_TOKENS
    if bare > room:
        raise RetrofitError(f"passkey does not fit into {length} tokens: ask for {bare + ANSWER_TOKENS} or more")
    lines = (room - bare) * SAMPLE // (count_tokens(SAMPLE) - bare)
    while count_tokens(lines) > room:
        lines -= 1
    return prompt(lines), key


def make_prompts(
    tokenizer: Any,
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    samples: int = 5,
    seed: int = 0,
    chat: bool = False,
) -> dict[tuple[int, float, int], tuple[str, str]]:
    """:func:`make_prompt` for every length, depth and number of a sample.

    Raises:
        RetrofitError: as :func:`make_prompt`.
    """
    return {
        (length, depth, number): make_prompt(
            tokenizer, length, depth, random.Random(f"{seed}-passkey-{length}-{depth}-{number}"), chat
        )
        for length, depth, number in product(lengths, depths, range(samples))
    }


def score_passkey(
    rows: Sequence[Contender],
    tokenizer: Any,
    store: ResultStore,
    prompts: dict[tuple[int, float, int], tuple[str, str]],
    *,
    chunk: int = CHUNK,
) -> None:
    """Ask every row; ``store`` gets ``kind="passkey"`` with the answers and whether the key is in them."""
    with ready(rows):
        for (length, depth, number), (prompt, key) in show_progress(prompts.items(), "passkey"):
            name = f"passkey/{length}-{depth}-{number}"
            if name not in store:
                ids = tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"].to(rows[0].model.device)
                answers = {row.name: answer(row.model, tokenizer, ids, chunk) for row in rows}
                scores = {row: float(key in said) for row, said in answers.items()}
                store.add(name, kind="passkey", length=length, depth=depth, scores=scores, answers=answers)


@torch.no_grad()
def answer(model: Any, tokenizer: Any, ids: Tensor, chunk: int = CHUNK) -> str:
    """The model's greedy answer to ``ids`` (1, T), which it reads ``chunk`` tokens at a time."""
    _, cache = prefill(model, ids[:, :-1], chunk)
    tokens = respond(model, tokenizer, ids, max_new_tokens=ANSWER_TOKENS, cache=cache)
    return str(tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True))

"""Filler text of a wanted length in tokens, with sentences hidden in it at wanted depths."""

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

MOST = 2**24  # sentences of filler that are tried

# RULER's noise (arXiv 2404.06654, section 3): one line, over and over
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# parts of made-up sentences: filler that does not repeat where the user gives no text of his own
SUBJECTS = ("the baker", "a sailor", "our neighbour", "the old clock", "that river", "her brother", "a grey cat")
VERBS = ("remembers", "follows", "repairs", "describes", "avoids", "carries", "paints", "questions")
OBJECTS = ("the harbour", "an empty room", "his letters", "the northern road", "a chair", "the market", "two lamps")
ENDINGS = ("in winter", "before noon", "without hurry", "for a while", "as usual", "in silence", "once a year")


def noise() -> Callable[[int], str]:
    """The i-th sentence of a haystack of noise."""
    return lambda _index: NOISE


def invented(seed: int) -> Callable[[int], str]:
    """The i-th of sentences put together at random."""

    def sentence(index: int) -> str:
        dice = random.Random(f"{seed}-{index}")
        words = " ".join(dice.choice(part) for part in (SUBJECTS, VERBS, OBJECTS, ENDINGS))
        return words[0].upper() + words[1:] + "."

    return sentence


def sentences_of(text: str) -> Callable[[int], str]:
    """The i-th sentence of ``text``, from the beginning again where it ends."""
    sentences = [part.strip() + "." for part in text.replace("\n", " ").split(".") if part.strip()]
    return lambda index: sentences[index % len(sentences)]


def haystack(sentence: Callable[[int], str], hidden: Sequence[tuple[float, str]], count: int) -> list[str]:
    """``count`` sentences of filler, and between them what is hidden: ``(depth from 0 to 1, text)``."""
    parts = [sentence(index) for index in range(count)]
    for depth, text in sorted(hidden, key=lambda one: one[0], reverse=True):
        parts.insert(round(depth * count), text)
    return parts


def longest(prompt: Callable[[int], str], tokenizer: Any, length: int) -> str:
    """The longest of ``prompt(0)``, ``prompt(1)``, ... of at most ``length`` tokens; the first if all have more.

    They must grow with their argument.
    """
    high = 1
    while high <= MOST and count_tokens(tokenizer, prompt(high)) <= length:
        high *= 2
    numbers = range(high // 2, min(high, MOST + 1))
    fits = bisect_right(numbers, length, key=lambda at: count_tokens(tokenizer, prompt(at)) if at else 0)
    return prompt(numbers[max(0, fits - 1)])


def count_tokens(tokenizer: Any, text: str) -> int:
    """Tokens of a prompt, special ones included."""
    return len(tokenizer(text, verbose=False)["input_ids"])

"""Needles in a haystack: passkey retrieval, and the eight retrieval tasks of RULER (arXiv 2404.06654, section 3.1).

A needle says what the special magic number (or uuid) of a key is; the question asks for one or several keys. The tasks
differ in what the haystack is, in what keys and values are, and in how many needles are hidden and asked for.
"""

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from patches.errors import RetrofitError, one_of
from retrofit.chat import chat_prompt
from retrofit.evaluation.haystack import count_tokens, haystack, invented, longest, noise, sentences_of
from retrofit.evaluation.metrics import string_match_all
from retrofit.evaluation.samples import Sample, Task


@dataclass(frozen=True)
class Variant:
    """One task of RULER: the haystack, the kinds of key and value, and how many keys, values per key and questions."""

    haystack: str  # "noise", "text" or "needles"
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


# RULER's configurations (its appendix B); "text" stands for its essays
VARIANTS = {
    "niah_single_1": Variant("noise"),
    "niah_single_2": Variant("text"),
    "niah_single_3": Variant("text", value="uuids"),
    "niah_multikey_1": Variant("text", keys=4),
    "niah_multikey_2": Variant("needles"),
    "niah_multikey_3": Variant("needles", key="uuids", value="uuids"),
    "niah_multivalue": Variant("text", values=4),
    "niah_multiquery": Variant("text", keys=4, queries=4),
}
PASSKEY = "passkey"
NAMES = [PASSKEY, *VARIANTS]
ANSWER_TOKENS = 128  # RULER's

# words for keys; RULER's come from a package of nouns and adjectives
ADJECTIVES = (
    "amber ample brave brisk calm clever crisp damp dapper dusty eager early fancy fierce fond gentle giddy "
    "glossy grand hasty hollow humble icy idle jolly keen kind lively lofty lucid mellow merry mild modest "
    "nimble noble odd pale plain polite proud quick quiet rapid rare rustic shy silent sleek smooth solid spry "
    "stern sturdy sunny swift tame tidy timid urban vast vivid warm weary wide wild wise witty woolly zesty"
)
NOUNS = (
    "anchor apple arrow barrel basket beacon bottle bridge bucket button cabin camel candle carpet castle "
    "cellar comet compass cradle dagger donkey engine fabric falcon feather fiddle forest fountain garden "
    "ginger goblet hammer harbor helmet island jacket kettle ladder lantern lemon lizard magnet marble mirror "
    "needle orchard otter paddle parrot pebble pepper pillow pirate planet pocket puzzle quarry rabbit ribbon "
    "saddle sailor scarf shovel spider teapot temple thimble tunnel turnip valley velvet violin wagon walnut "
    "willow"
)


def needle_tasks(
    names: Sequence[str],
    tokenizer: Any,
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    samples: int = 5,
    seed: int = 0,
    text: str | None = None,
    chat: bool = False,
) -> list[Task]:
    """Tasks whose prompts fill ``lengths`` tokens, the answer included, with the (first) needle at ``depths``.

    Args:
        names: of :data:`NAMES`.
        tokenizer: counts tokens, and applies its chat template if ``chat``.
        lengths: tokens of prompt and answer together.
        depths: where the needle asked for is hidden, 0 (beginning) to 1 (end); others lie at random.
        samples: per length and depth.
        seed: of keys, values and places.
        text: the haystack of the tasks that RULER fills with essays; made-up sentences if None.
        chat: ask through the tokenizer's chat template.

    Raises:
        RetrofitError: an unknown name, a depth outside 0 to 1, a length in which no question fits.
    """
    for name in names:
        one_of("probe", name, *NAMES)
    if any(not 0 <= depth <= 1 for depth in depths):
        raise RetrofitError(f"depths {list(depths)}: give numbers from 0 (the beginning) to 1 (the end)")
    tasks = []
    for name in names:
        made = []
        for length in lengths:
            for depth in depths:
                for number in range(samples):
                    dice = random.Random(f"{seed}-{name}-{length}-{depth}-{number}")
                    draw = _passkey if name == PASSKEY else _needle
                    with_filler, answers, new = draw(name, dice, depth, text, tokenizer if chat else None)
                    prompt = longest(with_filler, tokenizer, length - new)
                    taken = count_tokens(tokenizer, prompt) + new
                    if taken > length:
                        raise RetrofitError(f"{name} does not fit into {length} tokens: ask for {taken} or more")
                    meta = {"length": length, "depth": depth}
                    id_ = f"{length}-{depth}-{number}"
                    made.append(Sample(id_, prompt, tuple(answers), new, meta=meta))
        tasks.append(Task(name, made, string_match_all))
    return tasks


# how to make the prompt with so many sentences of filler, its answers, and the tokens of an answer
Made = tuple[Callable[[int], str], list[str], int]


def _needle(name: str, dice: random.Random, depth: float, text: str | None, tokenizer: Any) -> Made:
    variant = VARIANTS[name]
    kind = variant.value
    new_keys, new_values = _things(variant.key, dice.random()), _things(kind, dice.random())
    keys = list(islice(new_keys, variant.keys))
    values = {key: list(islice(new_values, variant.values)) for key in keys}
    asked = keys[: variant.queries]

    def needle(key: str, value: str) -> str:
        return f"One of the special magic {kind} for {key} is: {value}."

    hidden: list[tuple[float, str]] = []
    for key in keys:
        for value in values[key]:
            hidden.append((depth if not hidden else dice.random(), needle(key, value)))
    others: list[str] = []

    def another(index: int) -> str:
        while len(others) <= index:
            others.append(needle(next(new_keys), next(new_values)))
        return others[index]

    if variant.haystack == "text":
        sentence = invented(dice.randrange(2**32)) if text is None else sentences_of(text)
    else:
        sentence = noise() if variant.haystack == "noise" else another

    one = len(asked) * variant.values == 1
    what = kind.removesuffix("s") if one else kind
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    verb = "is" if one else "are"

    def prompt(filler: int) -> str:
        opening = (
            f"{'A' if one else 'Some'} special magic {what} {verb} hidden within the following text. Make sure to "
            f"memorize it. I will quiz you about the {what} afterwards."
        )
        which = "the" if one else "all the"
        question = f"What {verb} {which} special magic {what} for {query} mentioned in the provided text?"
        begun = f"The special magic {what} for {query} mentioned in the provided text {verb}"
        return asked_for(f"{opening}\n{' '.join(haystack(sentence, hidden, filler))}\n{question}", begun, tokenizer)

    return prompt, [value for key in asked for value in values[key]], ANSWER_TOKENS


def _passkey(name: str, dice: random.Random, depth: float, text: str | None, tokenizer: Any) -> Made:
    """A number of five digits in a haystack of noise, as in Landmark Attention (arXiv 2305.16300, section 4.2)."""
    key = str(dice.randrange(10_000, 100_000))
    hidden = [(depth, f"The pass key is {key}. Remember it. {key} is the pass key.")]
    opening = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you "
        "about the important information there."
    )

    def prompt(filler: int) -> str:
        text = " ".join(haystack(noise(), hidden, filler))
        return asked_for(f"{opening}\n{text}\nWhat is the pass key?", "The pass key is", tokenizer)

    return prompt, [key], 16


def asked_for(question: str, begun: str, tokenizer: Any) -> str:
    """The prompt: the question, and the beginning of the answer; inside a chat template if there is a tokenizer."""
    return f"{question} {begun}" if tokenizer is None else chat_prompt(tokenizer, question, begun)


def _things(kind: str, salt: float) -> Iterator[str]:
    """Keys or values in a random order, none of them twice."""
    dice = random.Random(salt)
    if kind == "words":
        pairs = [f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split()]
        dice.shuffle(pairs)
        yield from pairs
        yield from (f"{pair}-{number}" for number in count(2) for pair in pairs)  # beyond 100,000 tokens
    seen: set[str] = set()
    while True:
        number = dice.randrange(1_000_000, 10_000_000)  # seven digits, as RULER draws them
        thing = str(number) if kind == "numbers" else str(uuid.UUID(int=dice.getrandbits(128), version=4))
        if thing not in seen:
            seen.add(thing)
            yield thing

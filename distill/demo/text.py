"""The demo's text: program-made stories in which every name must be remembered together with its surname.

A document binds up to eight first names to surnames, drawn afresh, and keeps coming back to them::

    the shy dog slept near the gate . mira cooper waited near the wide river . the grey goat pushed the worn cart .
    then nils dyer dropped a flat stone . soon mira cooper found the kettle .

The surname of a name met before is an *answer*: nothing but the earlier mention tells it, and several names are open at
once, so the newest mention alone does not help. All else (which noun, its adjective, the verb) is ordinary text with
statistics of its own. Words are tokens; key (name) and value (surname) are neighbours.
"""

# ruff: noqa: SIM905 - a list of words reads best as words
import zlib

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerFast

NAMES = "ada ben cleo dario elsa finn gwen hugo iris jonas kira leo mira nils olga pavel".split()
SURNAMES = (
    "archer baker carter cooper dyer fisher fletcher glover harper mason miller porter sawyer tanner turner weaver"
).split()
# each noun has one adjective it usually takes and one it sometimes takes; here and below, earlier words are commoner
ANIMALS = {
    "goat": "grey white",
    "dog": "shy small",
    "hen": "white brown",
    "cat": "small black",
    "horse": "brown tall",
    "fox": "red grey",
}
THINGS = {
    "stone": "flat grey",
    "cart": "worn red",
    "lamp": "bright small",
    "rope": "long worn",
    "basket": "round brown",
    "coat": "black long",
    "kettle": "bright round",
}
PLACES = {
    "river": "wide long",
    "bridge": "narrow worn",
    "barn": "red wide",
    "gate": "narrow white",
    "mill": "round grey",
}
WAITED = "waited slept walked stood".split()
FOUND = "found pushed carried dropped".split()
NEAR = "near behind beside".split()
FILLERS = "then soon later today again".split()

PAD, UNKNOWN = "<pad>", "<unk>"
_ADJECTIVES = sorted({word for nouns in (ANIMALS, THINGS, PLACES) for pair in nouns.values() for word in pair.split()})
WORDS = [PAD, UNKNOWN, ".", "the", "a", *NAMES, *SURNAMES, *ANIMALS, *THINGS, *PLACES, *_ADJECTIVES]
WORDS += [*WAITED, *FOUND, *NEAR, *FILLERS]
_ID = {word: index for index, word in enumerate(WORDS)}

MAX_BINDINGS = 8
_SHORTEST = 6  # tokens of the shortest sentence: name surname verb the thing .


def generator(seed: int, purpose: str) -> torch.Generator:
    """The source of randomness of one part of the demo: other seeds and other purposes give unrelated streams."""
    return torch.Generator().manual_seed(zlib.crc32(f"{purpose} {seed}".encode()))


def documents(count: int, length: int, source: torch.Generator, *, people: float = 0.6) -> Tensor:
    """Write ``count`` documents of ``length`` tokens each.

    Args:
        source: where all choices are drawn from; equal sources give equal documents.
        people: share of the sentences that are about a person (the others are about an animal).

    Returns:
        token ids, int64, (count, length). A document ends where its last token falls, mid-sentence or not.
    """
    shape = (count, -(-length // _SHORTEST))  # enough sentences even if all are short

    def chance(probability: float) -> Tensor:
        return torch.rand(shape, generator=source) < probability

    def pick(words: list[str]) -> Tensor:
        ids = torch.tensor([_ID[word] for word in words])
        drawn = torch.multinomial(_zipf(len(words)), count * shape[1], replacement=True, generator=source)
        return ids[drawn].view(shape)

    def described(nouns: dict[str, str]) -> tuple[Tensor, Tensor]:
        adjectives = torch.zeros(len(WORDS), 2, dtype=torch.long)
        for noun, pair in nouns.items():
            adjectives[_ID[noun]] = torch.tensor([_ID[word] for word in pair.split()])
        drawn = pick(list(nouns))
        return adjectives[drawn, chance(0.25).long()], drawn

    person = chance(people)
    person[:, 0] = False  # sinks keep the first words for ever: no name is among them
    name, surname = _cast(person, source)

    # slots of one sentence: [filler] [name surname | the adjective animal] [verb phrase] . ; an empty slot holds -1
    the, blank = torch.full(shape, _ID["the"]), torch.full(shape, -1)
    adjective, animal = described(ANIMALS)
    place_adjective, place = described(PLACES)
    thing_adjective, thing = described(THINGS)
    stays, plain = chance(0.4), chance(0.5)
    slots = [
        torch.where(chance(0.3), pick(FILLERS), -1),
        torch.where(person, name, the),
        torch.where(person, surname, adjective),
        torch.where(person, blank, animal),
        torch.where(stays, pick(WAITED), pick(FOUND)),
        torch.where(stays, pick(NEAR), blank),
        torch.where(stays | plain, the, _ID["a"]),
        torch.where(plain, blank, torch.where(stays, place_adjective, thing_adjective)),
        torch.where(stays, place, thing),
        torch.full(shape, _ID["."]),
    ]
    text = torch.stack(slots, 2).flatten(1)
    first_words = (text < 0).long().argsort(dim=1, stable=True)[:, :length]  # blanks go to the back, the order stays
    return text.gather(1, first_words)


def _cast(person: Tensor, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Name and surname for each sentence of which ``person`` (documents, sentences) says that it is about somebody.

    30 % of the people are new while fewer than MAX_BINDINGS are known, the others any known one.
    """
    count = len(person)
    new = person & ((torch.rand(person.shape, generator=source) < 0.3) | (person.cumsum(1) == 1))
    known = new.cumsum(1).clamp(max=MAX_BINDINGS)
    new &= known > pad(known, (1, 0))[:, :-1]
    who = torch.where(new, known - 1, (torch.rand(person.shape, generator=source) * known).long())
    names = torch.multinomial(_zipf(len(NAMES)).expand(count, -1), MAX_BINDINGS, generator=source)
    surnames = torch.rand(count, len(SURNAMES), generator=source).argsort(1)
    return names.gather(1, who) + _ID[NAMES[0]], surnames.gather(1, who) + _ID[SURNAMES[0]]


def _zipf(count: int) -> Tensor:
    return 1 / torch.arange(1, count + 1)


def recall_distance(ids: Tensor) -> Tensor:
    """Tokens since the surname of this token's name was last seen: positive at answers, 0 everywhere else.

    Args:
        ids: (documents, length).

    Returns:
        int64, (documents, length). A first mention is no answer: its surname cannot be known.
    """
    position = torch.arange(ids.shape[1]).expand_as(ids)
    distance = torch.zeros_like(ids)
    for name in NAMES:
        surname = pad(ids[:, :-1] == _ID[name], (1, 0))
        last = torch.where(surname, position, -1).cummax(1).values
        last = pad(last, (1, 0), value=-1)[:, :-1]
        distance = torch.where(surname & (last >= 0), position - last, distance)
    return distance


def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of these documents: one token per word, words separated by a space."""
    words = Tokenizer(models.WordLevel(_ID, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, unk_token=UNKNOWN)

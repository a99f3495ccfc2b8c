"""The one error a user can cause: a sentence that says what is wrong and what to do."""

import difflib
from collections.abc import Iterable

LONGEST = 1000  # characters of a sentence; a file can be quoted in it that is far longer


class RetrofitError(ValueError):
    """Bad input or an unsupported combination. The command line prints it as one line and exits with status 2.

    Whatever a damaged file brings into the sentence, it stays one printable line.
    """

    def __init__(self, message: str):
        line = "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in message)
        super().__init__(line if len(line) <= LONGEST else f"{line[:LONGEST]} ...")


def first_line(error: Exception) -> str:
    """The beginning of what an error says; its class if it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the choice closest to ``word``, or ``""`` when none is close."""
    match = difflib.get_close_matches(str(word), list(choices), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def one_of(name: str, value: object, *choices: str) -> None:
    """Refuse a ``value`` that is none of ``choices``; ``name`` says what it is a value of.

    Raises:
        RetrofitError: with all choices, and the nearest one.
    """
    if value not in choices:
        raise RetrofitError(f"{name}: {value!r} is not one of {', '.join(choices)}{nearest(str(value), choices)}")

"""The one error a user can cause: a sentence that says what is wrong and what to do."""

import difflib
from collections.abc import Iterable


class RetrofitError(ValueError):
    """Bad input or an unsupported combination. The command line prints it as one line and exits with status 2."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the choice closest to ``word``, or ``""`` when none is close."""
    match = difflib.get_close_matches(str(word), list(choices), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""

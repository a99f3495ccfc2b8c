"""Malformed inputs for every loader: how many there are, how they are damaged, and what may come of them."""

import copy
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from patches.errors import RetrofitError

# of all loaders together; `make fuzz` asks for more
EXAMPLES = int(os.environ.get("RETROFIT_FUZZ", "500"))
SECONDS = 60  # for one input: far more than any takes, so that only a hang is stopped
LONGEST = 1200  # characters of a sentence
TALLY: Counter[str] = Counter()  # by loader: inputs refused, and those that were still fine

JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    2**31,
    10**30,
    10**400,
    0.5,
    1e308,
    float("nan"),
    float("-inf"),
    "",
    "two\nlines\r\x1b[2J\u2028",
    "\ud800",
    "x" * 5000,
    "../../elsewhere",
    "ahn-gdn",
    [],
    [[]],
    [None, -1],
    {},
    {"": None},
    {"a": [1]},
]
BYTES = [b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"{", b"[" * 5000, b'"', b"\n", b"NaN", b"1e999", b"\x80" * 9]


class Hang(BaseException):
    """Not an Exception: a loader that catches everything must not catch this."""


def share(part: float) -> Callable[[Any], Any]:
    """Settings of a test that takes so much of all examples; the same ones each time, but with RETROFIT_FUZZ."""
    return settings(
        max_examples=max(5, round(EXAMPLES * part)),
        deadline=None,
        database=None,
        phases=[Phase.generate],  # examples are small as they are
        derandomize="RETROFIT_FUZZ" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )


def refusal(loader: str, load: Callable[[], Any]) -> str | None:
    """The sentence with which ``load()`` refuses its input; None where the damage left it valid.

    Any other exception is a traceback for the user, and fails the test; so does what takes ``SECONDS``.
    """
    with _at_most(SECONDS):
        try:
            load()
        except RetrofitError as error:
            said = str(error)
        else:
            TALLY[f"{loader}: still valid"] += 1
            return None
    TALLY[f"{loader}: refused"] += 1
    assert said.strip()
    assert said.isprintable(), said
    assert len(said) <= LONGEST, said
    return said


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang(f"still loading after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def put(path: Path, content: bytes | Any) -> None:
    """Write bytes, or anything else as JSON, to a new file: the old one may still be mapped into memory."""
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


@st.composite
def documents(draw: st.DrawFn, original: Any) -> Any:
    """``original``, anything JSON holds, with one to three places replaced, removed, renamed or added to."""
    document = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(list(_places(document))))
        junk = copy.deepcopy(draw(st.sampled_from(JUNK)))
        if not at:
            if draw(st.integers(0, 9)) == 0:
                return junk
            if isinstance(document, dict):
                document[draw(st.sampled_from(["surprise", "", "memry", "two\nlines"]))] = junk
            continue
        *path, last = at
        parent = document
        for key in path:
            parent = parent[key]
        change = draw(st.sampled_from(["replace", "replace", "remove", "rename"]))
        if change == "remove":
            del parent[last]
        elif change == "rename" and isinstance(parent, dict):
            parent[f"{last}_"] = parent.pop(last)
        else:
            parent[last] = junk
    return document


def _places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from _places(child, (*at, key))


@st.composite
def damaged(draw: st.DrawFn, original: bytes, head: int | None = None) -> bytes:
    """``original`` cut, overwritten or with something put in; within its first ``head`` bytes, if given."""
    start = draw(st.integers(0, min(len(original), head or len(original))))
    end = min(len(original), start + draw(st.integers(1, 64)))
    junk = draw(st.one_of(st.sampled_from(BYTES), st.binary(max_size=16)))
    how = draw(st.sampled_from(["cut", "overwrite", "insert", "remove", "replace"]))
    if how == "cut":
        return original[:start]
    if how == "insert":
        return original[:start] + junk + original[start:]
    if how == "overwrite":
        return original[:start] + junk + original[start + len(junk) :]
    if how == "remove":
        return original[:start] + original[end:]
    return junk


@st.composite
def safetensors(draw: st.DrawFn, original: bytes) -> bytes:
    """A safetensors file whose header lies: of its own length, of names, types, shapes or places."""
    size = int.from_bytes(original[:8], "little")
    header, data = json.loads(original[8 : 8 + size]), original[8 + size :]
    how = draw(st.sampled_from(["length", "header", "places", "shape", "dtype", "data", "bytes"]))
    if how == "length":
        claimed = draw(st.sampled_from([0, 1, size - 1, size + 1, len(original), 10**8 + 1, 2**40, 2**63, 2**64 - 1]))
        return claimed.to_bytes(8, "little") + original[8:]
    if how == "bytes":
        return draw(damaged(original, head=8 + size))
    if how == "data":
        return original[: 8 + size] + draw(st.sampled_from([b"", data[:-1], data + b"\0", data * 2]))
    names = [name for name in header if name != "__metadata__"]
    entry = header[draw(st.sampled_from(names))]
    if how == "header":
        header = draw(documents(header))
    elif how == "places":
        entry["data_offsets"] = draw(
            st.sampled_from([[0, 4], [4, 0], [0, len(data)], [len(data), 2**60], [-4, 0], [0], [0.5, 1], [0, 2**64]])
        )
    elif how == "shape":
        entry["shape"] = draw(st.sampled_from([[], [0], [2**60], [2**32, 2**32], [-1], [1.5], ["1"], [1] * 200]))
    else:
        entry["dtype"] = draw(st.sampled_from(["F64", "I8", "BOOL", "F8_E4M3", "F4", "X9", "", None, 32]))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data

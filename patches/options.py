"""A memory's own options, and the checks that refuse a value in one sentence."""

import math
import re
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from .errors import RetrofitError, nearest

LARGEST = 2**31 - 1  # of a whole number: counters and tensors take no more everywhere, and no text is as long


@dataclass(frozen=True)
class Options:
    """A kind's own options; a subclass adds fields and checks their ranges in ``__post_init__``.

    Attributes:
        before: the option's value in a memory that was saved when there was no such option, if it is not the default.
        gone: what to do about an option that there is no more.
    """

    before: ClassVar[dict[str, Any]] = {}
    gone: ClassVar[dict[str, str]] = {}

    @classmethod
    def read(cls, kind: str, options: dict[str, Any]) -> Any:
        """Build the options of ``kind`` from a mapping.

        Raises:
            RetrofitError: an option this kind does not have, or a value out of range.
        """
        known = [field.name for field in fields(cls)]
        for name, value in options.items():
            if name in cls.gone:
                raise RetrofitError(f"memory {kind!r} has no option {name!r} any more: {cls.gone[name]}")
            if name not in known:
                has = f"its options are {', '.join(known)}" if known else "it has no options"
                raise RetrofitError(f"memory {kind!r} has no option {name!r}{nearest(name, known)}: {has}")
            if isinstance(value, int | float) and not abs(value) < 2**63:
                wanted = "a smaller number" if abs(value) < float("inf") else "a finite number"
                raise RetrofitError(f"{name}={value!r}: give {wanted}")
        return cls(**options)


def whole_number(name: str, value: Any, least: int = 1) -> None:
    """Refuse a ``value`` that is not a whole number, ``least`` or more and at most ``LARGEST``."""
    if type(value) is not int or value < least:
        raise RetrofitError(f"{name}={value!r}: give a whole number, {least} or more")
    if value > LARGEST:
        raise RetrofitError(f"{name}={value}: give a whole number, {LARGEST} at most")


def read_bytes(text: int | str) -> int:
    """Bytes from what a user writes.

    Raises:
        RetrofitError: not understood, or below 1.

    >>> read_bytes("64KiB"), read_bytes("1.5 MB"), read_bytes(300)
    (65536, 1500000, 300)
    """
    found = re.fullmatch(r"(\d+\.?\d*)\s*([kmgt]?)(i?)b?", str(text).strip().lower())
    size = 0.0 if found is None else float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ")
    if size < 1 or (found is not None and found[3] and not found[2]):
        raise RetrofitError(f"{text!r} is no number of bytes: write it as 64KiB, 2GiB or 300000")
    return int(size)


def above_zero(name: str, value: Any) -> None:
    """Refuse a ``value`` that is not a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise RetrofitError(f"{name}={value!r}: give a number above 0")


def true_or_false(name: str, value: Any) -> None:
    """Refuse a ``value`` that is neither true nor false."""
    if not isinstance(value, bool):
        raise RetrofitError(f"{name}={value!r}: use true or false")

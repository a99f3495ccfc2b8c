"""A memory's own options, and the checks that refuse a value in one sentence."""

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from .errors import RetrofitError, nearest

LARGEST = 2**31 - 1  # of a whole number: counters and tensors take no more everywhere, and no text is as long


@dataclass(frozen=True)
class Options:
    """A kind's own options; a subclass adds fields and checks their ranges in ``__post_init__``.

    Attributes:
        before: the option's value in a memory that was saved when there was no such option, if it is not the default.
    """

    before: ClassVar[dict[str, Any]] = {}

    @classmethod
    def read(cls, kind: str, options: dict[str, Any]) -> Any:
        """Build the options of ``kind`` from a mapping.

        Raises:
            RetrofitError: an option this kind does not have, or a value out of range.
        """
        known = [field.name for field in fields(cls)]
        for name, value in options.items():
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


def above_zero(name: str, value: Any) -> None:
    """Refuse a ``value`` that is not a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise RetrofitError(f"{name}={value!r}: give a number above 0")


def true_or_false(name: str, value: Any) -> None:
    """Refuse a ``value`` that is neither true nor false."""
    if not isinstance(value, bool):
        raise RetrofitError(f"{name}={value!r}: use true or false")

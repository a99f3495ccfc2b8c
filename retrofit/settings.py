"""What a recipe's keys may say, in one place: files, flags, ``--help``, the docs' tables and errors come from it.

A dataclass declares each key with :func:`setting`; :func:`settings` gives them back, and also the fields of
transformers' own dataclasses, which have a help as well. Imports no torch: the command line reads this before it knows
what to do.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from patches.errors import RetrofitError, one_of
from patches.options import LARGEST
from retrofit.plain_yaml import parse_yaml

WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    tuple: "a list",
    object: "a value",
}


@dataclass(frozen=True)
class Setting:
    """One key.

    Attributes:
        name: the key.
        kind: bool, int, float, str, list or tuple (of ``item``), dict (with text as keys); object if it may be of
            several types, which is then left to whoever reads it.
        optional: whether it may be null, which is then the default.
        default: the value of a recipe that does not have the key.
        help: a sentence for ``--help`` and the docs.
        choices: the values that a text may have; any, if there are none.
        least, most: limits that are allowed themselves.
        above, below: limits that are not.
        flag: on the command line, where it is not ``--name`` with dashes; a tuple's is repeated for more values.
        short: its other forms, such as one letter.
        metavar: what stands for the value in ``--help``.
        item: the type of a list's or tuple's values.
        group: the heading over it in ``--help``.
    """

    name: str
    kind: type
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    flag: str = ""
    short: tuple[str, ...] = ()
    metavar: str | None = None
    item: type = str
    group: str | None = None

    def check(self, value: Any) -> Any:
        """``value``; an enum's and a path as text, several as a tuple.

        Raises:
            RetrofitError: the value is of another type, out of range or none of the choices.
        """
        if value is None and self.optional:
            return None
        value = value.value if isinstance(value, Enum) else value
        value = str(value) if isinstance(value, PurePath) else value
        if self.kind is tuple and isinstance(value, list | tuple):
            one = replace(self, kind=self.item, optional=False)
            return tuple(one.check(part) for part in value)
        if self.kind is dict and isinstance(value, dict):  # YAML reads 0 as a number
            named = {str(key) if type(key) is int else key: part for key, part in value.items()}
            if len(named) < len(value):
                raise RetrofitError(
                    f"{self.name}: {value!r} names something twice, as a number and as text: name it once"
                )
            value = named
        kinds = (int, float) if self.kind is float else self.kind
        fits = isinstance(value, kinds) and (self.kind in (bool, object) or not isinstance(value, bool))
        if self.kind in (list, dict):
            fits = fits and all(type(part) is (str if self.kind is dict else self.item) for part in value)
        if not fits:
            raise RetrofitError(f"{self.name}: {value!r} is not {self.words}")
        if self.choices:
            one_of(self.name, value, *self.choices)
        if self.kind in (int, float) and not self._within(value):
            raise RetrofitError(f"{self.name}: {value} is out of range, it must be {self.range}")
        if type(value) is int and self.kind is not object and self.most is None and abs(value) > LARGEST:
            raise RetrofitError(f"{self.name}: {value} is out of range, it must be at most {LARGEST}")
        return value

    def parse(self, text: str) -> Any:
        """The value that ``text`` stands for, on the command line or in a ``KEY=VALUE`` pair.

        Raises:
            RetrofitError: as :meth:`check`.
        """
        if self.kind is str:
            return self.check(None if self.optional and text in ("null", "none") else text)
        return self.check(parse_yaml(text, self.name))

    @property
    def words(self) -> str:
        """What it must be."""
        return "a list of whole numbers" if (self.kind, self.item) == (list, int) else WORDS[self.kind]

    @property
    def described(self) -> str:
        """The help of its flag, with the range and the default."""
        default = ", ".join(map(str, self.default)) if self.kind is tuple else self.default
        notes = [self.range] if self.range not in ("", "finite") else []
        notes += [f"default: {default}"] if default != "" and type(default) in (int, float, str) else []
        return f"{self.help} [{'; '.join(notes)}]" if notes else self.help

    @property
    def range(self) -> str:
        """The numbers it may be, in words; empty where it is no number."""
        if self.kind not in (int, float) and not (self.kind is tuple and self.item in (int, float)):
            return ""
        low = f"{self.least} or more" if self.least is not None else ""
        low = f"more than {self.above}" if self.above is not None else low
        high = f"at most {self.most}" if self.most is not None else ""
        high = f"below {self.below}" if self.below is not None else high
        return " and ".join(filter(None, (low, high))) or "finite"

    def _within(self, value: float) -> bool:
        return (
            (self.kind is int or abs(value) < 2**63)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


class Checked:
    """A dataclass of settings, each of which is checked when one is made."""

    def __post_init__(self) -> None:
        for name, key in settings(type(self)).items():
            object.__setattr__(self, name, key.check(getattr(self, name)))


def setting(default: Any | Callable[[], Any], help: str, **limits: Any) -> Any:
    """A dataclass field that is a :class:`Setting`; ``limits`` are its other attributes."""
    made: dict[str, Any] = {"default_factory" if callable(default) else "default": default}
    return field(**made, metadata={"help": help, **limits})


def settings(of: Any) -> dict[str, Setting]:
    """The keys of a dataclass, in order: those of its fields that have a help."""
    found, hints, known = {}, get_type_hints(of), {one.name for one in fields(Setting)}
    groups, group = getattr(of, "groups", {}), None
    for one in (one for one in fields(of) if "help" in one.metadata):
        hint = hints[one.name]
        kinds = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
        optional = NoneType in kinds
        kinds = [kind for kind in kinds if kind is not NoneType]
        more = {key: value for key, value in one.metadata.items() if key in known}
        more |= {"help": " ".join(more["help"].split()), "choices": tuple(more.get("choices", ()))}
        group = groups.get(one.name, group)
        for enum in (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)):
            kinds, more["choices"] = [str], tuple(each.value for each in enum)
        kind = kinds[0] if len(kinds) == 1 else object
        if get_origin(kind) in (list, tuple):
            more["item"] = get_args(kind)[0]
        kind = get_origin(kind) or kind
        default = one.default if one.default_factory is MISSING else one.default_factory()
        default = default.value if isinstance(default, Enum) else default
        kind = kind if kind in WORDS else object
        found[one.name] = Setting(one.name, kind, optional, default, group=group, **more)
    return found

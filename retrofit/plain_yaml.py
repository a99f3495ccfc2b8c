"""YAML from untrusted files: plain values only, nothing that grows when it is read or that runs code."""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from patches.errors import RetrofitError

MOST = 100_000  # characters; a recipe of ours has 2,000
# what a plain word is by YAML 1.2's core schema, and how it may begin; to 1.1, 010 is 8, 1:04 is 64 and no is false
CORE = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
)


def parse_yaml(text: str, where: str) -> Any:
    """What ``text`` says, in mappings, lists, words and numbers of at most 64 bits.

    Raises:
        RetrofitError: it is too long, not YAML, or has aliases, tags of objects or a key twice; ``where`` begins the
            sentence.
    """
    if len(text) > MOST:
        raise RetrofitError(f"{where}: {len(text):,} characters are too many: the limit is {MOST:,}")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f" in line {mark.line + 1}"
        raise RetrofitError(f"{where}: not a YAML file: {error.problem or error.context}{line}") from error
    except Exception as error:  # what a value is tagged or looks like decides where yaml fails at it
        raise RetrofitError(f"{where}: not a YAML file: {' '.join(str(error).split())}") from error


def dump_yaml(data: Any, **how: Any) -> str:
    """``data`` as YAML that :func:`parse_yaml` reads as it was; ``how`` as for :func:`yaml.dump`."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, **how))


class _Loader(yaml.SafeLoader):
    """Safe YAML with the values of 1.2, in which a key given twice is an error.

    There are no aliases: a page of them can stand for more than any memory holds.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()
            raise yaml.composer.ComposerError(
                problem=f"aliases such as *{alias.anchor} are not supported: write the value out",
                problem_mark=alias.start_mark,
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (self.construct_object(key, deep=True) for key, _ in node.value):
            if isinstance(key, Hashable):  # the others are refused by yaml itself
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {key!r} is given twice", problem_mark=node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        value = int(text, 0 if text[:2] in ("0o", "0x") else 10)
        if abs(value) >= 2**63:
            raise yaml.constructor.ConstructorError(problem="a number is too large", problem_mark=node.start_mark)
        return value


class _Dumper(yaml.SafeDumper):
    """Quotes texts that YAML 1.1 or 1.2 would read as something else."""


_Loader.yaml_implicit_resolvers = {}
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _kind, _pattern, _first in CORE:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), [*_first, ""])

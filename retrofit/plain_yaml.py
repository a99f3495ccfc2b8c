"""YAML from untrusted files: plain values only, nothing that grows when it is read or that runs code."""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from patches.errors import RetrofitError

MOST = 100_000  # characters; a recipe of ours has 2,000


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
    except Exception as error:  # what a value is tagged or looks like decides where yaml fails at it
        raise RetrofitError(f"{where}: not a YAML file: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):
    """Safe YAML in which ``1e-2`` is a number, as everywhere else, and a key given twice is an error.

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
        value = super().construct_yaml_int(node)
        if abs(value) >= 2**63:
            raise yaml.constructor.ConstructorError(problem="a number is too large", problem_mark=node.start_mark)
        return int(value)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
# YAML 1.1 reads 1e-2 as a string: it wants 1.0e-2
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)

"""A memory as a YAML file: what `retrofit allocate` writes, and `patch`, `estimate` and `distill` read."""

from pathlib import Path
from typing import Any

from patches.errors import RetrofitError, nearest
from retrofit.files import read_text
from retrofit.plain_yaml import dump_yaml, parse_yaml

KEYS = ("memory", "window", "sinks", "layers", "others", "options", "by_layer")


def write_memory(memory: dict[str, Any], notes: str) -> str:
    """The text of such a file: ``memory`` by :data:`KEYS`, behind ``notes`` as comments."""
    comments = "".join(f"# {line}".rstrip() + "\n" for line in notes.splitlines())
    return comments + dump_yaml(memory, default_flow_style=None, width=120)


def read_memory(path: str | Path) -> dict[str, Any]:
    """The arguments that such a file has for :func:`retrofit.patch`: ``memory``, ``window``, ``sinks`` and others.

    Raises:
        RetrofitError: it cannot be read, is no mapping, has other keys, or lacks ``memory`` or ``window``.
    """
    found = parse_yaml(read_text(path), str(path))
    if not isinstance(found, dict):
        raise RetrofitError(f"{path} is not a recipe: write KEY: VALUE lines with the keys {', '.join(KEYS)}")
    for key in found:
        if key not in KEYS:
            raise RetrofitError(
                f"{path}: {key!r} is no key of a memory{nearest(str(key), KEYS)}: the keys are {', '.join(KEYS)}"
            )
    for key in ("memory", "window"):
        if key not in found:
            raise RetrofitError(f"{path} has no {key!r}: add it, because a memory cannot be made without it")
    options = found.pop("options", None) or {}
    if not isinstance(options, dict) or (taken := sorted(set(options) & {*KEYS, "base", "model_kwargs"})):
        wrong = f"{taken[0]!r} is not an option of a memory" if isinstance(options, dict) else "write options by name"
        raise RetrofitError(f"{path}: options: {wrong}")
    return {"sinks": 0, **found, **{str(name): value for name, value in options.items()}}

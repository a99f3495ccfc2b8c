"""Recipe files, and those that come with the package."""

from pathlib import Path
from typing import Any

from patches.errors import RetrofitError, nearest

from .import_guard import HERE
from .plain_yaml import parse_yaml

OF_MEMORY = ("window", "sinks", "layers", "others", "by_layer")  # keys of a recipe, and arguments of retrofit.patch


def read_recipe(path_or_name: str | Path) -> dict[str, Any]:
    """What a recipe's YAML holds, unchecked.

    Raises:
        RetrofitError: neither a file nor a shipped name, not valid YAML, or not a mapping.
    """
    path = find_recipe(path_or_name)
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise RetrofitError(f"{path_or_name}: not a YAML file: {error}") from error
    found = parse_yaml(text, str(path_or_name))
    if found is not None and not isinstance(found, dict):
        raise RetrofitError(
            f"{path_or_name}: a recipe is a mapping of keys to values, this is a {type(found).__name__}: write each "
            "setting as key: value"
        )
    return found or {}


def read_memory(path_or_name: str | Path) -> dict[str, Any]:
    """The memory that a recipe describes, as arguments for :func:`retrofit.patch`; what it says of training is ignored.

    Raises:
        RetrofitError: as :func:`read_recipe`; it lacks ``memory`` or ``window``, or has no mapping of options.
    """
    found = read_recipe(path_or_name)
    for key in ("memory", "window"):
        if key not in found:
            raise RetrofitError(f"{path_or_name} has no {key!r}: add it, because a memory cannot be made without it")
    options = found.get("options") or {}
    if not isinstance(options, dict):
        raise RetrofitError(f"{path_or_name}: options: write options by name")
    return {key: found[key] for key in ("memory", *OF_MEMORY) if key in found} | options


def find_recipe(path_or_name: str | Path) -> Path:
    """Where a recipe lies.

    Raises:
        RetrofitError: there is neither such a file nor a shipped recipe of that name.
    """
    path, shipped = Path(path_or_name), shipped_recipes()
    if path.is_file():
        return path
    if str(path_or_name) not in shipped:
        hint = nearest(str(path_or_name), shipped)
        raise RetrofitError(
            f"there is no recipe file or shipped recipe {path_or_name}{hint}: see `retrofit recipes ls`"
        )
    return shipped[str(path_or_name)]


def shipped_recipes() -> dict[str, Path]:
    """``{name: path}`` of the recipes that come with the package."""
    return {path.stem: path for path in sorted((HERE / "recipes").glob("*.yaml"))}

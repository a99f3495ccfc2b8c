"""The packages that are installed beside this one: what is imported by their names must be them.

Their names are plain words. With a ``distill.py`` or a package ``patches/`` beside a script, that is imported instead.
"""

import importlib.util
import sys
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def installed_version(name: str) -> str | None:
    """Of a distribution, None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_sibling(name: str) -> None:
    """Check that ``import name`` gives what is installed beside this package.

    Raises:
        ImportError: something else is found by that name; the sentence says which file it is.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None) if module is not None else importlib.util.find_spec(name)
    found = getattr(module, "__file__", None) or (spec.origin if spec is not None else None)
    if found is None and spec is not None:  # a folder without __init__.py
        found = next(iter(spec.submodule_search_locations or []), None)
    if found is None:
        raise ImportError(f"retrofit's own package {name!r} is missing: install retrofit-lm again", name=name)
    path = Path(found).resolve()
    if path.is_relative_to(HERE / name):
        return
    here = path.parent if path.name == "__init__.py" else path
    raise ImportError(
        f"{here} stands in the way of retrofit's own package {name!r}: rename it, or start Python in another folder",
        name=name,
        path=str(here),
    )

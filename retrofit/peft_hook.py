"""Teaches PEFT our type of adapter as soon as somebody imports PEFT, so that importing retrofit never has to."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register_with_peft() -> None:
    """Register at once where PEFT is imported already, else right after it is."""
    if "peft" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterPeft())


class _AfterPeft(MetaPathFinder):
    """Finds peft where the other finders do, and registers once it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "peft":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        run: Any = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            sys.meta_path.remove(self)
            _register()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    try:
        importlib.import_module("retrofit.peft_bridge")
    except Exception as error:  # what we extend is PEFT's own business: another release must not break importing it
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"this release of PEFT does not take our type of adapter ({reason}): use retrofit.load_adapter, or "
            "pip install -U 'retrofit-lm[peft]'",
            stacklevel=2,
        )

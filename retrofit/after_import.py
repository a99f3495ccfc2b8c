"""Makes our classes known to transformers and PEFT as soon as somebody imports them.

So an export loads without trust after ``import retrofit``, which itself imports neither.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register() -> None:
    """Register with what is imported already, and with the rest right after it is."""
    for name, run in (("transformers", _families), ("peft", _peft)):
        if name in sys.modules:
            run()
        else:
            sys.meta_path.insert(0, _After(name, run))


class _After(MetaPathFinder):
    """Finds one package where the other finders do, and calls a function once the package has run."""

    def __init__(self, package: str, then: Callable[[], None]) -> None:
        self.package, self.then = package, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.package:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        run: Any = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            sys.meta_path.remove(self)
            self.then()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _families() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("patches.") and getattr(module.__spec__, "_initializing", False):
            return  # one of our own modules imports transformers: whatever follows imports the families itself
    importlib.import_module("retrofit.families")


def _peft() -> None:
    try:
        importlib.import_module("retrofit.peft_bridge")
    except Exception as error:  # what we extend is PEFT's own business: another release must not break importing it
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"this release of PEFT does not take our type of adapter ({reason}): use retrofit.load_adapter, or "
            "pip install -U 'retrofit-lm[peft]'",
            stacklevel=2,
        )

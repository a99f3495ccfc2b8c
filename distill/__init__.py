"""How a memory learns: loss, data, window sampling, trainer, runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distill.config import DistillConfig
    from distill.run import distill
    from distill.trainer import DistillTrainer

__all__ = ["DistillConfig", "DistillTrainer", "distill"]

_HOME = {"DistillConfig": "distill.config", "DistillTrainer": "distill.trainer", "distill": "distill.run"}


def __getattr__(name: str) -> Any:
    # on first use: the command line reads distill.recipe without waiting for torch
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Retrofit gives pretrained causal language models a bounded memory: patch, save, load and export.

Nothing heavy is imported before it is used: ``import retrofit`` waits for neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .import_guard import check_sibling

check_sibling("patches")

from patches.errors import RetrofitError  # noqa: E402 (somebody else's patches is told by its name first)

from .after_import import register  # noqa: E402

if TYPE_CHECKING:
    from .adapter import load_adapter, save_adapter
    from .calibration import calibrate
    from .convert import convert_ahn
    from .costs.held import cache_bytes, kept_bytes
    from .evaluation.scores import evaluate
    from .hub import push_adapter, push_folder
    from .patching import patch

# where each name is defined; it is imported on first use
_HOME = {
    "DistillConfig": "distill.config",
    "DistillTrainer": "distill.trainer",
    "calibrate": "retrofit.calibration",
    "cache_bytes": "retrofit.costs.held",
    "convert_ahn": "retrofit.convert",
    "evaluate": "retrofit.evaluation.scores",
    "load_adapter": "retrofit.adapter",
    "patch": "retrofit.patching",
    "push_adapter": "retrofit.hub",
    "push_folder": "retrofit.hub",
    "save_adapter": "retrofit.adapter",
    "kept_bytes": "retrofit.costs.held",
}

__all__ = ["RetrofitError", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = _HOME[name].partition(".")[0]
    if package != __name__:
        check_sibling(package)
    found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return found


register()

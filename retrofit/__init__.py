"""Retrofit gives pretrained causal language models a bounded memory: patch, save, load and export."""

from patches.errors import RetrofitError

from .adapter import load_adapter, save_adapter
from .convert import convert_ahn
from .costs.held import cache_bytes, state_bytes
from .evaluate import evaluate
from .hub import push_adapter, push_folder
from .patching import patch
from .peft_hook import register_with_peft

__all__ = [
    "RetrofitError",
    "cache_bytes",
    "convert_ahn",
    "evaluate",
    "load_adapter",
    "patch",
    "push_adapter",
    "push_folder",
    "save_adapter",
    "state_bytes",
]

register_with_peft()

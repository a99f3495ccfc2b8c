"""What a memory is measured against: the same base with sinks and window only, at the same W or at the same bytes."""

from typing import Any

from patches.config import MemoryConfig
from retrofit.costs.held import beyond_sinks, row_bytes
from retrofit.patching import patch


def window_only(model: Any, window: int | None = None) -> Any:
    """The same base and sinks without a memory, at ``window`` tokens (default: the model's own). Shares the weights."""
    return with_kind(model, "none", window)


def with_kind(model: Any, kind: str, window: int | None = None) -> Any:
    """:func:`window_only` with another memory in place of the model's own."""
    bare = MemoryConfig.from_dict(model.config.memory).window_only(window)
    return patch(model, kind, bare.window, bare.sinks, layers=bare.layers, others=bare.others, by_layer=bare.by_layer)


def narrowest_window(model: Any) -> int:
    """W of the layer that forgets first: up to S and so many tokens the model is its base."""
    return min(memory.window for memory in model.model.memories().values())


def equal_memory_window(model: Any) -> int:
    """The window that, in every layer, costs as many bytes as the model's windows and memories, rounded up."""
    row = row_bytes(model.config, model.dtype)
    return -(-beyond_sinks(model, model.dtype) // (row * len(model.model.memories())))

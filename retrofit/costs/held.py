"""Bytes that are really held: by a cache, by a memory's state."""

from typing import Any

import torch


def cache_bytes(past_key_values: Any) -> int:
    """Bytes held by a transformers cache: keys, values, write gates and memory states, all layers and rows together."""
    return sum(_storage(tensor) for layer in past_key_values.layers for tensor in _tensors(layer))


def state_bytes(model: Any) -> int:
    """Bytes of one layer's memory state for one sequence, sinks and window not counted.

    The mean over the layers that have the memory, rounded up, where they are not alike.
    """
    kept = [
        memory.state_bytes(model.dtype)
        for memory in model.model.memories().values()
        if memory.kind == model.config.memory["kind"]
    ]
    return -(-sum(kept) // len(kept))


def row_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in one layer's cache."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_key_value_heads * head_dim * dtype.itemsize


def _tensors(layer: Any) -> list[torch.Tensor]:
    if hasattr(layer, "tensors"):
        return layer.tensors()
    return [tensor for tensor in (layer.keys, layer.values) if tensor is not None]


def _storage(tensor: torch.Tensor) -> int:
    # the whole storage: a view of something larger keeps all of it alive
    return tensor.untyped_storage().nbytes()

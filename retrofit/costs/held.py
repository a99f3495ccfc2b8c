"""Bytes that are really held: by a cache, and by a memory beside sinks and window."""

from typing import Any

import torch

from patches.config import MemoryConfig, keep_their_window, native_window
from patches.kinds import build_memory
from patches.memory import Memory
from patches.precision import wide


def cache_bytes(past_key_values: Any) -> int:
    """Bytes held by a transformers cache: keys, values, write gates and memory states, all layers and rows together."""
    return sum(_storage(tensor) for layer in past_key_values.layers for tensor in _tensors(layer))


def kept_bytes(model: Any, window: int | None = None, dtype: torch.dtype | None = None) -> int:
    """Bytes that one sequence keeps in a layer beside the keys and values of sinks and window, once its cache is full.

    They are the state, the write gates that wait in the window, and tokens of a window that is longer than ``window``.
    Where layers are not alike, it is the mean over those that have a window, rounded up.

    Args:
        window: the window that is not counted; by default each layer's own.
        dtype: of the base; by default the model's own.
    """
    dtype, memories = dtype or model.dtype, model.model.memories().values()
    left_out = sum(window or memory.window for memory in memories) * row_bytes(model.config, dtype)
    return -(-(beyond_sinks(model, dtype) - left_out) // len(memories))


def beyond_sinks(model: Any, dtype: torch.dtype) -> int:
    """:func:`layer_bytes` of all layers that have a window."""
    memories = layer_memories(model.config, MemoryConfig.from_dict(model.config.memory))
    return sum(layer_bytes(model.config, memories[index], dtype) for index in model.model.memories())


def layer_bytes(config: Any, memory: Memory, dtype: torch.dtype) -> int:
    """Bytes that one sequence keeps in one layer once its cache is full, but for the keys and values of the sinks.

    Args:
        memory: the layer's, on the meta device.
        dtype: of the base.
    """
    kept, gates, _ = cache_parts(config, memory, memory.capacity + 1, dtype)
    return kept - memory.sinks * row_bytes(config, dtype) + gates + memory.state_bytes(dtype)


def layer_memories(config: Any, settings: MemoryConfig | None) -> list[Memory | None]:
    """The memory of each layer as the patched model has it, on the meta device; None for full attention.

    A layer that slides in the base counts as sinks + window without sinks. ``settings`` None stands for the base.
    """
    layers = range(config.num_hidden_layers)
    each = [None for _ in layers] if settings is None else settings.of_layers(config)
    slides = keep_their_window(config) if native_window(config) is None else set(layers)
    with torch.device("meta"):
        own = build_memory(config, MemoryConfig("none", config.sliding_window)) if slides else None
        built: list[tuple[MemoryConfig, Memory]] = []  # layers that are alike have the same one
        for one in each:
            if one is not None and all(one != known for known, _ in built):
                built.append((one, build_memory(config, one)))
    return [
        next((memory for known, memory in built if known == one), own if index in slides else None)
        for index, one in enumerate(each)
    ]


def cache_parts(
    config: Any, memory: Memory | None, tokens: int, dtype: torch.dtype, exact: int | None = None
) -> tuple[int, int, int]:
    """Bytes that one sequence of ``tokens`` tokens keeps in one layer: keys and values, write gates, state.

    Args:
        memory: the layer's, on the meta device, or None for full attention.
        dtype: of the base; states and gates are float32 whatever it is, or float64.
        exact: tokens up to which no layer of the model evicts any; beyond, none keeps the sinks' gates. By default as
            many as this layer keeps.
    """
    row = row_bytes(config, dtype)
    if memory is None:
        return tokens * row, 0, 0
    gates = memory.write_gates(torch.empty(1, 1, config.hidden_size, device="meta"))
    gate = 0 if gates is None else gates.numel() * wide(dtype).itemsize
    gated = min(tokens - memory.sinks, memory.window) if tokens > (exact or memory.capacity) else tokens
    kept = memory.sinks + memory.window if tokens > memory.capacity else tokens
    return kept * row, gated * gate, memory.state_bytes(dtype, tokens)


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

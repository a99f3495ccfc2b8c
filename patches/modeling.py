"""The model's body: it builds the memories, and plans each forward pass for all layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils import logging

from .cache import MemoryCacheLayer, adopt
from .config import MemoryConfig, check_base, native_window
from .errors import RetrofitError
from .kinds import build_memory
from .memory import Memory
from .padding import Starts, find_starts
from .pretrained import MemoryPreTrained
from .rotary import Turn, longest_input
from .step import Pass

logger = logging.get_logger(__name__)


class MemoryModel(MemoryPreTrained):
    """Mixin in front of a family's model class; ``attention_class`` is the family's attention with the memory."""

    attention_class: type[nn.Module]

    def __init__(self, config: Any):
        super().__init__(config)
        self.memory_enabled = True
        if config.memory is None:
            raise RetrofitError(
                "this configuration has no memory: make the model with retrofit.patch(base, memory=..., window=...)"
            )
        memory = MemoryConfig.from_dict(config.memory)
        check_base(config, memory)
        for layer, settings in zip(self.layers, memory.of_layers(config), strict=True):
            if settings is not None:
                attention = layer.self_attn
                # safe on attention modules, which hold no registry of their own; PreTrainedModels must be built as
                # what they are
                attention.__class__ = self.attention_class
                attention.memory = build_memory(config, settings)
        self.post_init()

    def memories(self) -> dict[int, Memory]:
        """The memory of each patched layer, by layer index."""
        found = ((index, getattr(layer.self_attn, "memory", None)) for index, layer in enumerate(self.layers))
        return {index: memory for index, memory in found if memory is not None}

    @property
    def compiles(self) -> bool:
        """Whether a step of plain decoding depends on no number but those on the device."""
        memories = self.memories()
        everywhere = len(memories) == len(self.layers) and self.memory_enabled
        return everywhere and all(memory.compiles for memory in memories.values())

    def set_window(self, window: int, sinks: int | None = None) -> None:
        """Change W and S from the next call on an empty cache; written to the configuration, so it is saved.

        Raises:
            RetrofitError: a value out of range, more than the base's own sliding window, or another W for a model whose
                layers have windows of their own.
        """
        before = MemoryConfig.from_dict(self.config.memory)
        changed = replace(before, window=window, sinks=before.sinks if sinks is None else sinks)
        if window != before.window and any("window" in other for other in before.by_layer.values()):
            raise RetrofitError(
                f"layers of this model have windows of their own (by_layer), which window={window} would leave: patch "
                "its base anew with that window"
            )
        check_base(self.config, changed)
        each = changed.of_layers(self.config)
        pairs = [(memory, new) for index, memory in self.memories().items() if (new := each[index]) is not None]
        for memory, new in pairs:
            memory.check_window(new.window, new.sinks)
        for memory, new in pairs:
            memory.window, memory.sinks = new.window, new.sinks
        self.config.memory = {**self.config.memory, "window": changed.window, "sinks": changed.sinks}

    @contextmanager
    def memory_off(self) -> Iterator[Any]:
        """Inside the block the model is its base: full attention, bit for bit."""
        before, self.memory_enabled = self.memory_enabled, False
        try:
            yield self
        finally:
            self.memory_enabled = before

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the family's model; beyond S + W tokens no T x T mask is built, unless a full-attention layer needs it."""
        memory_pass = None
        memories = self.memories()
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is not None and not torch.compiler.is_compiling():
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            warn_of_length(self.config, seen + tokens.shape[1])
        if not self.memory_enabled:
            if any(getattr(layer, "is_memory_layer", False) and layer.seen for layer in _cache_layers(past_key_values)):
                raise RetrofitError(
                    "this cache was filled with the memory on and cannot be continued with it off: start a new cache"
                )
        elif memories and tokens is not None:
            memory_pass = self._plan(tokens, attention_mask, position_ids, past_key_values, memories, kwargs)
            if memory_pass.evicting and len(memories) == len(self.layers):
                # a 4D mask is passed through as it is: this one stands for "none needed"
                attention_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
            if memory_pass.full and position_ids is None:
                position_ids = (memory_pass.slots(memory_pass.seen, 1) + memory_pass.offset)[:, None]
        if memory_pass is not None:
            kwargs["memory_pass"] = memory_pass
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def plan(self, tokens: Tensor, mask: Tensor | None = None) -> Pass:
        """A pass over ``tokens`` (B, n) without a cache, for calls of single layers; ``mask`` (B, n) as the model's."""
        return self._plan(tokens, mask, None, None, self.memories(), {})

    def _plan(
        self,
        tokens: Tensor,
        mask: Any,
        position_ids: Tensor | None,
        cache: Cache | None,
        memories: dict[int, Memory],
        kwargs: dict[str, Any],
    ) -> Pass:
        new, home, keeper = tokens.shape[1], tokens.device, next(iter(memories))
        layers: list[MemoryCacheLayer] = []
        if cache is not None:
            layers = [adopt(cache, i, one.kind, one.window, one.sinks, one.options) for i, one in memories.items()]
        if new == 1 and layers and layers[0].full and torch.compiler.is_compiling() and self.compiles:
            # the device counts; that nothing was seen is as good as any number, since only distances are used
            assert layers[0].slot is not None
            slot: Tensor | None = layers[0].slot.add_(1)
            return Pass(0, 1, layers[0].starts, True, self.turn, home, home, keeper, slot, full=True)
        seen, before, evicted_before = 0, Starts(), False
        if layers:
            # every layer: it asks the device what compiled steps have counted, before this pass counts on
            seen, *_ = [layer.seen for layer in layers]
            before, evicted_before = layers[0].starts, layers[0].evicting
        plain = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        if "cu_seq_lens_q" in kwargs:
            raise RetrofitError(
                "packed sequences cannot be separated in a memory: give one sequence per row, padded on the left"
            )
        capacity = min(memory.capacity for memory in memories.values())
        if plain is None and mask is not None and seen + new > capacity:
            raise RetrofitError(
                "a memory cannot use a mask that says who sees whom: pass the plain 2D attention mask (batch, tokens)"
            )
        starts = find_starts(before, seen, new, plain, position_ids)
        limit = capacity + min(starts.pads)
        native = native_window(self.config)
        if native is not None and len(memories) < len(self.layers):
            limit = min(limit, native)  # the mask made for the other layers is no wider: our own attention from here
        evicting = evicted_before or seen + new > limit
        if evicting and kwargs.get("output_attentions", getattr(self.config, "output_attentions", False)):
            raise RetrofitError(
                "attention weights exist up to window + sinks tokens only, where the base's own attention runs: leave "
                "output_attentions out, or take the teacher's inside memory_off()"
            )
        slot, full = None, False
        if layers and evicting:
            enough = max(memory.capacity for memory in memories.values()) + max(starts.pads)
            full = evicted_before and new == 1 and seen >= enough
            slot = count_slots(layers, seen + new, home)
            layers[0].full = seen + new >= enough
        return Pass(seen, new, starts, evicting, self.turn, home, home, keeper, slot, full)

    def turn(self, positions: Tensor) -> Turn:
        """The rotary tables at ``positions`` (1 or B, n), fractions allowed, in float32."""
        # an input in float32 asks for tables in float32
        return self.rotary_emb(torch.empty(0, dtype=torch.float32, device=positions.device), positions)


def count_slots(layers: list[MemoryCacheLayer], total: int, device: torch.device) -> Tensor:
    """The slot ``(1,)`` of the last of ``total`` tokens, where the layers of a cache share it."""
    slot = layers[0].slot
    if slot is None:
        with torch.inference_mode(False):  # a later call may be outside it
            slot = torch.empty(1, dtype=torch.long, device=device)
        for layer in layers:
            layer.slot = slot
    return slot.fill_(total - 1)


def warn_of_length(config: Any, length: int) -> None:
    """Say once that ``length`` tokens are more than the base's positions were made for."""
    longest = longest_input(config)
    if longest is not None and length > longest:
        logger.warning_once(
            f"the input is longer than the {longest} tokens that the base's positions were made for: results may get "
            "worse, with the memory and without; use a base made for longer inputs, or yarn scaling"
        )


def _cache_layers(cache: Cache | None) -> list[Any]:
    return [] if cache is None else cache.layers

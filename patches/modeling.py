"""The model's body: it builds the memories, and plans each forward pass for all layers."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.utils import logging

from .attention import add_memory
from .cache import MemoryCache, SequenceState
from .config import MemoryConfig, check_base, native_window
from .errors import RetrofitError
from .kinds import build_memory
from .memory import Memory
from .options import read_bytes
from .pretrained import MemoryPreTrained
from .rotary import Turn, longest_input
from .sequence import UNPADDED, Pass, find_starts

logger = logging.get_logger(__name__)

# of models by their id, since what a model holds is copied with it
_off: ContextVar[frozenset[int]] = ContextVar("off", default=frozenset())  # in this thread or task
_calls: Counter[int] = Counter()  # that are running, in any thread
_lock = Lock()  # of these counts


def _count_calls(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, known to be running while it does; a compiler sees nothing of it."""

    @wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        with _lock:
            _calls[id(self)] += 1
        try:
            return forward(self, *args, **kwargs)
        finally:
            with _lock:
                _calls[id(self)] -= 1

    return call


class MemoryModel(MemoryPreTrained):
    """Mixin in front of a family's model class."""

    _auto_class = "AutoModel"

    def __init__(self, config: Any):
        super().__init__(config)
        self.switched_on, self.blocks_off = True, 0
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
                attention.__class__ = add_memory(attention.__class__)
                attention.memory = build_memory(config, settings)
        self.post_init()

    def memories(self) -> dict[int, Memory]:
        """The memory of each patched layer, by layer index."""
        found = ((index, getattr(layer.self_attn, "memory", None)) for index, layer in enumerate(self.layers))
        return {index: memory for index, memory in found if memory is not None}

    @property
    def memory_enabled(self) -> bool:
        """Whether a call has the memory: :meth:`memory_off` takes it from those of its own thread or task.

        A compiler cannot ask whose call it is: what is compiled has none while any thread is in such a block.
        """
        off = self.blocks_off > 0 if torch.compiler.is_compiling() else id(self) in _off.get()
        return self.switched_on and not off

    @memory_enabled.setter
    def memory_enabled(self, on: bool) -> None:
        self.switched_on = on

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
                layers have windows of their own; a call of this model is running.
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
        with _lock:
            if _calls[id(self)]:
                raise RetrofitError("another thread is in the middle of a call of this model: set the window after it")
            for memory, new in pairs:
                memory.window, memory.sinks = new.window, new.sinks
        self.config.memory = {**self.config.memory, "window": changed.window, "sinks": changed.sinks}

    def set_budget(self, size: int | str, window: int | None = None) -> None:
        """Let ``expected`` keep more or less from the next call on an empty cache, without calibrating again.

        The entries of all heads are multiplied by the same number. It is written to the configuration, so it is saved.

        Args:
            size: bytes that one sequence keeps in a layer on average, sinks, window and entries, such as ``"64KiB"``.
            window: W, if it changes, too.

        Raises:
            RetrofitError: another kind of memory; bytes that hold no entry beside the window; as :meth:`set_window`.
        """
        if self.config.memory["kind"] != "expected":
            raise RetrofitError(f"memory {self.config.memory['kind']!r} has no budget: it is for memory 'expected'")
        memories: dict[int, Any] = {index: one for index, one in self.memories().items() if one.kind == "expected"}
        given, heads = read_bytes(size), [(index, n) for index, one in memories.items() for n in one.rows]
        first = next(iter(memories.values()))
        token = 2 * first.kv_heads * first.head_dim * self.dtype.itemsize
        exact = sum((window or one.window) + one.sinks for one in memories.values()) * token
        total = (given * len(memories) - exact) // first.entry_bytes(self.dtype)
        if total < 1:
            raise RetrofitError(
                f"{given:,} bytes per layer hold no entry beside a window of {window or first.window}: give more, or a "
                "smaller window"
            )
        if window is not None:
            self.set_window(window)
        wanted = [n * total / sum(n for _, n in heads) for _, n in heads]
        numbers = [int(one) for one in wanted]
        for at in sorted(range(len(heads)), key=lambda at: numbers[at] - wanted[at])[: total - sum(numbers)]:
            numbers[at] += 1
        rows = {index: [n for (own, _), n in zip(heads, numbers, strict=True) if own == index] for index in memories}
        self.set_entries(rows)

    def set_entries(self, rows: dict[int, list[int]]) -> None:
        """Give the key/value heads of these layers so many entries, from the next call on an empty cache."""
        named = MemoryConfig.from_dict(self.config.memory).named_layers()
        memories = self.memories()
        with _lock:
            if _calls[id(self)]:
                raise RetrofitError(
                    "another thread is in the middle of a call of this model: change its entries after it"
                )
            for index, own in rows.items():
                named[index] = {**named.get(index, {}), "rows": own}
                memories[index].options = replace(memories[index].options, rows=own)
        by_layer = {str(index): named[index] for index in sorted(named)}
        self.config.memory = {**self.config.memory, "by_layer": by_layer}

    @contextmanager
    def memory_off(self) -> Iterator[Any]:
        """Inside the block the model is its base, full attention, bit for bit, in this thread or task alone."""
        before = _off.set(_off.get() | {id(self)})
        self._count_blocks(1)
        try:
            yield self
        finally:
            self._count_blocks(-1)
            _off.reset(before)

    def _count_blocks(self, more: int) -> None:
        with _lock:
            self.blocks_off += more

    @_count_calls
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
        memory_pass, memories = None, self.memories()
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is not None and not torch.compiler.is_compiling():
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            warn_of_length(self.config, seen + tokens.shape[1])
        cache: MemoryCache | None = None
        if not self.memory_enabled:
            if isinstance(past_key_values, MemoryCache):
                if past_key_values.sequence.seen:
                    raise RetrofitError(
                        "this cache was filled with the memory on and cannot be continued with it off: start a new "
                        "cache"
                    )
                past_key_values.layers = [DynamicLayer() for _ in past_key_values.layers]
        elif memories and tokens is not None:
            if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
                past_key_values = DynamicCache(config=self.config)
            cache = None if past_key_values is None else MemoryCache.adopt(past_key_values, memories)
            memory_pass = self._plan_pass(tokens, attention_mask, position_ids, cache, memories, kwargs)
            if memory_pass.evicting and len(memories) == len(self.layers):
                # a 4D mask is passed through as it is: this one stands for "none needed"
                attention_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
            if memory_pass.decoding and position_ids is None:
                position_ids = memory_pass.positions(0, 1)
            kwargs["memory_pass"] = memory_pass
        if cache is not None and not torch.compiler.is_compiling():
            cache.sequence.unfinished = True
        out = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        if cache is not None and memory_pass is not None:
            self._count_pass(cache.sequence, memory_pass, memories)
        return out

    def plan(self, tokens: Tensor, mask: Tensor | None = None) -> Pass:
        """A pass over ``tokens`` (B, n) without a cache, for calls of single layers; ``mask`` (B, n) as the model's."""
        return self._plan_pass(tokens, mask, None, None, self.memories(), {})

    def _plan_pass(
        self,
        tokens: Tensor,
        mask: Any,
        position_ids: Tensor | None,
        cache: MemoryCache | None,
        memories: dict[int, Memory],
        kwargs: dict[str, Any],
    ) -> Pass:
        new, home = tokens.shape[1], tokens.device
        before = SequenceState(UNPADDED) if cache is None else cache.sequence
        if new == 1 and before.full and torch.compiler.is_compiling() and self.compiles:
            # the device counts; that nothing was seen is as good as any number, since only distances are used
            return Pass(0, 1, before.starts, True, self.turn, home, home, decoding=True, index=before.count_up())
        if before.unfinished:
            raise RetrofitError(
                "an earlier call with this cache ended in the middle, and some layers are ahead of others: start a new "
                "cache"
            )
        seen = before.seen
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
        starts = find_starts(before.starts, seen, new, plain, position_ids)
        limit = capacity + min(starts.pads)
        native = native_window(self.config)
        if native is not None and len(memories) < len(self.layers):
            limit = min(limit, native)  # the mask made for the other layers is no wider: our own attention from here
        evicting = before.evicting or seen + new > limit
        if evicting and kwargs.get("output_attentions", getattr(self.config, "output_attentions", False)):
            raise RetrofitError(
                "attention weights exist up to window + sinks tokens only, where the base's own attention runs: leave "
                "output_attentions out, or take the teacher's inside memory_off()"
            )
        if new == 1 and before.full:
            return Pass(seen, 1, starts, True, self.turn, home, home, decoding=True, index=before.count_up())
        return Pass(seen, new, starts, evicting, self.turn, home, home)

    def _count_pass(self, sequence: SequenceState, done: Pass, memories: dict[int, Memory]) -> None:
        """Note in the cache that a pass is done."""
        if torch.compiler.is_compiling():
            sequence.counted = True  # a number that changes would compile every step anew
            return
        sequence.unfinished = False
        sequence.starts, sequence.evicting, sequence.seen = done.starts, done.evicting, done.seen + done.new
        most = max(memory.capacity for memory in memories.values()) + max(done.starts.pads)
        sequence.full = done.evicting and sequence.seen > most
        if sequence.full and not done.decoding:
            sequence.set_index(done.home)

    def turn(self, positions: Tensor) -> Turn:
        """The rotary tables at ``positions`` (1 or B, n), fractions allowed, in float32."""
        # an input in float32 asks for tables in float32
        return self.rotary_emb(torch.empty(0, dtype=torch.float32, device=positions.device), positions)


def warn_of_length(config: Any, length: int) -> None:
    """Say once that ``length`` tokens are more than the base's positions were made for."""
    longest = longest_input(config)
    if longest is not None and length > longest:
        logger.warning_once(
            f"the input is longer than the {longest} tokens that the base's positions were made for: results may get "
            "worse, with the memory and without; use a base made for longer inputs, or yarn scaling"
        )

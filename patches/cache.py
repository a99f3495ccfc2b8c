"""The cache: what it holds of each layer, and what it knows of the texts.

While nothing was evicted, a layer grows as a plain cache does, padding included, and the base's own attention reads it.
From the first eviction on its texts are *aligned*: token ``t`` of every text lies at place ``t`` while there are S + W
of them, and then at ``S + (t - S) % W``, behind the sinks, where it takes the place of the token that it evicts.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad as fill
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .errors import RetrofitError
from .sequence import UNPADDED, Pass, Starts, Text

FILLED_WITHOUT = "this cache was filled with the memory off: start a new cache, or continue it inside memory_off()"


def newest_at_places(total: int, places: int, device: torch.device | None = None) -> Tensor:
    """Which of ``total`` items is the newest at each place of a ring that item i enters at ``i % places``.

    Ten items in a ring of four; negative where none has come yet:

    >>> newest_at_places(10, 4).tolist(), newest_at_places(3, 4).tolist()
    ([8, 9, 6, 7], [0, 1, 2, -1])
    """
    last = total - 1
    return last - (last - torch.arange(places, device=device)) % max(places, 1)


@dataclass
class Stream:
    """The tokens that a call works on: the W before it and its own n, in order."""

    k: Tensor  # (B, H_kv, W + n, D); zeros before a text's first token
    v: Tensor  # likewise
    gates: Tensor | None  # write gates of the same tokens (B, G, W + n)
    sink_k: Tensor  # (B, H_kv, S, D)
    sink_v: Tensor


@dataclass
class SequenceState:
    """What a cache knows of its texts, for all layers.

    Attributes:
        starts: where each text starts.
        evicting: whether a token has left some layer's window.
        full: whether every layer's sinks and window are full in every text, so that a single token is plain decoding.
        index: of each text's newest token ``(1 or B,)``, which a compiled step counts up on the device.
        counted: whether the device has counted on, and ``seen`` must ask it.
        unfinished: whether a call is under way, or was ended by an error that left some layers ahead of others.
    """

    starts: Starts
    evicting: bool = False
    full: bool = False
    index: Tensor | None = None
    counted: bool = False
    unfinished: bool = False
    _seen: int = 0

    @property
    def seen(self) -> int:
        """Slots that were given, padding included."""
        if not torch.compiler.is_compiling() and self.counted:
            assert self.index is not None
            self.seen = int(self.index[0]) + self.starts.pads[0] + 1
        return self._seen

    @seen.setter
    def seen(self, tokens: int) -> None:
        self._seen, self.counted = tokens, False

    def set_index(self, device: torch.device) -> None:
        """Let ``index`` say what ``seen`` says; a tensor of the right size stays where it is."""
        newest = [self.seen - 1 - pad for pad in self.starts.pads]
        if self.index is None or len(self.index) != len(newest):
            with torch.inference_mode(False):  # a later call may be outside it
                self.index = torch.empty(len(newest), dtype=torch.long, device=device)
        if len(newest) == 1:  # filled in, not copied from the host: a GPU need not be waited for
            self.index.fill_(newest[0])
        else:
            self.index.copy_(torch.tensor(newest))

    def count_up(self) -> Tensor:
        """``index`` one token later; a cache whose call then fails stays unfinished, and is refused."""
        assert self.index is not None
        index = self.index.add_(1)
        # with a gradient, what is computed again may be computed after the cache has counted on
        return index.clone() if torch.is_grad_enabled() else index

    def select(self, rows: Callable[[list[int]], list[int]]) -> None:
        """Go on with other rows of the batch: those that ``rows`` chooses of a list of all their numbers."""
        if self.starts.rows > 1:
            self.seen = self.seen  # while the device's count is that of these rows
            self.starts = self.starts.select(rows(list(range(self.starts.rows))))
            if self.index is not None:
                self.set_index(self.index.device)


class MemoryCacheLayer(DynamicLayer):
    """One layer's bounded cache. Every tensor has the batch as its first dimension.

    T = 10 tokens, W = 4, S = 1: token 0 is the sink, the ring holds tokens 9, 6, 7, 8; token 10 takes the place of 6.

    >>> here, tokens = torch.device("cpu"), torch.arange(11.0).view(1, 1, 11, 1)
    >>> layer = MemoryCacheLayer("none", window=4, sinks=1)
    >>> now = Pass(0, 10, Starts(), True, None, here, here)
    >>> layer.commit(layer.stream(now, tokens[:, :, :10], tokens[:, :, :10], None), now)
    >>> layer.keys.flatten().tolist()
    [0.0, 9.0, 6.0, 7.0, 8.0]
    >>> now = Pass(10, 1, Starts(), True, None, here, here, decoding=True)
    >>> evicted, _, _ = layer.replace(now, tokens[:, :, 10:], tokens[:, :, 10:], None)
    >>> evicted.item(), layer.keys.flatten().tolist()
    (6.0, [0.0, 9.0, 10.0, 7.0, 8.0])

    Attributes:
        keys, values: ``(B, H_kv, seen, D)`` while nothing was evicted, then S + W tokens at most (of an eviction
            policy: ``capacity`` tokens of its choice).
        gates: write gates beside them ``(B, G, tokens)``: a token's input is gone by the time it is evicted. Once
            texts are aligned, those of the ring alone.
        state: the memory's tensors by name; empty until something was written.
        aligned: whether texts begin at place 0; before, padding is in front of them.
        shared: whether another cache may hold the same tensors.
        sequence: what the cache knows of the texts; None for a layer that stands alone.
    """

    is_memory_layer = True
    is_compileable = False
    keeps = True  # whether what is given is read by a later call
    keys: Any  # tensors that are there once the first token is
    values: Any
    gates: Any
    is_initialized: bool

    def __init__(
        self,
        kind: str,
        window: int,
        sinks: int,
        options: Any = None,
        capacity: int | None = None,
        sequence: SequenceState | None = None,
    ):
        super().__init__()
        self.kind, self.window, self.sinks, self.options = kind, window, sinks, options
        self.capacity = window + sinks if capacity is None else capacity
        self.sequence = sequence
        self.reset()

    def reset(self) -> None:
        self.keys = self.values = self.gates = None
        self.state: dict[str, Tensor] = {}
        self.is_initialized = self.aligned = self.shared = False

    def hold(self, keys: Tensor, values: Tensor, gates: Tensor | None = None) -> None:
        """Replace what is held."""
        self.keys, self.values, self.gates = keys, values, gates
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    # ---- while nothing was evicted ----

    def append(self, k: Tensor, v: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keep arriving tokens with their write gates; returns all keys and values, for the base's own attention."""
        if self.is_initialized:
            k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
            gates = None if gates is None else torch.cat([self.gates, gates], 2)
        else:  # views of a projection's output would keep all of it alive; a plain cache lays its own out like this
            k, v = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
        self.hold(k, v, gates)
        return k, v

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Refused: a model that calls this has no memory, or has it off."""
        raise RetrofitError(
            "this cache belongs to a retrofitted model with its memory on, which alone can continue it: start a new one"
        )

    # ---- once tokens are evicted ----

    def stream(self, now: Pass, k: Tensor, v: Tensor, gates: Tensor | None) -> Stream:
        """The W tokens before this call and the new ones, and the sinks. Shapes as in :class:`Stream`."""
        sinks, seen, length = self.sinks, now.seen, self.window + now.new
        if seen > sinks + self.window:
            order = (torch.arange(self.window, device=k.device) + seen - sinks) % self.window  # oldest first
            k = torch.cat([self.keys[:, :, sinks:].index_select(2, order), k], 2)
            v = torch.cat([self.values[:, :, sinks:].index_select(2, order), v], 2)
            gates = None if gates is None else torch.cat([self.gates.index_select(2, order), gates], 2)
            return Stream(k, v, gates, self.keys[:, :, :sinks], self.values[:, :, :sinks])
        if seen:
            k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
            gates = None if gates is None else torch.cat([self.gates, gates], 2)
        last = None if gates is None else _take_last(gates, length)
        return Stream(_take_last(k, length), _take_last(v, length), last, k[:, :, :sinks], v[:, :, :sinks])

    def commit(self, stream: Stream, now: Pass) -> None:
        """Keep the sinks and the last W tokens of ``stream`` that are none."""
        if not self.keeps:
            return
        behind_sinks = max(now.seen + now.new - self.sinks, 0)
        order = newest_at_places(behind_sinks, min(behind_sinks, self.window), stream.k.device)
        order = order + self.sinks - now.seen + self.window  # token -> place in the stream
        keys = torch.cat([stream.sink_k, stream.k.index_select(2, order)], 2)
        values = torch.cat([stream.sink_v, stream.v.index_select(2, order)], 2)
        self.hold(keys, values, None if stream.gates is None else stream.gates.index_select(2, order))
        self.aligned = True

    def replace(self, now: Pass, k: Tensor, v: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Plain decoding: put a token in the place of the one it evicts; returns that one's key, value and gates."""
        in_ring, place = now.places(self.window, self.sinks)
        old = None if gates is None else _exchange_token(self.gates, in_ring, gates)
        return _exchange_token(self.keys, place, k), _exchange_token(self.values, place, v), old

    def take_tensors(self) -> None:
        """Make sure that tensors may be written to in place: that no fork holds them, too, and that they were not made
        in inference mode, which nothing outside it may write to."""
        if torch.compiler.is_compiling() or not self.is_initialized:
            return
        if self.shared or (self.keys.is_inference() and not torch.is_inference_mode_enabled()):
            self.change_tensors(torch.clone)
            self.shared = False

    def part(self, text: Text, state: Mapping[str, tuple[int, ...]]) -> "MemoryCacheLayer":
        """What is held of some texts that start alike, as a layer that stands alone; its tensors are views.

        ``state`` has the shapes of one text's state.
        """
        seen, rows = text.now.seen, text.rows
        part = type(self)(self.kind, self.window, self.sinks, self.options, self.capacity)
        part.aligned = True
        if not self.is_initialized or not seen:
            return part
        pad = 0 if self.aligned else self.keys.shape[2] - seen
        keys, values = (x[rows, :, pad : pad + min(seen, self.capacity)] for x in (self.keys, self.values))
        gates = self.gates
        if gates is not None:
            first = 0 if self.aligned else pad + self.sinks
            gates = gates[rows, :, first : first + min(max(seen - self.sinks, 0), self.window)]
        part.hold(keys, values, gates)
        for name in state.keys() & self.state.keys():
            # before texts are aligned, what is kept of each token lies behind padding, too
            corner = (slice(-size, None) if pad else slice(size) for size in state[name])
            part.state[name] = self.state[name][(rows, *corner)]
        return part

    def join(self, parts: list[tuple[slice, "MemoryCacheLayer"]]) -> None:
        """Take back what :meth:`part` gave of all rows of the batch, one behind the other."""
        if not self.keeps:
            return
        held, rows = [part.named_tensors() for _, part in parts], [rows for rows, _ in parts]
        names, before = dict.fromkeys(name for tensors in held for name in tensors), self.named_tensors()
        self.set_tensors({name: _join_rows(before.get(name), [x.get(name) for x in held], rows) for name in names})
        self.aligned = True

    # ---- what a transformers cache must answer ----

    def get_seq_length(self, *args: Any) -> int:
        """Tokens seen, not tokens kept: positions and ``generate`` count from it."""
        return 0 if self.sequence is None else self.sequence.seen

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """The mask that layers with full attention need; ours does not use one once tokens were evicted."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + new, 0

    @property
    def is_croppable(self) -> bool:
        return not self.aligned

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; impossible once something was evicted, since a memory cannot be unwritten."""
        if tokens_to_remove == 0:
            return
        if self.aligned or self.state:
            raise RetrofitError(
                "this cache has evicted tokens into its memory and cannot be cropped: start a new cache"
            )
        super().crop(tokens_to_remove)
        if self.gates is not None:
            self.gates = self.gates[:, :, : self.keys.shape[2]]

    def tensors(self) -> list[Tensor]:
        """Everything this layer holds."""
        return list(self.named_tensors().values())

    def named_tensors(self) -> dict[str, Tensor]:
        """Everything this layer holds, by name."""
        kept = {"keys": self.keys, "values": self.values, "gates": self.gates}
        kept = {name: x for name, x in kept.items() if x is not None}
        return kept | {f"state.{name}": x for name, x in self.state.items()}

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold what :meth:`named_tensors` gave, perhaps changed."""
        if "keys" in tensors:
            self.hold(tensors["keys"], tensors["values"], tensors.get("gates"))
        self.state = {name.removeprefix("state."): x for name, x in tensors.items() if name.startswith("state.")}

    def change_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        self.set_tensors({name: change(x) for name, x in self.named_tensors().items()})

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.change_tensors(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change_tensors(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.change_tensors(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        self.change_tensors(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self.change_tensors(lambda x: x.to(self.device, non_blocking=True))


class ScratchLayer(MemoryCacheLayer):
    """What stands in for a cache where there is none: a call reads what it has written itself, and then it is gone."""

    keeps = False

    def append(self, k: Tensor, v: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor]:
        return k, v


class MemoryCache(DynamicCache):
    """The cache of a retrofitted model: a :class:`MemoryCacheLayer` for each memory, and what all know of the texts.

    Attributes:
        sequence: that knowledge.
        compileable: whether ``generate`` was asked to compile. Steps are, once every window is full: from then on each
            writes in place to the tensors that there are, and the device knows where.
    """

    sequence: SequenceState
    compileable: bool

    @classmethod
    def adopt(cls, cache: Cache, memories: Mapping[int, Any]) -> "MemoryCache":
        """Make ``cache`` one for these memories, by index of their layers, if it is none yet. An empty ``DynamicCache``
        becomes one in place, because its owner goes on with it.

        Raises:
            RetrofitError: it holds tokens that were cached without the memory, under another window or with other
                options, or is of a class that cannot be replaced (static, quantised, ...).
        """
        if not isinstance(cache, cls):
            _refuse_cache(cache)
            cache.__class__ = cls
            cache.sequence, cache.compileable = SequenceState(UNPADDED), False
        while len(cache.layers) <= max(memories):
            cache.layers.append(DynamicLayer())
        for index, memory in memories.items():
            layer = cache.layers[index]
            if not isinstance(layer, MemoryCacheLayer) and layer.get_seq_length():
                raise RetrofitError(FILLED_WITHOUT)
            if not isinstance(layer, MemoryCacheLayer) or not _check_owner(layer, memory, cache.sequence, index):
                facts = (memory.kind, memory.window, memory.sinks, memory.options, memory.capacity)
                cache.layers[index] = MemoryCacheLayer(*facts, cache.sequence)
        return cache

    @property
    def is_compileable(self) -> bool:
        return self.compileable

    def is_full(self, new: int) -> bool:
        """Whether ``new`` further tokens are a step of plain decoding."""
        return new == 1 and self.sequence.full

    def mark_static(self) -> None:
        """Tell CUDA graphs that the tensors stay where they are."""
        assert self.sequence.index is not None
        torch._dynamo.mark_static_address(self.sequence.index)
        for layer in self.layers:
            for tensor in layer.tensors():
                torch._dynamo.mark_static_address(tensor)

    def fork(self) -> "MemoryCache":
        """A cache that goes its own way: nothing that is added to it is seen by this one. No tensor is copied."""
        own, index = copy(self), self.sequence.index
        own.sequence = replace(self.sequence, index=None if index is None else index.clone())
        for layer in self.layers:
            layer.shared = True
        own.layers = [copy(layer) for layer in self.layers]
        for layer in own.layers:
            if isinstance(layer, MemoryCacheLayer):
                layer.sequence, layer.state = own.sequence, dict(layer.state)
        return own

    def crop(self, *args: Any, **kwargs: Any) -> None:
        for layer in self.layers:  # before any of them is cropped
            if isinstance(layer, MemoryCacheLayer):
                copy(layer).crop(*args, **kwargs)
        super().crop(*args, **kwargs)
        held = next((layer.keys for layer in self.layers if isinstance(layer, MemoryCacheLayer)), None)
        if not self.sequence.evicting:
            self.sequence.seen = 0 if held is None else held.shape[2]

    def reset(self) -> None:
        super().reset()
        for name, value in vars(SequenceState(UNPADDED)).items():
            setattr(self.sequence, name, value)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.sequence.select(lambda rows: [rows[index] for index in beam_idx.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.sequence.select(lambda rows: [row for row in rows for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.sequence.select(lambda rows: torch.arange(len(rows))[indices.cpu()].tolist())


def _refuse_cache(cache: Cache) -> None:
    """Refuse a cache that cannot become ours."""
    kinds = {type(layer).__name__ for layer in cache.layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    if type(cache) is not DynamicCache or kinds:
        raise RetrofitError(
            f"a cache of {', '.join(sorted(kinds)) or type(cache).__name__} cannot hold this model's memory: pass "
            "past_key_values=DynamicCache() or none, and leave cache_implementation unset"
        )
    if cache.get_seq_length():
        raise RetrofitError(FILLED_WITHOUT)


def _check_owner(layer: MemoryCacheLayer, memory: Any, sequence: SequenceState, index: int) -> bool:
    """Whether a layer is this memory's; raises ``RetrofitError`` where it holds what another has written."""
    alike = (layer.kind, layer.window, layer.sinks) == (memory.kind, memory.window, memory.sinks)
    if alike and (torch.compiler.is_compiling() or layer.options == memory.options):
        return True
    if sequence.seen and alike:
        raise RetrofitError(
            f"layer {index} of this cache was filled by a {layer.kind!r} memory with {layer.options}, the model now "
            f"has {memory.options}: start a new cache"
        )
    if sequence.seen:
        raise RetrofitError(
            f"this cache was filled by a {layer.kind!r} memory with window={layer.window}, sinks={layer.sinks}, the "
            f"model now has {memory.kind!r} with window={memory.window}, sinks={memory.sinks}: start a new cache, or "
            "set the window back"
        )
    return False


def _take_last(x: Tensor, length: int) -> Tensor:
    """The last ``length`` tokens of ``x`` (B, H, T, ...), behind zeros if it has fewer."""
    missing = length - x.shape[2]
    return x[:, :, -missing:] if missing <= 0 else fill(x, (0, 0) * (x.dim() - 3) + (missing, 0))


def _exchange_token(held: Tensor, place: Tensor, new: Tensor) -> Tensor:
    """Write ``new`` (B, H, 1, ...) at ``place`` (1 or B,) of ``held`` (B, H, T, ...) and return what was there."""
    if len(place) == 1:
        old = held.index_select(2, place)
        held.index_copy_(2, place, new)
        return old
    at = torch.arange(len(place), device=place.device), slice(None), place
    old = held[at]
    held[at] = new.squeeze(2)
    return old.unsqueeze(2)


def _join_rows(before: Tensor | None, parts: list[Tensor | None], rows: list[slice]) -> Tensor:
    """Tensors of some rows each as one of all; ``before`` itself, if they are nothing but its views."""
    views = [None if before is None else before[each] for each in rows]
    if all(
        view is not None and part is not None and view.shape == part.shape and view.data_ptr() == part.data_ptr()
        for view, part in zip(views, parts, strict=True)
    ):
        assert before is not None
        return before
    there = [part for part in parts if part is not None]
    size = [max(lengths) for lengths in zip(*(part.shape[1:] for part in there), strict=True)]
    whole = []
    for part, each in zip(parts, rows, strict=True):
        part = there[0].new_zeros(each.stop - each.start, *size) if part is None else part
        missing = [most - length for most, length in zip(size, part.shape[1:], strict=True)]
        whole.append(fill(part, [x for more in reversed(missing) for x in (0, more)]) if any(missing) else part)
    return torch.cat(whole)

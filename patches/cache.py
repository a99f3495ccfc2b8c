"""The cache of one layer: first everything, then sinks, the last W tokens and the memory's state.

While nothing was evicted the layer is a plain growing cache and the base's own attention reads it. At the first
eviction it turns into one buffer of S + W slots, ``[sinks | ring]``: token ``t`` of the ring lies at ``S + t % W``, so
that in decoding the slot to write is the slot of the token that is evicted, and attention reads the buffer as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .errors import RetrofitError
from .padding import Starts


@dataclass
class Stream:
    """The tokens a forward pass works on: the W slots before it and its own n.

    Attributes:
        k, v: ``(B, H_kv, W + n, D)``; slot ``seen - W + i`` at index i. Before slot 0: zeros.
        gates: write gates of the same slots ``(B, W + n, G)``, or None for a memory without.
        sink_k, sink_v: ``(B, H_kv, S, D)``; a sink that has not arrived yet holds some other token's row.
    """

    k: Tensor
    v: Tensor
    gates: Tensor | None
    sink_k: Tensor
    sink_v: Tensor


class MemoryCacheLayer(DynamicLayer):
    """One layer's bounded cache. Every tensor has the batch as its first dimension.

    T = 10 tokens, W = 4, S = 1: token 0 is the sink, the ring holds 8, 9, 6, 7; token 10 takes the place of token 6.

    >>> tokens = torch.arange(10.0).view(1, 1, 10, 1)
    >>> layer = MemoryCacheLayer("none", window=4, sinks=1)
    >>> layer.commit(layer.stream(tokens, tokens, None, None), new=10)
    >>> layer.keys.flatten().tolist()
    [0.0, 8.0, 9.0, 6.0, 7.0]
    >>> evicted, _, _ = layer.push(tokens[:, :, :1] + 10, tokens[:, :, :1] + 10, None)
    >>> evicted.item(), layer.keys.flatten().tolist()
    (6.0, [0.0, 8.0, 9.0, 10.0, 7.0])

    Attributes:
        keys, values: ``(B, H_kv, seen, D)`` while nothing was evicted, ``(B, H_kv, S + W, D)`` afterwards (an eviction
            policy: the rows it keeps).
        gates: write gates beside them, ``(B, seen, G)`` or ``(B, W, G)``: a token's input is gone by the time it is
            evicted.
        state: the memory's tensors by name; empty until something was written.
        seen: tokens this layer has been given, padding included.
        slot: of the newest token ``(1,)``, which a compiled step counts up on the device; shared by a cache's layers.
        full: whether every row's sinks and window are there, so that a single token is plain decoding.
        evicting: whether the buffer has turned into sinks + ring.
        starts: where each row's text starts; kept on the first of a cache's layers.
    """

    is_memory_layer = True
    is_compileable = False
    keys: Any  # tensors that are there once the first token is
    values: Any
    gates: Any
    is_initialized: bool

    def __init__(self, kind: str, window: int, sinks: int, options: Any = None):
        super().__init__()
        self.kind, self.window, self.sinks, self.options = kind, window, sinks, options
        self._clear()

    def _clear(self) -> None:
        self.gates = None
        self.state: dict[str, Tensor] = {}
        self.slot: Tensor | None = None
        self.seen = 0
        self.evicting = self.full = False
        self.starts = Starts()

    @property
    def seen(self) -> int:
        if self._behind and not torch.compiler.is_compiling():
            assert self.slot is not None
            self.seen = int(self.slot) + 1
        return self._seen

    @seen.setter
    def seen(self, tokens: int) -> None:
        self._seen, self._behind = tokens, False

    # ---- while nothing was evicted ----

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, as a plain cache does; the base's attention calls this."""
        if self.evicting:
            raise RetrofitError("this cache has already evicted tokens: only the retrofitted model can continue it")
        self.seen += key_states.shape[-2]
        return super().update(key_states, value_states)

    def append_gates(self, gates: Tensor | None) -> None:
        """Keep the write gates ``(B, n, G)`` of arriving tokens."""
        if gates is not None:
            self.gates = gates if self.gates is None else torch.cat([self.gates, gates], 1)

    # ---- once tokens are evicted ----

    def stream(self, k: Tensor, v: Tensor, gates: Tensor | None, pad: Tensor | None) -> Stream:
        """Lay out the W slots before this call, its ``n`` new tokens and the sinks. Shapes as in :class:`Stream`."""
        if not self.evicting:
            if self.seen:
                k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
                gates = None if gates is None else torch.cat([self.gates, gates], 1)
            return plain_stream(k, v, gates, pad, seen=self.seen, window=self.window, sinks=self.sinks)
        keys, values = self.keys[:, :, self.sinks :], self.values[:, :, self.sinks :]
        order = torch.arange(self.seen, self.seen + self.window, device=k.device) % self.window
        all_k, all_v = torch.cat([keys[:, :, order], k], 2), torch.cat([values[:, :, order], v], 2)
        all_gates = None if gates is None else torch.cat([self.gates[:, order], gates], 1)
        sink_k, sink_v = self.keys[:, :, : self.sinks], self.values[:, :, : self.sinks]
        if pad is not None and self.sinks:  # a row with much padding may have sinks that are still in the window
            first = self.seen - self.window  # slot of the stream's first token
            slot = pad[:, None] + torch.arange(self.sinks, device=k.device) - first
            arrived = (slot < 0)[:, None, :, None]
            sink_k = torch.where(arrived, sink_k, _take(all_k, slot))
            sink_v = torch.where(arrived, sink_v, _take(all_v, slot))
        return Stream(all_k, all_v, all_gates, sink_k, sink_v)

    def commit(self, stream: Stream, new: int) -> None:
        """Keep the last W slots of ``stream`` and its sinks; ``new`` tokens have been added."""
        order = torch.arange(self.window, device=stream.k.device)
        order = (order - self.seen - new) % self.window + stream.k.shape[2] - self.window  # ring place -> stream index
        self.gates = None if stream.gates is None else stream.gates[:, order]
        keys = torch.cat([stream.sink_k, stream.k[:, :, order]], 2)
        self.hold(keys, torch.cat([stream.sink_v, stream.v[:, :, order]], 2), new)

    def hold(self, keys: Tensor, values: Tensor, new: int) -> None:
        """Replace all rows by these ``(B, H_kv, rows, D)``, from now on not one per token; ``new`` have been added."""
        self.keys, self.values = keys, values
        self.seen += new
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.evicting = True

    def push(
        self, k: Tensor, v: Tensor, gates: Tensor | None, places: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Put one token in the place of the one it evicts; return that key, value ``(B, H_kv, 1, D)`` and gates.

        Args:
            places: where in the ring and in the buffer ``(1,)``, the same in all layers; None: as ``seen`` says.
        """
        if torch.compiler.is_compiling() and places is not None:
            self._behind = True  # a number that changes would compile every step anew
        else:
            self.seen += 1
        if not torch.compiler.is_compiling() and self.keys.is_inference() and not torch.is_inference_mode_enabled():
            self._change(torch.clone)  # filled in inference mode, whose tensors nothing outside it may write to
        if places is None:
            place = torch.full((1,), (self.seen - 1) % self.window, device=k.device)
            places = place, place + self.sinks
        evicted, old_gates = [rows.index_select(2, places[1]) for rows in (self.keys, self.values)], None
        self.keys.index_copy_(2, places[1], k)
        self.values.index_copy_(2, places[1], v)
        if gates is not None:
            old_gates = self.gates.index_select(1, places[0])
            self.gates.index_copy_(1, places[0], gates)
        return *evicted, old_gates

    # ---- what a transformers cache must answer ----

    def get_seq_length(self, *args: Any) -> int:
        """Tokens seen, not rows kept: positions and ``generate`` count from it."""
        return self.seen

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """The mask that layers with full attention need; ours does not use one once tokens were evicted."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.seen + new, 0

    @property
    def is_croppable(self) -> bool:
        return not self.evicting

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; impossible once something was evicted, since a memory cannot be unwritten."""
        if tokens_to_remove == 0:
            return
        if self.evicting:
            raise RetrofitError(
                "this cache has evicted tokens into its memory and cannot be cropped: start a new cache"
            )
        before = self.seen
        super().crop(tokens_to_remove)
        self.seen = self.keys.shape[-2] if self.keys is not None else 0
        if self.gates is not None and self.seen != before:
            self.gates = self.gates[:, : self.seen]

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self._clear()

    def tensors(self) -> list[Tensor]:
        """Everything this layer holds."""
        kept = [self.keys, self.values, self.gates, *self.state.values()]
        return [tensor for tensor in kept if tensor is not None]

    def _change(self, change: Any) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self.gates = None if self.gates is None else change(self.gates)
            self.state = {name: change(tensor) for name, tensor in self.state.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))
        self._restart(lambda rows: [rows[index] for index in beam_idx.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))
        self._restart(lambda rows: [row for row in rows for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda x: x[indices.to(x.device)])
        self._restart(lambda rows: torch.arange(len(rows))[indices.cpu()].tolist())

    def _restart(self, choose: Callable[[list[int]], list[int]]) -> None:
        if self.starts.padded or self.starts.rows > 1:
            self.starts = self.starts.select(choose(list(range(self.starts.rows))))

    def offload(self) -> None:
        self._change(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._change(lambda x: x.to(self.device, non_blocking=True))


class CompileableCache(DynamicCache):
    """What ``generate`` fills when it was asked to compile: steps are compiled once every window is full.

    From then on each writes in place to the tensors that there are, and the device knows where.
    """

    is_compileable = True

    def is_full(self, new: int) -> bool:
        """Whether ``new`` further tokens are a step of plain decoding."""
        return new == 1 and self.layers[0].full

    def mark_static(self) -> None:
        """Tell CUDA graphs that the tensors stay where they are."""
        for layer in self.layers:
            for tensor in (*layer.tensors(), layer.slot):
                torch._dynamo.mark_static_address(tensor)


def plain_stream(
    k: Tensor, v: Tensor, gates: Tensor | None, pad: Tensor | None, *, seen: int, window: int, sinks: int
) -> Stream:
    """The :class:`Stream` of tokens before any eviction: all of them, ``seen`` cached ones first, are given."""
    if pad is None:
        sink_k, sink_v = k[:, :, :sinks], v[:, :, :sinks]
    else:
        slot = pad[:, None] + torch.arange(sinks, device=k.device)
        sink_k, sink_v = _take(k, slot), _take(v, slot)
    first = seen - window
    if first >= 0:
        k, v, gates = k[:, :, first:], v[:, :, first:], None if gates is None else gates[:, first:]
    else:
        k, v = torch.nn.functional.pad(k, (0, 0, -first, 0)), torch.nn.functional.pad(v, (0, 0, -first, 0))
        gates = None if gates is None else torch.nn.functional.pad(gates, (0, 0, -first, 0))
    return Stream(k, v, gates, sink_k, sink_v)


def _take(x: Tensor, slot: Tensor) -> Tensor:
    """Rows of ``x`` (B, H_kv, L, D) at ``slot`` (B, S), out-of-range slots clamped -> (B, H_kv, S, D)."""
    index = slot.clamp(0, x.shape[2] - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, index)


def adopt(cache: Cache, index: int, kind: str, window: int, sinks: int, options: Any = None) -> MemoryCacheLayer:
    """Make layer ``index`` of a transformers cache ours, if it is still empty, and return it.

    Raises:
        RetrofitError: the layer holds tokens that were cached without the memory, under another window or with other
            options, or is of a class that cannot be replaced (static, quantised, ...).
    """
    replicate = getattr(cache, "layer_class_to_replicate", None)
    while len(cache.layers) <= index and replicate is not None:
        cache.layers.append(replicate())
    layer = cache.layers[index]
    if getattr(layer, "is_memory_layer", False):
        if (layer.kind, layer.window, layer.sinks) == (kind, window, sinks):
            if layer.gates is not None and not layer.evicting and layer.gates.shape[1] != layer.seen:
                raise RetrofitError(
                    "another model has added tokens to this cache, without the memory: start a new cache"
                )
            if not torch.compiler.is_compiling() and layer.options != options:
                if layer.seen:
                    raise RetrofitError(
                        f"layer {index} of this cache was filled by a {kind!r} memory with {layer.options}, the model "
                        f"now has {options}: start a new cache"
                    )
                layer.options = options
            return layer
        if layer.seen:
            raise RetrofitError(
                f"this cache was filled by a {layer.kind!r} memory with window={layer.window}, sinks={layer.sinks}, "
                f"the model now has {kind!r} with window={window}, sinks={sinks}: start a new cache, or set the "
                "window back"
            )
    elif type(layer).__name__ not in ("DynamicLayer", "DynamicSlidingWindowLayer"):
        raise RetrofitError(
            f"a cache of {type(layer).__name__} cannot hold this model's memory: pass past_key_values=DynamicCache() "
            "or none, and leave cache_implementation unset"
        )
    elif layer.get_seq_length():
        raise RetrofitError(
            "this cache was filled with the memory off: start a new cache, or continue it inside memory_off()"
        )
    ours = MemoryCacheLayer(kind, window, sinks, options)
    cache.layers[index] = ours
    return ours

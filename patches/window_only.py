"""Sinks + sliding window, alone or with a memory of what they evict."""

from typing import ClassVar

import torch
from torch import Tensor

from .cache import MemoryCacheLayer, Stream, plain_stream
from .kernels import decode_attention, window_attention
from .memory import Joined, Kept, Memory
from .step import Evicted, Step


class WindowOnly(Memory):
    """Sinks + sliding window and nothing else (StreamingLLM's attention at original positions, arXiv 2309.17453).

    Attributes:
        joins_window: whether the memory competes with the window's logits and :meth:`recall` needs ``step.lse``.
    """

    kind = "none"
    trainable = False
    writes_back = compiles = True
    joins_window: ClassVar[bool] = False

    def state_tensors(self, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Kept]:
        return {}

    def attend(self, step: Step) -> Joined:
        layer, n, gone = step.layer, step.now.new, step.now.evicted(self.window, self.sinks)
        if layer is not None and self.decodes(step, layer):
            k, v, gates = layer.push(step.k, step.v, step.gates, step.now.places(self.window, self.sinks))
            return self.recall(step, self._look_once(step, layer), gone, k, v, gates)
        new = step.k, step.v, step.gates, step.now.pad
        if layer is None:
            stream = plain_stream(*new, seen=0, window=self.window, sinks=self.sinks)
        else:
            stream = layer.stream(*new)
        out: Joined = self._look(step, stream), None
        if gone.count:
            k, v = stream.k[:, :, gone.first : n], stream.v[:, :, gone.first : n]
            gates = None if stream.gates is None else stream.gates[:, gone.first : n]
            out = self.recall(step, out[0], gone, k, v, gates)
        if layer is not None:
            layer.commit(stream, n)
        return out

    def _look(self, step: Step, stream: Stream) -> Tensor:
        rows = (step.q, stream.k, stream.v, stream.sink_k, stream.sink_v)
        q, k, v, sink_k, sink_v = (x.transpose(1, 2) for x in rows)
        local, step.lse = window_attention(
            q,
            k,
            v,
            sink_k,
            sink_v,
            window=self.window,
            start=step.now.seen,
            scale=step.scale,
            pad=step.now.pad,
            max_pad=step.now.max_pad,
            dropout=step.dropout,
            lse=self.joins_window,
        )
        return local

    def _look_once(self, step: Step, layer: MemoryCacheLayer) -> Tensor:
        rows, lse = (step.q, layer.keys, layer.values), self.joins_window
        local, step.lse = decode_attention(*rows, scale=step.scale, dropout=step.dropout, lse=lse)
        return local

    def decodes(self, step: Step, layer: MemoryCacheLayer) -> bool:
        """Whether this is plain decoding: one token, every row's buffer full, no graph for in-place writes to break."""
        return step.now.full and not step.differentiates(layer)

    def recall(self, step: Step, local: Tensor, gone: Evicted, k: Tensor, v: Tensor, gates: Tensor | None) -> Joined:
        """Write the evicted tokens, read the memory and join it with the window's output; here there is no memory.

        Query ``gone.first + i`` is paired with the ``i``-th evicted token: the one at distance W, written before it
        reads.

        Args:
            local: the window's output ``(B, n, H, D)``.
            gone: which tokens these are.
            k, v: evicted keys and values ``(B, H_kv, count, D)``.
            gates: their write gates ``(B, count, G)``.
        """
        return local, None

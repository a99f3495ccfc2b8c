"""Sinks + sliding window, alone or with a memory of what they evict."""

from typing import ClassVar

import torch
from torch import Tensor

from .cache import MemoryCacheLayer, Stream, plain_stream
from .kernels import decode_attention, window_attention
from .linear import cast, wide
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


class MatrixMemory(WindowOnly):
    """One matrix per head, written with evicted tokens, read by a product, added before the output projection."""

    trainable = True

    def read(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Write ``m`` tokens one after the other and read the memory after each.

        Args:
            x: attention inputs of the reading tokens ``(B, m, E)``.
            q: their queries ``(B, H, m, D)``.
            k, v: written keys and values ``(B, H_kv, m, D)``.
            gates: write gates of the written tokens ``(B, m, G)``; rows with no token to write have been silenced.
            state: the state before, or None.

        Returns:
            What is added to the window's output ``(B, m, H, D)``, exactly zero where nothing was ever written, and the
            new state.
        """
        raise NotImplementedError

    def silence(self, gates: Tensor, valid: Tensor) -> Tensor:
        """Gates ``(B, m, G)`` that leave the state as it is where ``valid`` (B, m) is False (padding and sinks).

        Here all gates become 0: no writing strength, and a log decay that forgets nothing.
        """
        return gates * valid.unsqueeze(-1)

    def state_tensors(self, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Kept]:
        return {"matrix": Kept((self.heads, self.head_dim, self.head_dim), wide(dtype))}

    def state_flops(self, evicted: int) -> int:
        return 2 * self.state_elements() * 2 * evicted  # one product to write, one to read

    def recall(self, step: Step, local: Tensor, gone: Evicted, k: Tensor, v: Tensor, gates: Tensor | None) -> Joined:
        assert gates is not None
        if gone.written is not None:
            gates = self.silence(gates, gone.written)
        layer = step.layer
        state = layer.state.get("matrix") if layer is not None else None
        x, q = step.reading(gone.first)
        read, state = self.read(x, q, k, v, gates, state)
        if layer is not None:
            layer.state["matrix"] = state
        return behind(local, gone.first, read), None


def behind(local: Tensor, first: int, added: Tensor) -> Tensor:
    """``local`` (B, n, H, D) with ``added`` (B, n - first, H, D) on what comes from ``first`` on."""
    added = cast(added, local.dtype)
    return local + added if first == 0 else torch.cat([local[:, :first], local[:, first:] + added], 1)

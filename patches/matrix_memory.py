"""Memories of one matrix per head: written with what leaves the window, read by a product, added to its output."""

from typing import ClassVar

import torch
from torch import Tensor

from .memory import Joined, Kept
from .precision import cast, wide
from .step import Evicted, Step
from .window_only import WindowOnly


class MatrixMemory(WindowOnly):
    """One matrix per head, written with evicted tokens, read by a product, added before the output projection.

    Attributes:
        shared: whether the query heads of a key head read one matrix; else each has its own.
        writes: products of a written token with each matrix.
    """

    trainable = True
    shared: ClassVar[bool] = False
    writes: ClassVar[int] = 1

    @property
    def states(self) -> int:
        """H_s, the matrices of a layer; whatever writes is there once for each."""
        return self.kv_heads if self.shared else self.heads

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
        return {"matrix": Kept((self.states, self.head_dim, self.head_dim), wide(dtype))}

    def state_flops(self, evicted: int) -> int:
        return 2 * self.head_dim**2 * (self.writes * self.states + self.heads) * evicted  # each query head reads once

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

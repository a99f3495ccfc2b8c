"""The attention of a patched layer: the base's own while nothing was evicted, the memory's afterwards.

Follow a token here: projected and rotated, it enters the window; W tokens later it leaves it and ``Memory.attend``
writes it to the state (or, if it is a sink, keeps it); from then on queries read it there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .cache import MemoryCacheLayer, adopt
from .memory import Memory, Step
from .rotary import Rotary


@dataclass
class MemoryPass:
    """What every layer must know of a forward pass with the memory on; made once by the model.

    Attributes:
        seen: tokens before this call, padding included.
        pad: left padding of each row ``(B,)``, or None when no row is padded.
        min_pad, max_pad: its extremes.
        evicting: whether a token leaves a window in this call or has before.
        offset: rotary position of a slot minus the slot, for each row ``(B or 1,)``.
        rotary: the model's rotary tables at any positions.
    """

    seen: int
    pad: Tensor | None
    min_pad: int
    max_pad: int
    evicting: bool
    offset: Tensor
    rotary: Rotary


# what the mixin stands in front of: a family's attention, known to the type checker as anything
Host: Any = object


class MemoryAttention(Host):
    """Mixin in front of a family's attention class: parameters keep their names, ``memory`` comes beside them."""

    memory: Memory

    def rotated_heads(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``(B, H, n, D)``, keys and values ``(B, H_kv, n, D)`` of ``x`` (B, n, E); the first two rotated."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k = self.normalised(self.q_proj(x).view(shape), self.k_proj(x).view(shape))
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *position_embeddings)
        return q, k, self.v_proj(x).view(shape).transpose(1, 2)

    @property
    def key_bias(self) -> Tensor | None:
        """What every key ``(H_kv * D,)`` holds before its rotation; families that normalise keys have none."""
        return self.k_proj.bias

    def normalised(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys ``(B, n, heads, D)`` before rotation; families that normalise them override this."""
        return q, k

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        memory_pass: MemoryPass | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As the family's attention; ``memory_pass`` is None with the memory off."""
        if memory_pass is None:
            return super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        memory, layer, gates = self.memory, None, None
        if past_key_values is not None:
            layer = adopt(past_key_values, self.layer_idx, memory.kind, memory.window, memory.sinks)
            layer.padded = memory_pass.pad is not None
        if layer is not None or memory_pass.evicting:
            with torch.autocast(hidden_states.device.type, enabled=False):
                gates = memory.write_gates(hidden_states)
        if not memory_pass.evicting:
            if layer is not None:
                layer.append_gates(gates)
            # not self.forward: the first releases of transformers 5 record what passes through that
            plain = super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            if layer is not None and memory.observes:
                with _at_hand(layer, past_key_values):
                    memory.observe(self._step(hidden_states, position_embeddings, gates, layer, memory_pass))
            return plain

        step = self._step(hidden_states, position_embeddings, gates, layer, memory_pass)
        with _at_hand(layer, past_key_values):
            heads, added = memory.attend(step)
        out = self.o_proj(heads.flatten(2))
        return (out if added is None else out + added), None

    def _step(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        gates: Tensor | None,
        layer: MemoryCacheLayer | None,
        memory_pass: MemoryPass,
    ) -> Step:
        q, k, v = self.rotated_heads(x, position_embeddings)
        return Step(
            x=x,
            q=q,
            k=k,
            v=v,
            gates=gates,
            layer=layer,
            seen=memory_pass.seen,
            pad=memory_pass.pad,
            min_pad=memory_pass.min_pad,
            max_pad=memory_pass.max_pad,
            offset=memory_pass.offset,
            rotary=memory_pass.rotary,
            scale=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            key_bias=self.key_bias,
        )


@contextmanager
def _at_hand(layer: MemoryCacheLayer | None, cache: Cache | None) -> Iterator[None]:
    """Inside the block the layer's tensors are on their own device, though the cache may offload them."""
    if layer is None or not getattr(cache, "offloading", False):
        yield
        return
    layer.prefetch()
    yield
    layer.offload()

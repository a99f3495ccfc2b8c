"""The attention of a patched layer: the base's own while nothing was evicted, the memory's afterwards.

Follow a token here: projected and rotated, it enters the window; W tokens later it leaves it and the memory writes it
to its state (or, if it is a sink, keeps it); from then on queries read it there.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from .cache import MemoryCacheLayer, ScratchLayer
from .memory import Memory, Step
from .precision import cast
from .rotary import Turn, for_heads, turned
from .sequence import Pass

# what the mixin stands in front of: a family's attention, known to the type checker as anything
Host: Any = object


class MemoryAttention(Host):
    """Mixin in front of a family's attention class: parameters keep their names, ``memory`` comes beside them."""

    memory: Memory
    use_rope = True  # whether this layer rotates queries and keys

    def plain_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``(B, H, n, D)``, keys and values ``(B, H_kv, n, D)`` of ``x`` (B, n, E), not yet rotated."""
        (B, n, _), D = x.shape, self.head_dim
        q, k, v = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        if n == 1:  # with one token, a view replaces the transpose
            return *self.normalise(q.view(B, -1, 1, D), k.view(B, -1, 1, D)), v.view(B, -1, 1, D)
        q, k = self.normalise(q.view(B, n, -1, D), k.view(B, n, -1, D))
        return q.transpose(1, 2), k.transpose(1, 2), v.view(B, n, -1, D).transpose(1, 2)

    def key_bias(self, x: Tensor) -> Tensor | None:
        """What every key ``(H_kv * D,)`` holds before its rotation; a bias that has gone through a norm is no such."""
        if self.k_proj.bias is None or hasattr(self, "k_norm"):
            return None
        return self.k_proj(x.new_zeros(1, x.shape[-1]))[0]  # called: an offloaded bias is nowhere else

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys ``(.., D)`` through the norms of each head, in families that have them."""
        return (self.q_norm(q), self.k_norm(k)) if hasattr(self, "q_norm") else (q, k)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        memory_pass: Pass | None = None,
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
        memory, cache = self.memory, past_key_values
        if cache is None:
            layer: MemoryCacheLayer = ScratchLayer(memory.kind, memory.window, memory.sinks)
        else:
            layer = cache.layers[self.layer_idx]
        now = memory_pass.to(hidden_states.device)
        tables = _tables_for_heads(now, *position_embeddings) if self.use_rope else None
        plain = self.plain_heads(hidden_states)
        step = Step(
            now if self.use_rope else now.unrotated(),
            hidden_states,
            *rotated(*plain, tables),
            layer=layer,
            scale=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            key_bias=self.key_bias(hidden_states) if memory.needs_key_bias else None,
            plain_q=plain[0] if memory.needs_plain_queries else None,
        )
        offloads = getattr(cache, "offloading", False)
        if offloads:
            layer.prefetch()
        joined = memory(step)
        exact = self._attend_as_base(step, attention_mask, kwargs) if joined is None else None
        if offloads:
            layer.offload()
        if exact is not None:
            return exact
        heads, added = joined
        # with one token, a view replaces the transpose
        heads = heads.reshape(len(heads), 1, -1) if heads.shape[2] == 1 else heads.transpose(1, 2).flatten(2)
        out = self.o_proj(heads)
        return (out if added is None else out + added), None

    def _attend_as_base(self, step: Step, mask: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """What the family's attention does once it has queries, keys and values, by the same function."""
        k, v = step.layer.append(step.k, step.v, step.gates)
        name = self.config._attn_implementation
        attend = eager_attention_forward if name in (None, "eager") else ALL_ATTENTION_FUNCTIONS[name]
        native = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        how = {"dropout": step.dropout, "scaling": step.scale, "sliding_window": native}
        heads, weights = attend(self, step.q, k, v, mask, **how, **kwargs)
        return self.o_proj(heads.reshape(*step.x.shape[:-1], -1).contiguous()), weights

    def __reduce__(self) -> Any:
        # pickle looks classes up by name, and this one is made when it is asked for
        return _new_attention, (type(self).__bases__[1],), self.__dict__


@cache
def add_memory(attention: type) -> type:
    """The class of a family's attention layers with :class:`MemoryAttention` in front."""
    return type(f"Retrofit{attention.__name__}", (MemoryAttention, attention), {})


def _new_attention(attention: type) -> Any:
    return object.__new__(add_memory(attention))


def rotated(q: Tensor, k: Tensor, v: Tensor, tables: Turn | None) -> tuple[Tensor, Tensor, Tensor]:
    """The first two turned, all in the dtype of ``v``: under autocast a turn makes them float32, and the base's
    attention would round them when it uses them. Without tables as they are."""
    if tables is None:
        return q, k, v
    if q.shape[2] == 1:
        q, k = turned(torch.cat([q, k], 1), *tables).split([q.shape[1], k.shape[1]], 1)
    else:
        q, k = turned(q, *tables), turned(k, *tables)
    return cast(q, v.dtype), cast(k, v.dtype), v


def _tables_for_heads(now: Pass, cos: Tensor, sin: Tensor) -> Turn:
    """The model's rotary tables as :func:`patches.rotary.turned` takes them, made once for all layers."""
    if "tables" not in now.results:
        now.results["tables"] = for_heads(cos, sin)
    return now.results["tables"]

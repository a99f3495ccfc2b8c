"""Floating-point operations of a forward pass, counted from shapes: projections, attention over what is seen, memory.

A product of matrices counts 2 per multiplication. Norms, biases, rotations and softmax are left out: below 1 %.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patches.compressive import Compressive
from patches.eviction import Eviction
from patches.kvm import KVM
from patches.memory import Memory

LAST = 1  # positions that go through the head when a prompt is read


@dataclass(frozen=True)
class Shape:
    """What of a base's configuration costs anything."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """Of a transformers configuration of a supported family."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
            config.intermediate_size,
            config.vocab_size,
        )

    @property
    def projections(self) -> int:
        """Weights of q, k, v and o in one layer."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def mlp(self) -> int:
        """Weights of gate, up and down in one layer."""
        return 3 * self.hidden * self.ffn

    @property
    def body(self) -> int:
        """P: the weights of all layers, which every token meets once."""
        return self.layers * (self.projections + self.mlp)

    @property
    def head(self) -> int:
        """Weights of the output head."""
        return self.hidden * self.vocabulary


def seen_keys(memory: Memory | None, tokens: int) -> Tensor:
    """Keys that each query attends to by a softmax, sinks and rows of the memory included: ``(tokens,)`` int64.

    Args:
        memory: a layer's, or None for full attention.
    """
    t = torch.arange(tokens)
    if memory is None:
        return t + 1
    S, W, capacity = memory.sinks, memory.window, memory.capacity
    if isinstance(memory, Eviction):
        past = {"token": 0 * t, "full": t - capacity, "chunk": (t - capacity) % memory.options.chunk}
        beyond = capacity + 1 + past[memory.options.prefill]
    elif isinstance(memory, KVM):
        index = t - S  # blocks are counted from behind the sinks
        begin = (index // memory.chunk + 1) * memory.chunk - W
        blocks = [memory.schedule.rows(n) for n in range(max(1, (tokens - S - 1) // memory.chunk + 2))]
        left = (begin // memory.chunk).clamp(0, len(blocks) - 1)
        beyond = S + index - begin.clamp_min(0) + 1 + torch.tensor(blocks)[left]
    elif isinstance(memory, Compressive):
        index = t - S
        groups = ((index - W + 1) // memory.options.ratio).clamp_min(0)
        beyond = S + index - memory.options.ratio * groups + 1 + groups.clamp_max(memory.rows)
    else:
        beyond = torch.full_like(t, S + W)
    return torch.where(t < capacity, t + 1, beyond)


def attention_flops(shape: Shape, memory: Memory | None, tokens: int) -> int:
    """Of one layer's softmax attention over ``tokens``: scores and values, exactly the pairs that are seen."""
    return 4 * int(seen_keys(memory, tokens).sum()) * shape.heads * shape.head_dim


def memory_flops(shape: Shape, memory: Memory | None, tokens: int) -> int:
    """Of writing and reading one layer's memory, its own matrices included; rows seen by the softmax are not.

    A matrix state costs 2 per element for the write and for each read; a delta rule reads once more, with the key.
    """
    if memory is None:
        return 0
    weights = sum(parameter.numel() for parameter in memory.parameters() if parameter.dim() > 1)
    evicted = max(0, tokens - memory.capacity)
    total = 2 * weights * tokens
    if isinstance(memory, KVM):  # every evicted token is compared with all rows: to be appended, then to be merged
        rows = memory.schedule.rows(max(0, evicted // memory.chunk))
        total += 2 * 2 * rows * shape.kv_heads * shape.head_dim * evicted
    elif not isinstance(memory, Eviction | Compressive):
        reads, corrections = _products(shape, memory)
        total += int(2 * memory.state_elements() * (1 + reads + corrections) * evicted)
    return total


def _products(shape: Shape, memory: Memory) -> tuple[float, float]:
    """How often a state is read for each written token, and which share of it is read by the key too."""
    group = shape.heads / shape.kv_heads
    rule = getattr(memory.options, "rule", None)
    if memory.kind in ("ahn-gdn", "ahn-dn"):
        return 1, 1
    if memory.kind == "joint":
        return 1, 0.5 if memory.options.branches == "both" else 0
    if memory.kind in ("tensor-cache", "infini"):  # a state per key/value head, read by every query head
        return group * (2 if rule == "wedge" else 1), 1 if rule == "delta" else 0
    return 1, 0


def forward_flops(shape: Shape, memories: list[Memory | None], tokens: int, head: int = LAST) -> int:
    """Of the whole model over one sequence.

    Args:
        memories: one per layer, None for a layer with full attention.
        head: positions that go through the output head.
    """
    layers = sum(count * _layer(shape, memory, tokens) for memory, count in distinct(memories))
    return 2 * shape.body * tokens + layers + 2 * shape.head * head


def _layer(shape: Shape, memory: Memory | None, tokens: int) -> int:
    return attention_flops(shape, memory, tokens) + memory_flops(shape, memory, tokens)


def distinct(memories: list[Memory | None]) -> list[tuple[Memory | None, int]]:
    """Each memory of a model once, with the number of its layers; layers of one kind have the same settings."""
    first = {memory.kind if memory else None: memory for memory in reversed(memories)}
    kinds = [memory.kind if memory else None for memory in memories]
    return [(memory, kinds.count(kind)) for kind, memory in first.items()]

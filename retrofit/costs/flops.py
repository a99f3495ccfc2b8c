"""Floating-point operations of a forward pass, counted from shapes: projections, attention over what is seen, memory.

A product of matrices counts 2 per multiplication. Norms, biases, rotations and softmax are left out: below 1 %.
"""

from dataclasses import dataclass
from typing import Any

from patches.memory import Memory


@dataclass(frozen=True)
class Shape:
    """What of a base's configuration costs anything."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # weights that a token meets in one layer, the mean over the layers
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
            _mlp(config),
            config.vocab_size,
        )

    @property
    def projections(self) -> int:
        """Weights of q, k, v and o in one layer."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def body(self) -> int:
        """P: the weights of all layers, which every token meets once."""
        return self.layers * (self.projections + self.mlp)

    @property
    def head(self) -> int:
        """Weights of the output head."""
        return self.hidden * self.vocabulary


def _mlp(config: Any) -> int:
    """Weights of the MLP that a token meets in one layer; of a mixture, its router's and those of its own experts."""
    dense = 3 * config.hidden_size * config.intermediate_size
    each = getattr(config, "num_experts_per_tok", 0)
    if not each:
        return int(dense)
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    mixture = config.hidden_size * (
        3 * each * getattr(config, "moe_intermediate_size", config.intermediate_size) + experts
    )
    step, layers = getattr(config, "decoder_sparse_step", 1), range(config.num_hidden_layers)
    plain = set(getattr(config, "mlp_only_layers", ())) | {index for index in layers if (index + 1) % step}
    return int(sum(dense if index in plain else mixture for index in layers) // len(layers))


def attention_flops(shape: Shape, memory: Memory | None, tokens: int) -> int:
    """Of one layer's softmax attention over ``tokens``: scores and values, exactly the pairs that are seen.

    Args:
        memory: a layer's, or None for full attention.
    """
    pairs = tokens * (tokens + 1) // 2 if memory is None else int(memory.seen_keys(tokens).sum())
    return 4 * pairs * shape.heads * shape.head_dim


def forward_flops(shape: Shape, memories: list[Memory | None], tokens: int, head: int) -> int:
    """Of the whole model over one sequence.

    Args:
        memories: one per layer, None for a layer with full attention.
        head: positions that go through the output head.
    """
    flops = 2 * shape.body * tokens + 2 * shape.head * head
    for memory, count in distinct(memories):
        flops += count * (attention_flops(shape, memory, tokens) + (0 if memory is None else memory.flops(tokens)))
    return flops


def distinct(memories: list[Memory | None]) -> list[tuple[Memory | None, int]]:
    """Each memory of a model once, with the number of its layers; layers that are alike have the same one."""
    first = {id(memory): memory for memory in memories}
    return [(memory, sum(one is memory for one in memories)) for memory in first.values()]

"""The models that benchmarks set side by side: full attention, the window alone and memories, on one set of weights."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import retrofit
from patches.errors import RetrofitError
from patches.kinds import KINDS, find_kind
from retrofit.bench import cases
from retrofit.bench.machine import Where

FULL, NONE = "full attention", "none"
VOCABULARY = 1024  # small: the head costs the same at every context
HEAD_DIM = 64


class RandomModels(cases.Models, Where):
    """The models of a case.

    Raises:
        RetrofitError: an unknown kind, or a width that is no whole number of pairs of heads.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden % (2 * HEAD_DIM):
            raise RetrofitError(f"hidden={self.hidden}: it must be a multiple of {2 * HEAD_DIM}")
        self.kinds()

    def kinds(self) -> list[str]:
        """The kinds that the names stand for, `none` first."""
        named = [kind for name in self.memories for kind in (KINDS if name == "all" else [find_kind(name).kind])]
        return list(dict.fromkeys([NONE, *named]))

    def base(self, positions: int) -> PreTrainedModel:
        """The random base for so many positions, in eval mode: speed does not depend on what the weights are."""
        heads = self.hidden // HEAD_DIM  # two to a key/value head
        base = random_base(self.hidden, heads, heads // 2, 4 * self.hidden, layers=self.layers, positions=positions)
        return base.to(self.torch_dtype()).to(self.place())

    def arms(self, positions: int) -> dict[str, Any]:
        """``{name: model}``, full attention first."""
        base = self.base(positions)
        return {FULL: base} | {kind: retrofit.patch(base, kind, self.window, self.sinks) for kind in self.kinds()}


def random_base(
    hidden: int, heads: int, kv_heads: int, mlp: int, *, layers: int = 1, positions: int = 32768
) -> PreTrainedModel:
    """A Qwen2 of this shape, the same at every call, in eval mode; ``mlp`` is the width of its feed-forward layers."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
    )
    return Qwen2ForCausalLM(config).eval()


def prompt(model: Any, length: int) -> Tensor:
    """Random tokens ``(1, length)`` for a model, on its device: speed does not depend on what they say."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (1, length), generator=generator).to(model.device)


def decode_step(model: Any, ids: Tensor, cache: Any) -> None:
    """Decode one more token on ``cache``."""
    with torch.no_grad():
        model(ids[:, :1], past_key_values=cache, use_cache=True)

"""The families as vLLM runs them: its own classes, with our attention in place of theirs."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.utils import maybe_prefix

from patches.config import MemoryConfig
from patches.errors import RetrofitError
from patches.kinds import build_memory

from .vllm_attention import MemoryAttention

MARK = ".memory."  # in the name of every parameter that is a memory's


# what the mixin stands in front of: a family's causal LM
Host: Any = object


class Served(Host):
    """Mixin in front of vLLM's causal LM of a family.

    Attributes:
        has_inner_state: vLLM's word for pages of fixed size.
        is_attention_free: and for no cache that grows.
    """

    has_inner_state = True
    is_attention_free = True

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        settings = MemoryConfig.from_dict(config.memory)
        each = settings.of_layers(config)
        rotates = getattr(config, "no_rope_layers", None) or [True] * len(each)
        layers = vllm_config.compilation_config.static_forward_context
        rotary = LlamaRotaryEmbedding(config)
        if settings.rotary_dtype is not None:
            round_frequencies(rotary, self.model.layers, getattr(torch, settings.rotary_dtype))
        for index, layer in enumerate(self.model.layers):
            stock = layer.self_attn
            del layers[stock.attn.layer_name]
            # the memory's parameters are float32 whatever the model's dtype
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
            memory = build_memory(config, each[index] or settings.window_only())
            torch.set_default_dtype(default)
            name = f"{maybe_prefix(prefix, 'model')}.layers.{index}.self_attn"
            layer.self_attn = MemoryAttention(stock, name, memory.requires_grad_(False), rotary, bool(rotates[index]))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As in vLLM; what belongs to a memory is copied as it is.

        Raises:
            RetrofitError: the checkpoint lacks a memory's parameter or has one that the memory does not.
        """
        missing = {name: parameter for name, parameter in self.named_parameters() if MARK in name}
        loaded = set(missing)

        def rest() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                if MARK not in name:
                    yield from self.named_as_in_vllm(name, tensor)
                elif name in missing:
                    missing.pop(name).data.copy_(tensor)
                else:
                    raise RetrofitError(f"this checkpoint's {name} is none of its memory's parameters: export it again")

        loaded |= super().load_weights(rest())
        if missing:
            raise RetrofitError(f"this checkpoint lacks {next(iter(missing))}: export it again")
        return loaded

    def named_as_in_vllm(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A weight of the base as vLLM's class looks for it."""
        yield name, tensor


def round_frequencies(rotary: Any, layers: Any, dtype: torch.dtype) -> None:
    """Give a model the rotary tables of a base that was cast as a whole, its frequencies included.

    Args:
        rotary: transformers' embedding, changed in place.
        layers: vLLM's, whose own embedding is replaced.
        dtype: that the base was cast to.
    """
    rotary.inv_freq = rotary.inv_freq.to(dtype).to(rotary.inv_freq.dtype)
    shared = copy.deepcopy(layers[0].self_attn.rotary_emb)  # vLLM keeps one for all models of a process
    old = shared.cos_sin_cache
    angles = torch.outer(torch.arange(len(old), device=old.device).float(), rotary.inv_freq.float())
    shared.cos_sin_cache = (torch.cat([angles.cos(), angles.sin()], -1) * rotary.attention_scaling).to(old)
    for layer in layers:
        layer.self_attn.rotary_emb = shared


class RetrofitLlamaForCausalLM(Served, LlamaForCausalLM):
    """vLLM's LLaMA with a memory."""


class RetrofitMistralForCausalLM(Served, MistralForCausalLM):
    """vLLM's Mistral with a memory."""


class RetrofitQwen2ForCausalLM(Served, Qwen2ForCausalLM):
    """vLLM's Qwen2 with a memory."""


class RetrofitQwen3ForCausalLM(Served, Qwen3ForCausalLM):
    """vLLM's Qwen3 with a memory."""


class Mixture(Served):
    """A family with experts: transformers keeps those of a layer in two tensors, vLLM looks for each by itself.

    Attributes:
        block: vLLM's name for what transformers calls ``mlp``.
        parts: its names of an expert's gate, up and down.
    """

    block: ClassVar[str] = "mlp"
    parts: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")

    def named_as_in_vllm(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        name = name.replace(".mlp.", f".{self.block}.")
        stem, experts, part = name.partition(".experts.")
        gate, up, down = self.parts
        if part == "gate_up_proj":
            each = dict(zip((gate, up), tensor.chunk(2, dim=1), strict=True))
        elif part == "down_proj":
            each = {down: tensor}
        else:
            yield name, tensor
            return
        for kind, weights in each.items():
            for index, weight in enumerate(weights):
                yield f"{stem}{experts}{index}.{kind}.weight", weight


class RetrofitMixtralForCausalLM(Mixture, MixtralForCausalLM):
    """vLLM's Mixtral with a memory."""

    block = "block_sparse_moe"
    parts = ("w1", "w3", "w2")


class RetrofitQwen3MoeForCausalLM(Mixture, Qwen3MoeForCausalLM):
    """vLLM's Qwen3-MoE with a memory."""


class RetrofitMinistralForCausalLM(Served, MistralForCausalLM):
    """Ministral with a memory where every layer slides; vLLM's Mistral knows what it has of its own."""


class RetrofitSmolLM3ForCausalLM(Served, LlamaForCausalLM):
    """SmolLM3 with a memory: what is not attention is LLaMA's, and vLLM has no class of its own for it."""

"""Qwen3 with a memory: configuration, attention, model, causal LM."""

from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from .attention import NormalisedHeads
from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel


class RetrofitQwen3Config(Qwen3Config):
    """``Qwen3Config`` and one field: ``memory``, a mapping as ``MemoryConfig.to_dict`` writes it."""

    model_type = "retrofit_qwen3"
    memory: dict[str, Any] | None = None


class RetrofitQwen3Attention(NormalisedHeads, Qwen3Attention):
    """``Qwen3Attention`` with a memory."""


class RetrofitQwen3Model(MemoryModel, Qwen3Model):
    """``Qwen3Model`` whose layers forget into a memory."""

    config_class = RetrofitQwen3Config
    attention_class = RetrofitQwen3Attention


class RetrofitQwen3ForCausalLM(MemoryCausalLM, Qwen3ForCausalLM):
    """``Qwen3ForCausalLM`` whose layers forget into a memory."""

    config_class = RetrofitQwen3Config
    model_class = RetrofitQwen3Model


RetrofitQwen3Config.register_for_auto_class()
RetrofitQwen3Model.register_for_auto_class("AutoModel")
RetrofitQwen3ForCausalLM.register_for_auto_class("AutoModelForCausalLM")

"""Llama with a memory: configuration, attention, model, causal LM."""

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention

from .attention import MemoryAttention
from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel


class RetrofitLlamaConfig(LlamaConfig):
    """``LlamaConfig`` and one field: ``memory``, a mapping as ``MemoryConfig.to_dict`` writes it."""

    model_type = "retrofit_llama"
    memory: dict[str, Any] | None = None


class RetrofitLlamaAttention(MemoryAttention, LlamaAttention):
    """``LlamaAttention`` with a memory."""


class RetrofitLlamaModel(MemoryModel, LlamaModel):
    """``LlamaModel`` whose layers forget into a memory."""

    config_class = RetrofitLlamaConfig
    attention_class = RetrofitLlamaAttention


class RetrofitLlamaForCausalLM(MemoryCausalLM, LlamaForCausalLM):
    """``LlamaForCausalLM`` whose layers forget into a memory."""

    config_class = RetrofitLlamaConfig
    model_class = RetrofitLlamaModel


RetrofitLlamaConfig.register_for_auto_class()
RetrofitLlamaModel.register_for_auto_class("AutoModel")
RetrofitLlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")

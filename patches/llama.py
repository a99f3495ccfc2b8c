"""Llama with a memory: configuration, model, causal LM."""

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel


class RetrofitLlamaConfig(LlamaConfig):
    """``LlamaConfig`` and one field: ``memory``, a mapping as ``MemoryConfig.to_dict`` writes it."""

    model_type = "retrofit_llama"
    _auto_class = "AutoConfig"
    memory: dict[str, Any] | None = None


class RetrofitLlamaModel(MemoryModel, LlamaModel):
    config_class = RetrofitLlamaConfig


class RetrofitLlamaForCausalLM(MemoryCausalLM, LlamaForCausalLM):
    config_class = RetrofitLlamaConfig
    model_class = RetrofitLlamaModel

"""Ministral with a memory in the layers that do not slide: configuration, model, causal LM."""

from typing import Any

from transformers import MinistralConfig, MinistralForCausalLM, MinistralModel

from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel


class RetrofitMinistralConfig(MinistralConfig):
    """``MinistralConfig`` and one field: ``memory``, a mapping as ``MemoryConfig.to_dict`` writes it."""

    model_type = "retrofit_ministral"
    _auto_class = "AutoConfig"
    memory: dict[str, Any] | None = None


class RetrofitMinistralModel(MemoryModel, MinistralModel):
    config_class = RetrofitMinistralConfig


class RetrofitMinistralForCausalLM(MemoryCausalLM, MinistralForCausalLM):
    config_class = RetrofitMinistralConfig
    model_class = RetrofitMinistralModel

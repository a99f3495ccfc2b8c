"""Ministral with a memory in the layers that do not slide: configuration, attention, model, causal LM."""

from typing import Any

from transformers import MinistralConfig, MinistralForCausalLM, MinistralModel
from transformers.models.ministral.modeling_ministral import MinistralAttention

from .attention import MemoryAttention
from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel


class RetrofitMinistralConfig(MinistralConfig):
    """``MinistralConfig`` and one field: ``memory``, a mapping as ``MemoryConfig.to_dict`` writes it."""

    model_type = "retrofit_ministral"
    memory: dict[str, Any] | None = None


class RetrofitMinistralAttention(MemoryAttention, MinistralAttention):
    """``MinistralAttention`` with a memory."""


class RetrofitMinistralModel(MemoryModel, MinistralModel):
    """``MinistralModel`` whose layers forget into a memory."""

    config_class = RetrofitMinistralConfig
    attention_class = RetrofitMinistralAttention


class RetrofitMinistralForCausalLM(MemoryCausalLM, MinistralForCausalLM):
    """``MinistralForCausalLM`` whose layers forget into a memory."""

    config_class = RetrofitMinistralConfig
    model_class = RetrofitMinistralModel


RetrofitMinistralConfig.register_for_auto_class()
RetrofitMinistralModel.register_for_auto_class("AutoModel")
RetrofitMinistralForCausalLM.register_for_auto_class("AutoModelForCausalLM")

"""Mistral with a memory: configuration, attention, model, causal LM."""

from typing import Any

from transformers import MistralConfig, MistralForCausalLM, MistralModel
from transformers.models.mistral.modeling_mistral import MistralAttention

from .attention import MemoryAttention
from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel


class RetrofitMistralConfig(MistralConfig):
    """``MistralConfig`` and one field: ``memory``, a mapping as ``MemoryConfig.to_dict`` writes it."""

    model_type = "retrofit_mistral"
    memory: dict[str, Any] | None = None


class RetrofitMistralAttention(MemoryAttention, MistralAttention):
    """``MistralAttention`` with a memory."""


class RetrofitMistralModel(MemoryModel, MistralModel):
    """``MistralModel`` whose layers forget into a memory."""

    config_class = RetrofitMistralConfig
    attention_class = RetrofitMistralAttention


class RetrofitMistralForCausalLM(MemoryCausalLM, MistralForCausalLM):
    """``MistralForCausalLM`` whose layers forget into a memory."""

    config_class = RetrofitMistralConfig
    model_class = RetrofitMistralModel


RetrofitMistralConfig.register_for_auto_class()
RetrofitMistralModel.register_for_auto_class("AutoModel")
RetrofitMistralForCausalLM.register_for_auto_class("AutoModelForCausalLM")

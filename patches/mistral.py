"""Mistral with a memory: configuration, model, causal LM."""

from typing import Any

from transformers import MistralConfig, MistralForCausalLM, MistralModel

from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel


class RetrofitMistralConfig(MistralConfig):
    """``MistralConfig`` and one field: ``memory``, a mapping as ``MemoryConfig.to_dict`` writes it."""

    model_type = "retrofit_mistral"
    _auto_class = "AutoConfig"
    memory: dict[str, Any] | None = None


class RetrofitMistralModel(MemoryModel, MistralModel):
    config_class = RetrofitMistralConfig


class RetrofitMistralForCausalLM(MemoryCausalLM, MistralForCausalLM):
    config_class = RetrofitMistralConfig
    model_class = RetrofitMistralModel

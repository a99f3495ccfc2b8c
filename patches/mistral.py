"""Mistral with a memory: configuration, model, causal LM."""

from transformers import MistralConfig, MistralForCausalLM, MistralModel

from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel
from .pretrained import MemoryField


class RetrofitMistralConfig(MistralConfig, MemoryField):
    model_type = "retrofit_mistral"


class RetrofitMistralModel(MemoryModel, MistralModel):
    config_class = RetrofitMistralConfig


class RetrofitMistralForCausalLM(MemoryCausalLM, MistralForCausalLM):
    config_class = RetrofitMistralConfig
    model_class = RetrofitMistralModel

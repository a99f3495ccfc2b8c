"""Ministral with a memory in the layers that do not slide: configuration, model, causal LM."""

from transformers import MinistralConfig, MinistralForCausalLM, MinistralModel

from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel
from .pretrained import MemoryField


class RetrofitMinistralConfig(MinistralConfig, MemoryField):
    model_type = "retrofit_ministral"


class RetrofitMinistralModel(MemoryModel, MinistralModel):
    config_class = RetrofitMinistralConfig


class RetrofitMinistralForCausalLM(MemoryCausalLM, MinistralForCausalLM):
    config_class = RetrofitMinistralConfig
    model_class = RetrofitMinistralModel

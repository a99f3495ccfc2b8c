"""Mixtral with a memory: configuration, model, causal LM."""

from transformers import MixtralConfig, MixtralForCausalLM, MixtralModel

from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel
from .pretrained import MemoryField


class RetrofitMixtralConfig(MixtralConfig, MemoryField):
    model_type = "retrofit_mixtral"


class RetrofitMixtralModel(MemoryModel, MixtralModel):
    config_class = RetrofitMixtralConfig


class RetrofitMixtralForCausalLM(MemoryCausalLM, MixtralForCausalLM):
    config_class = RetrofitMixtralConfig
    model_class = RetrofitMixtralModel

"""Llama with a memory: configuration, model, causal LM."""

from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel
from .pretrained import MemoryField


class RetrofitLlamaConfig(LlamaConfig, MemoryField):
    model_type = "retrofit_llama"


class RetrofitLlamaModel(MemoryModel, LlamaModel):
    config_class = RetrofitLlamaConfig


class RetrofitLlamaForCausalLM(MemoryCausalLM, LlamaForCausalLM):
    config_class = RetrofitLlamaConfig
    model_class = RetrofitLlamaModel

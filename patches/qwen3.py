"""Qwen3 with a memory: configuration, model, causal LM."""

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel
from .pretrained import MemoryField


class RetrofitQwen3Config(Qwen3Config, MemoryField):
    model_type = "retrofit_qwen3"


class RetrofitQwen3Model(MemoryModel, Qwen3Model):
    config_class = RetrofitQwen3Config


class RetrofitQwen3ForCausalLM(MemoryCausalLM, Qwen3ForCausalLM):
    config_class = RetrofitQwen3Config
    model_class = RetrofitQwen3Model

"""Qwen2 with a memory: configuration, model, causal LM."""

from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel
from .pretrained import MemoryField


class RetrofitQwen2Config(Qwen2Config, MemoryField):
    model_type = "retrofit_qwen2"


class RetrofitQwen2Model(MemoryModel, Qwen2Model):
    config_class = RetrofitQwen2Config


class RetrofitQwen2ForCausalLM(MemoryCausalLM, Qwen2ForCausalLM):
    config_class = RetrofitQwen2Config
    model_class = RetrofitQwen2Model

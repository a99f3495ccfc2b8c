"""Qwen2 with a memory: configuration, model, causal LM."""

from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel


class RetrofitQwen2Config(Qwen2Config):
    """``Qwen2Config`` and one field: ``memory``, a mapping as ``MemoryConfig.to_dict`` writes it."""

    model_type = "retrofit_qwen2"
    _auto_class = "AutoConfig"
    memory: dict[str, Any] | None = None


class RetrofitQwen2Model(MemoryModel, Qwen2Model):
    config_class = RetrofitQwen2Config


class RetrofitQwen2ForCausalLM(MemoryCausalLM, Qwen2ForCausalLM):
    config_class = RetrofitQwen2Config
    model_class = RetrofitQwen2Model

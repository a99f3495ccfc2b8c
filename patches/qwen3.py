"""Qwen3 with a memory: configuration, model, causal LM."""

from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel


class RetrofitQwen3Config(Qwen3Config):
    """``Qwen3Config`` and one field: ``memory``, a mapping as ``MemoryConfig.to_dict`` writes it."""

    model_type = "retrofit_qwen3"
    _auto_class = "AutoConfig"
    memory: dict[str, Any] | None = None


class RetrofitQwen3Model(MemoryModel, Qwen3Model):
    config_class = RetrofitQwen3Config


class RetrofitQwen3ForCausalLM(MemoryCausalLM, Qwen3ForCausalLM):
    config_class = RetrofitQwen3Config
    model_class = RetrofitQwen3Model

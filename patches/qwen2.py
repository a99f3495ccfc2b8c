"""Qwen2 with a memory: configuration, attention, model, causal LM."""

from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from .attention import MemoryAttention
from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel


class RetrofitQwen2Config(Qwen2Config):
    """``Qwen2Config`` and one field: ``memory``, a mapping as ``MemoryConfig.to_dict`` writes it."""

    model_type = "retrofit_qwen2"
    memory: dict[str, Any] | None = None


class RetrofitQwen2Attention(MemoryAttention, Qwen2Attention):
    """``Qwen2Attention`` with a memory."""


class RetrofitQwen2Model(MemoryModel, Qwen2Model):
    """``Qwen2Model`` whose layers forget into a memory."""

    config_class = RetrofitQwen2Config
    attention_class = RetrofitQwen2Attention


class RetrofitQwen2ForCausalLM(MemoryCausalLM, Qwen2ForCausalLM):
    """``Qwen2ForCausalLM`` whose layers forget into a memory."""

    config_class = RetrofitQwen2Config
    model_class = RetrofitQwen2Model


RetrofitQwen2Config.register_for_auto_class()
RetrofitQwen2Model.register_for_auto_class("AutoModel")
RetrofitQwen2ForCausalLM.register_for_auto_class("AutoModelForCausalLM")

"""Qwen2 with a memory: configuration, attention, model, causal LM."""

from typing import Any

from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model, Qwen2PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from .attention import MemoryAttention
from .modeling import MemoryCausalLM, MemoryModel


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

    def __init__(self, config: Any):
        Qwen2PreTrainedModel.__init__(self, config)  # not Qwen2ForCausalLM's: it would build the body twice
        self.model = RetrofitQwen2Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


RetrofitQwen2Config.register_for_auto_class()
RetrofitQwen2Model.register_for_auto_class("AutoModel")
RetrofitQwen2ForCausalLM.register_for_auto_class("AutoModelForCausalLM")

"""Llama with a memory: configuration, attention, model, causal LM."""

from typing import Any

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from .attention import MemoryAttention
from .modeling import MemoryCausalLM, MemoryModel


class RetrofitLlamaConfig(LlamaConfig):
    """``LlamaConfig`` and one field: ``memory``, a mapping as ``MemoryConfig.to_dict`` writes it."""

    model_type = "retrofit_llama"
    memory: dict[str, Any] | None = None


class RetrofitLlamaAttention(MemoryAttention, LlamaAttention):
    """``LlamaAttention`` with a memory."""


class RetrofitLlamaModel(MemoryModel, LlamaModel):
    """``LlamaModel`` whose layers forget into a memory."""

    config_class = RetrofitLlamaConfig
    attention_class = RetrofitLlamaAttention


class RetrofitLlamaForCausalLM(MemoryCausalLM, LlamaForCausalLM):
    """``LlamaForCausalLM`` whose layers forget into a memory."""

    config_class = RetrofitLlamaConfig

    def __init__(self, config: Any):
        LlamaPreTrainedModel.__init__(self, config)  # not LlamaForCausalLM's: it would build the body twice
        self.model = RetrofitLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


RetrofitLlamaConfig.register_for_auto_class()
RetrofitLlamaModel.register_for_auto_class("AutoModel")
RetrofitLlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")

"""Mistral with a memory: configuration, attention, model, causal LM."""

from typing import Any

from torch import nn
from transformers import MistralConfig, MistralForCausalLM, MistralModel, MistralPreTrainedModel
from transformers.models.mistral.modeling_mistral import MistralAttention

from .attention import MemoryAttention
from .modeling import MemoryCausalLM, MemoryModel


class RetrofitMistralConfig(MistralConfig):
    """``MistralConfig`` and one field: ``memory``, a mapping as ``MemoryConfig.to_dict`` writes it."""

    model_type = "retrofit_mistral"
    memory: dict[str, Any] | None = None


class RetrofitMistralAttention(MemoryAttention, MistralAttention):
    """``MistralAttention`` with a memory."""


class RetrofitMistralModel(MemoryModel, MistralModel):
    """``MistralModel`` whose layers forget into a memory."""

    config_class = RetrofitMistralConfig
    attention_class = RetrofitMistralAttention


class RetrofitMistralForCausalLM(MemoryCausalLM, MistralForCausalLM):
    """``MistralForCausalLM`` whose layers forget into a memory."""

    config_class = RetrofitMistralConfig

    def __init__(self, config: Any):
        MistralPreTrainedModel.__init__(self, config)  # not MistralForCausalLM's: it would build the body twice
        self.model = RetrofitMistralModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


RetrofitMistralConfig.register_for_auto_class()
RetrofitMistralModel.register_for_auto_class("AutoModel")
RetrofitMistralForCausalLM.register_for_auto_class("AutoModelForCausalLM")

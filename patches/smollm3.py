"""SmolLM3 with a memory, also in the layers that do not rotate: configuration, attention, model, causal LM."""

from typing import Any

from transformers import SmolLM3Config, SmolLM3ForCausalLM, SmolLM3Model
from transformers.models.smollm3.modeling_smollm3 import SmolLM3Attention

from .attention import MemoryAttention
from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel


class RetrofitSmolLM3Config(SmolLM3Config):
    """``SmolLM3Config`` and one field: ``memory``, a mapping as ``MemoryConfig.to_dict`` writes it."""

    model_type = "retrofit_smollm3"
    memory: dict[str, Any] | None = None


class RetrofitSmolLM3Attention(MemoryAttention, SmolLM3Attention):
    """``SmolLM3Attention`` with a memory."""


class RetrofitSmolLM3Model(MemoryModel, SmolLM3Model):
    """``SmolLM3Model`` whose layers forget into a memory."""

    config_class = RetrofitSmolLM3Config
    attention_class = RetrofitSmolLM3Attention


class RetrofitSmolLM3ForCausalLM(MemoryCausalLM, SmolLM3ForCausalLM):
    """``SmolLM3ForCausalLM`` whose layers forget into a memory."""

    config_class = RetrofitSmolLM3Config
    model_class = RetrofitSmolLM3Model


RetrofitSmolLM3Config.register_for_auto_class()
RetrofitSmolLM3Model.register_for_auto_class("AutoModel")
RetrofitSmolLM3ForCausalLM.register_for_auto_class("AutoModelForCausalLM")

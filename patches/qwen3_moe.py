"""Qwen3Moe with a memory: configuration, model, causal LM."""

from typing import Any

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoeModel

from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel
from .pretrained import MemoryField


class RetrofitQwen3MoeConfig(Qwen3MoeConfig, MemoryField):
    model_type = "retrofit_qwen3_moe"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, whose later releases write the number of experts under a name that 5.0 does not read."""
        if "num_local_experts" in config_dict:
            config_dict = {**config_dict, "num_experts": config_dict["num_local_experts"]}
        return super().from_dict(config_dict, **kwargs)


class RetrofitQwen3MoeModel(MemoryModel, Qwen3MoeModel):
    config_class = RetrofitQwen3MoeConfig


class RetrofitQwen3MoeForCausalLM(MemoryCausalLM, Qwen3MoeForCausalLM):
    config_class = RetrofitQwen3MoeConfig
    model_class = RetrofitQwen3MoeModel

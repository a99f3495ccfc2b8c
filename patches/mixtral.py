"""Mixtral with a memory: configuration, model, causal LM."""

from typing import Any

from transformers import MixtralConfig, MixtralForCausalLM, MixtralModel

from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel
from .pretrained import MemoryField


class RetrofitMixtralConfig(MixtralConfig, MemoryField):
    model_type = "retrofit_mixtral"


class RetrofitMixtralModel(MemoryModel, MixtralModel):
    config_class = RetrofitMixtralConfig


class RetrofitMixtralForCausalLM(MemoryCausalLM, MixtralForCausalLM):
    config_class = RetrofitMixtralConfig
    model_class = RetrofitMixtralModel

    def __init__(self, config: Any):
        super().__init__(config)
        # for the loss that balances the experts, where it is asked for
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts, self.num_experts_per_tok = config.num_local_experts, config.num_experts_per_tok

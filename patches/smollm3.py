"""SmolLM3 with a memory, also in the layers that do not rotate: configuration, model, causal LM."""

from transformers import SmolLM3Config, SmolLM3ForCausalLM, SmolLM3Model

from .causal_lm import MemoryCausalLM
from .modeling import MemoryModel
from .pretrained import MemoryField


class RetrofitSmolLM3Config(SmolLM3Config, MemoryField):
    model_type = "retrofit_smollm3"


class RetrofitSmolLM3Model(MemoryModel, SmolLM3Model):
    config_class = RetrofitSmolLM3Config


class RetrofitSmolLM3ForCausalLM(MemoryCausalLM, SmolLM3ForCausalLM):
    config_class = RetrofitSmolLM3Config
    model_class = RetrofitSmolLM3Model

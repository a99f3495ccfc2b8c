"""The base families and their patched classes; importing this registers them, so that exports load without trust."""

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from patches import llama, ministral, mistral, mixtral, qwen2, qwen3, qwen3_moe, smollm3
from patches.errors import RetrofitError, nearest


@dataclass(frozen=True)
class Family:
    """The patched classes for one base architecture."""

    config: type
    model: type
    causal_lm: type


# by the base's model_type
FAMILIES = {
    "qwen2": Family(qwen2.RetrofitQwen2Config, qwen2.RetrofitQwen2Model, qwen2.RetrofitQwen2ForCausalLM),
    "qwen3": Family(qwen3.RetrofitQwen3Config, qwen3.RetrofitQwen3Model, qwen3.RetrofitQwen3ForCausalLM),
    "llama": Family(llama.RetrofitLlamaConfig, llama.RetrofitLlamaModel, llama.RetrofitLlamaForCausalLM),
    "mistral": Family(mistral.RetrofitMistralConfig, mistral.RetrofitMistralModel, mistral.RetrofitMistralForCausalLM),
    "mixtral": Family(mixtral.RetrofitMixtralConfig, mixtral.RetrofitMixtralModel, mixtral.RetrofitMixtralForCausalLM),
    "qwen3_moe": Family(
        qwen3_moe.RetrofitQwen3MoeConfig, qwen3_moe.RetrofitQwen3MoeModel, qwen3_moe.RetrofitQwen3MoeForCausalLM
    ),
    "ministral": Family(
        ministral.RetrofitMinistralConfig, ministral.RetrofitMinistralModel, ministral.RetrofitMinistralForCausalLM
    ),
    "smollm3": Family(smollm3.RetrofitSmolLM3Config, smollm3.RetrofitSmolLM3Model, smollm3.RetrofitSmolLM3ForCausalLM),
}
PREFIX = "retrofit_"  # a patched model's model_type is this and the base's

for _name, _family in FAMILIES.items():
    AutoConfig.register(PREFIX + _name, _family.config, exist_ok=True)
    AutoModel.register(_family.config, _family.model, exist_ok=True)
    AutoModelForCausalLM.register(_family.config, _family.causal_lm, exist_ok=True)


def base_type(config: Any) -> str:
    """The base's ``model_type`` behind the configuration of a base or of a patched model."""
    return str(config.model_type).removeprefix(PREFIX)


def find_family(config: Any) -> Family:
    """The family of a base's (or patched model's) configuration.

    Raises:
        RetrofitError: we do not support it.
    """
    name = base_type(config)
    if name not in FAMILIES:
        raise RetrofitError(
            f"a {name!r} model cannot be retrofitted{nearest(name, FAMILIES)}: the families supported are "
            + ", ".join(FAMILIES)
        )
    return FAMILIES[name]


def is_retrofit(model: Any) -> bool:
    """Whether ``model`` is a patched causal LM; by attribute: an export loaded with trust has classes of its own."""
    return hasattr(model, "memory_parameters") and hasattr(model, "memory_off")


def refuse_retrofit(config: Any, name: str) -> None:
    """Refuse the configuration of an export where a base is wanted, whose memory would be left out.

    Raises:
        RetrofitError: it is one; ``name`` says what it was called.
    """
    memory = getattr(config, "memory", None)
    if memory:
        base = memory.get("base") or "that it was made from"
        raise RetrofitError(f"{name} has a memory already, which would be lost: give the base {base}")

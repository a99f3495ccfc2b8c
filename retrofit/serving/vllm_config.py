"""What vLLM is told before it builds a retrofit: the page's size, what is switched off, and what it cannot do."""

import logging
from typing import Any

import torch
from vllm.model_executor.models.config import MambaModelConfig

from patches.config import MemoryConfig
from patches.errors import RetrofitError
from patches.kinds import build_memory

from .pages import page_fields

OPERATOR = "retrofit_attention"  # the attention as vLLM's compiler sees it

logger = logging.getLogger("vllm.retrofit")


class MemoryModelConfig(MambaModelConfig):
    """Called by vLLM for each of our architectures."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """As in vLLM; a page holds a whole sequence, however long.

        Raises:
            RetrofitError: an option that a memory cannot follow.
        """
        refuse(vllm_config)
        cache, compilation = vllm_config.cache_config, vllm_config.compilation_config
        if cache.enable_prefix_caching:
            cache.enable_prefix_caching = False
            logger.info("prefix caching is off: a memory cannot be cut back to a prefix that two prompts share")
        super().verify_and_update_config(vllm_config)
        if compilation.splitting_ops is None:  # compiled graphs end before our attention and begin behind it
            compilation.splitting_ops = [*compilation._attention_ops, f"vllm::{OPERATOR}"]


def refuse(vllm_config: Any) -> None:
    """Refuse what would be wrong without a word.

    Raises:
        RetrofitError: naming the option to leave out.
    """
    parallel = vllm_config.parallel_config
    reasons = {
        "tensor parallelism would split the heads but not the memory: leave out --tensor-parallel-size, and use "
        "--data-parallel-size for more than one GPU": parallel.tensor_parallel_size > 1,
        "pipeline parallelism was never tried with a memory: leave out --pipeline-parallel-size": (
            parallel.pipeline_parallel_size > 1
        ),
        "context parallelism would split a sequence that the memory reads in order: leave out its options": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
        ),
        "speculative decoding would have to take rejected tokens out of the memory again: leave out "
        "--speculative-config": vllm_config.speculative_config is not None,
        "LoRA adapters were never tried beside a memory: merge yours into the base first and leave out --enable-lora": (
            vllm_config.lora_config is not None
        ),
        "a quantised base was never tried beside a memory in vLLM: use --engine transformers, or a base that is not "
        "quantised": vllm_config.model_config.quantization is not None,
        "a memory's page cannot be handed to another engine: leave out --kv-transfer-config": (
            vllm_config.kv_transfer_config is not None
        ),
        "keys and values are kept in the model's own dtype: leave out --kv-cache-dtype": (
            vllm_config.cache_config.cache_dtype not in ("auto", str(vllm_config.model_config.dtype).split(".")[-1])
        ),
    }
    for reason, met in reasons.items():
        if met:
            raise RetrofitError(reason)
    config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
    memory = MemoryConfig.from_dict(config.memory)
    if memory.by_layer:
        raise RetrofitError(
            "layers of this model have windows or options of their own (by_layer), and the plugin sorts the sequences "
            "of a step by one window for all layers: use retrofit serve --engine transformers"
        )
    each = [one for one in memory.of_layers(config) if one is not None]
    if len(each) < config.num_hidden_layers:
        raise RetrofitError(
            f"only layers {memory.patched_layers(config)} of this model have a memory and the others keep the base's "
            "own attention, which the plugin cannot serve: use retrofit serve --engine transformers, or patch a base "
            "of full attention alone with others='window'"
        )
    with torch.device("meta"):
        for one in each:
            page_fields(build_memory(config, one), dtype)  # raises if there is no such page

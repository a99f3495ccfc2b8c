"""vLLM's entry point: it calls :func:`register` in each of its processes, before it looks at a model."""

import logging

TESTED = ("0.32",)  # versions of vLLM that `make test-vllm` has run against

logger = logging.getLogger("vllm.retrofit")


def register() -> None:
    """Tell vLLM of the retrofitted families: their configurations, which spares it remote code, and their models."""
    import vllm
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from ..families import FAMILIES
    from .vllm_config import MemoryModelConfig

    if not vllm.__version__.startswith(TESTED):
        logger.warning(
            "retrofit's plugin was tested with vLLM %s, this is %s: compare a few answers with retrofit generate's",
            ", ".join(TESTED),
            vllm.__version__,
        )
    for family in FAMILIES.values():
        name = family.causal_lm.__name__
        ModelRegistry.register_model(name, f"retrofit.serving.vllm_models:{name}")
        MODELS_CONFIG_MAP[name] = MemoryModelConfig

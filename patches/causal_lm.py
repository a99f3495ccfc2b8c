"""The causal LM: what users call on a retrofitted model, and what generation must not ask of a memory."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from .cache import MemoryCache
from .errors import RetrofitError
from .pretrained import MemoryPreTrained

# whoever asks whether there is continuous batching (transformers serve does) must find none
PAGED = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


class NotThere(RetrofitError, AttributeError):
    """An attribute that is not there, with a sentence that says why."""


class MemoryCausalLM(MemoryPreTrained):
    """Mixin in front of a family's causal LM: the public face of a retrofitted model; ``model_class`` is its body."""

    model: Any
    model_class: type[nn.Module]
    _auto_class = "AutoModelForCausalLM"
    _is_stateful = True  # transformers then refuses assisted decoding, which would need to take tokens out of a memory

    def __init__(self, config: Any):
        PreTrainedModel.__init__(self, config)  # not the family's: it would build the body twice
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if hasattr(config, "router_aux_loss_coef"):  # for the loss that balances the experts, where it is asked for
            self.router_aux_loss_coef = config.router_aux_loss_coef
            self.num_experts, self.num_experts_per_tok = config.num_experts, config.num_experts_per_tok
        self.post_init()

    def memory_off(self) -> Any:
        """Context manager: inside it the model is its base (the teacher), full attention, bit for bit."""
        return self.model.memory_off()

    def set_window(self, window: int, sinks: int | None = None) -> None:
        """Change W (and S) from the next empty cache on; see :meth:`MemoryModel.set_window`."""
        self.model.set_window(window, sinks)

    def set_budget(self, size: int | str, window: int | None = None) -> None:
        """Change what a layer keeps, from the next empty cache on; see :meth:`MemoryModel.set_budget`."""
        self.model.set_budget(size, window)

    def memory_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of everything that distillation fits, in the model's order."""
        for prefix, module in self.named_modules():
            if getattr(module, "is_retrofit_memory", False):
                for name, parameter in module.named_parameters():
                    yield f"{prefix}.{name}", parameter

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, beam search and sampling included."""
        config = inspect.signature(super().generate).bind(*args, **kwargs).arguments.get("generation_config")
        config = config or self.generation_config
        if self.model.memory_enabled and config.is_assistant:
            raise RetrofitError(
                "a memory cannot take back what it was given, as an assistant must when its tokens are refused: give "
                "the base as assistant_model"
            )
        implementation = kwargs.get("cache_implementation") or getattr(config, "cache_implementation", None)
        if self.model.memory_enabled and implementation not in (None, "dynamic", "dynamic_full", "offloaded"):
            raise RetrofitError(f"cache_implementation={implementation!r} cannot hold a memory: leave it unset")
        return super().generate(*args, **kwargs)

    # ---- how transformers' generate compiles, which ``compile_config`` asks for ----

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        done = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if generation_config.compile_config is not None and type(cache) is DynamicCache and self.model.compiles:
            MemoryCache.adopt(cache, self.model.memories()).compileable = True
        return done

    def create_masks_for_generate(self, *args: Any, **kwargs: Any) -> Any:
        """The mask of a step: none for one that is compiled, since what was padding is known to the cache."""
        cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        if isinstance(cache, MemoryCache) and cache.compileable:
            return None if cache.is_full(kwargs["inputs_embeds"].shape[1]) else mask
        return create_masks_for_generate(*args, **kwargs)

    def get_compiled_call(self, compile_config: Any) -> Any:
        """A step of decoding, compiled where it always has the same shapes."""
        compiled = super().get_compiled_call(compile_config)

        def call(**inputs: Any) -> Any:
            cache, tokens = inputs.get("past_key_values"), inputs.get("input_ids")
            if not isinstance(cache, MemoryCache) or not cache.compileable:
                return compiled(**inputs)
            if tokens is None or not cache.is_full(tokens.shape[1]):
                return self(**inputs)
            cache.mark_static()
            return compiled(**inputs)

        return call

    def __getattr__(self, name: str) -> Any:
        if name in PAGED:
            raise NotThere(
                "continuous batching keeps a paged cache of its own, which cannot hold a memory: use generate()"
            )
        return super().__getattr__(name)

    @property
    def generate_batch(self) -> Any:
        raise AttributeError  # from here Python asks __getattr__

    init_continuous_batching = continuous_batching_context_manager = generate_batch

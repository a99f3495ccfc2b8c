"""The model and causal-LM mixins: build the memory, see per call whether a token is evicted, refuse what cannot be."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import logging

from .cache import MemoryCacheLayer, adopt
from .config import MemoryConfig, check_base, check_window
from .errors import RetrofitError
from .kinds import build_memory
from .memory import Memory
from .padding import Starts, find_starts
from .rotary import Turn, longest_input
from .step import Pass

logger = logging.get_logger(__name__)

# what the mixins stand in front of: a family's class, known to the type checker as any pretrained model
if TYPE_CHECKING:
    from transformers import PreTrainedModel as Host
else:
    Host = object


# whoever asks whether there is continuous batching (transformers serve does) must find none
PAGED = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


class NotThere(RetrofitError, AttributeError):
    """An attribute that is not there, with a sentence that says why."""


class MemoryPreTrained(Host):
    """What every PreTrainedModel of the tree needs: transformers asks the nearest one how to initialise and to cast."""

    _keep_in_fp32_modules_strict = ["memory"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; tensor parallelism is refused, since a memory is not split by heads."""
        refuse_tensor_parallel(kwargs)
        return super().from_pretrained(*args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        if getattr(module, "is_retrofit_memory", False):
            module.reset_parameters()  # type: ignore[operator]
            return
        super()._init_weights(module)
        rounded = (self.config.memory or {}).get("rotary_dtype")
        if rounded and hasattr(module, "inv_freq"):
            for frequencies in (module.inv_freq, module.original_inv_freq):
                assert isinstance(frequencies, Tensor)
                init.copy_(frequencies, frequencies.to(getattr(torch, rounded)).to(frequencies.dtype))

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers, with the code that runs it beside the weights; all three Auto classes find it."""
        given = inspect.signature(super().save_pretrained).bind(*args, **kwargs)
        if given.arguments.get("push_to_hub"):
            raise RetrofitError("save first, then call push_to_hub(repo_id): the code beside it must be complete")
        family, prefix = type(self).__module__.rpartition(".")[2], type(self.config).__name__.removesuffix("Config")
        self.config.auto_map = {
            "AutoConfig": f"{family}.{prefix}Config",
            "AutoModel": f"{family}.{prefix}Model",
            "AutoModelForCausalLM": f"{family}.{prefix}ForCausalLM",
        }
        super().save_pretrained(*given.args, **given.kwargs)
        if given.arguments.get("is_main_process", True):
            name_every_file(Path(given.arguments["save_directory"]), family)


class MemoryModel(MemoryPreTrained):
    """Mixin in front of a family's model class; ``attention_class`` is the family's attention with the memory."""

    attention_class: type[nn.Module]

    def __init__(self, config: Any):
        super().__init__(config)
        self.memory_enabled = True
        if config.memory is None:
            raise RetrofitError(
                "this configuration has no memory: make the model with retrofit.patch(base, memory=..., window=...)"
            )
        memory = MemoryConfig.from_dict(config.memory)
        check_base(config, memory.window, memory.sinks)
        patched = memory.patched_layers(config.num_hidden_layers)
        for index, layer in enumerate(self.layers):
            if index in patched or memory.others == "window":
                attention = layer.self_attn
                # safe on attention modules, which hold no registry of their own; PreTrainedModels must be built as
                # what they are
                attention.__class__ = self.attention_class
                attention.memory = build_memory(config, memory, memory.kind if index in patched else "none")
        self.post_init()

    def memories(self) -> dict[int, Memory]:
        """The memory of each patched layer, by layer index."""
        found = ((index, getattr(layer.self_attn, "memory", None)) for index, layer in enumerate(self.layers))
        return {index: memory for index, memory in found if memory is not None}

    def set_window(self, window: int, sinks: int | None = None) -> None:
        """Change W and S from the next call on an empty cache; written to the configuration, so it is saved.

        Raises:
            RetrofitError: a value out of range, or more than the base's own sliding window.
        """
        sinks = self.config.memory["sinks"] if sinks is None else sinks
        check_window(window, sinks)
        check_base(self.config, window, sinks)
        for memory in self.memories().values():
            memory.check_window(window, sinks)
        for memory in self.memories().values():
            memory.window, memory.sinks = window, sinks
        self.config.memory = {**self.config.memory, "window": window, "sinks": sinks}

    @contextmanager
    def memory_off(self) -> Iterator[Any]:
        """Inside the block the model is its base: full attention, bit for bit."""
        before, self.memory_enabled = self.memory_enabled, False
        try:
            yield self
        finally:
            self.memory_enabled = before

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the family's model; beyond S + W tokens no T x T mask is built, unless a full-attention layer needs it."""
        memory_pass = None
        memories = self.memories()
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is not None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            warn_of_length(self.config, seen + tokens.shape[1])
        if not self.memory_enabled:
            if any(getattr(layer, "is_memory_layer", False) and layer.seen for layer in _cache_layers(past_key_values)):
                raise RetrofitError(
                    "this cache was filled with the memory on and cannot be continued with it off: start a new cache"
                )
        elif memories and tokens is not None:
            memory_pass = self._plan(tokens, attention_mask, position_ids, past_key_values, memories, kwargs)
            if memory_pass.evicting and len(memories) == len(self.layers):
                # a 4D mask is passed through as it is: this one stands for "none needed"
                attention_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
        if memory_pass is not None:
            kwargs["memory_pass"] = memory_pass
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def _plan(
        self,
        tokens: Tensor,
        mask: Any,
        position_ids: Tensor | None,
        cache: Cache | None,
        memories: dict[int, Memory],
        kwargs: dict[str, Any],
    ) -> Pass:
        new = tokens.shape[1]
        layers: list[MemoryCacheLayer] = []
        if cache is not None:
            layers = [adopt(cache, i, memory.kind, memory.window, memory.sinks) for i, memory in memories.items()]
        seen, before, evicted_before = 0, Starts(), False
        if layers:
            seen, before, evicted_before = layers[0].seen, layers[0].starts, layers[0].evicting
        plain = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        if "cu_seq_lens_q" in kwargs:
            raise RetrofitError(
                "packed sequences cannot be separated in a memory: give one sequence per row, padded on the left"
            )
        capacity = min(memory.capacity for memory in memories.values())
        if plain is None and mask is not None and seen + new > capacity:
            raise RetrofitError(
                "a memory needs the plain 2D attention mask (batch, tokens), not one that says who sees whom"
            )
        starts = find_starts(before, seen, new, plain, position_ids)
        limit = capacity + min(starts.pads)
        native = getattr(self.config, "sliding_window", None)
        if native is not None and len(memories) < len(self.layers):
            limit = min(limit, native)  # the mask made for the other layers is no wider: our own attention from here
        evicting = evicted_before or seen + new > limit
        if evicting and kwargs.get("output_attentions", getattr(self.config, "output_attentions", False)):
            raise RetrofitError(
                "attention weights exist up to window + sinks tokens only, where the base's own attention runs: leave "
                "output_attentions out, or take the teacher's inside memory_off()"
            )
        return Pass(seen, new, starts, evicting, self.turn, tokens.device, tokens.device, keeper=next(iter(memories)))

    def turn(self, positions: Tensor) -> Turn:
        """The rotary tables at ``positions`` (1 or B, n), fractions allowed, in float32."""
        # an input in float32 asks for tables in float32
        return self.rotary_emb(torch.empty(0, dtype=torch.float32, device=positions.device), positions)


class MemoryCausalLM(MemoryPreTrained):
    """Mixin in front of a family's causal LM: the public face of a retrofitted model."""

    _is_stateful = True  # transformers then refuses assisted decoding, which would need to take tokens out of a memory

    def memory_off(self) -> Any:
        """Context manager: inside it the model is its base (the teacher), full attention, bit for bit."""
        return self.model.memory_off()

    def set_window(self, window: int, sinks: int | None = None) -> None:
        """Change W (and S) from the next empty cache on; see :meth:`MemoryModel.set_window`."""
        self.model.set_window(window, sinks)

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


def refuse_tensor_parallel(kwargs: dict[str, Any]) -> None:
    """Refuse the arguments of ``from_pretrained`` that ask for tensor parallelism.

    Raises:
        RetrofitError: they do.
    """
    if kwargs.get("tp_plan") is not None or kwargs.get("tp_size") is not None:
        raise RetrofitError(
            "tensor parallelism would split the heads but not the memory: load the model without tp_plan"
        )


def warn_of_length(config: Any, length: int) -> None:
    """Say once that ``length`` tokens are more than the base's positions were made for."""
    longest = longest_input(config)
    if longest is not None and length > longest:
        logger.warning_once(
            f"the input is longer than the {longest} tokens that the base's positions were made for: what follows may "
            "get worse, with the memory and without; a base made for longer inputs, or yarn scaling, would not"
        )


def name_every_file(folder: Path, family: str) -> None:
    """Let an exported family file import each file beside it.

    Loading from a folder, the first releases of transformers 5 copy only the files which that one names itself, not
    the files that those need in turn.
    """
    entry = folder / f"{family}.py"
    text = entry.read_text(encoding="utf-8")
    names = sorted({Path(file).stem for file in get_relative_import_files(entry)})
    missing = [name for name in names if f"from .{name} " + "import" not in text]
    if missing:
        lines = "".join(f"from .{name} " + f"import __name__ as _{name}  # noqa\n" for name in missing)
        entry.write_text(
            f"{text}\n# older transformers copy only the files that this one names\n{lines}", encoding="utf-8"
        )


def _cache_layers(cache: Cache | None) -> list[Any]:
    return [] if cache is None else cache.layers

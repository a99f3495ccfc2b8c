"""Patching: a pretrained causal LM becomes one with a bounded memory, on the same storage."""

import copy
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from patches.config import MemoryConfig, check_base
from patches.errors import RetrofitError
from patches.kinds import find_kind, new_memory

from .families import find_family, is_retrofit, refuse_retrofit
from .loading import load_base
from .quantised_bases import METHODS, is_own_layer, shared

MOST = 10  # times the base's parameters: an adapter that asks for more was damaged, or worse

# configuration fields that belong to the class or to the file a base came from, not to what the model computes
NOT_INHERITED = ("model_type", "architectures", "auto_map", "transformers_version", "memory", "_name_or_path")


@torch.inference_mode(False)  # a memory made under it could never learn
def patch(
    base: PreTrainedModel | str,
    memory: str,
    window: int | None = None,
    sinks: int | None = None,
    *,
    budget: int | str | None = None,
    texts: Iterable[Tensor] | None = None,
    context: int | None = None,
    batch: int | None = None,
    layers: list[int] | None = None,
    others: str = "full",
    by_layer: dict[str, dict[str, Any]] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Give a pretrained model a memory.

    The result's parameters share the base's storage; the base itself is left as it is: its classes, its gradient
    flags, its logits.

    Args:
        base: a causal LM of a supported family (or a patched one, whose base is then patched anew), or the path or Hub
            id of a base.
        memory: kind of memory, see ``patches.kinds.KINDS``.
        window: tokens kept exactly, the current one included; with ``budget``, by default what loses least.
        sinks: first tokens of a sequence, kept exactly for ever; by default none, with ``budget`` 4.
        budget: of the kind ``expected``, what may be kept, see :func:`retrofit.budget.read_budget`: window, bits and
            entries of each head are then measured on ``texts``, and the model is calibrated. ``kvm`` has an option
            of this name.
        texts: token ids ``(B, T)`` each, as :func:`retrofit.calibrate` reads them.
        context, batch: tokens of the longest input and sequences at once, which a budget may be for.
        layers: indices of the layers that get the memory (default: all; of a base with sliding and full layers, the
            full ones).
        others: what the other layers do: ``"full"``, as in the base, or ``"window"`` (sinks + window without a memory).
        by_layer: what single layers have otherwise, by number or numbers: ``{"0": {"window": 64}, "4-7": {...}}``.
        model_kwargs: for ``from_pretrained`` when ``base`` is a path or id (``dtype``, ``device_map``, ...).
        **options: the memory's own options.

    Returns:
        A ``Retrofit<Family>ForCausalLM`` in evaluation or training mode like its base; only the memory requires
        gradients.

    Raises:
        RetrofitError: an unsupported family or base, the path of an export, an unknown memory or option, a value out of
            range.
    """
    kind = find_kind(memory)
    if budget is not None and "budget" in {field.name for field in fields(kind.Options)}:
        options, budget = {**options, "budget": budget}, None  # kvm's own option of this name
    kind.read_options(options)  # before a base is loaded
    if budget is not None and (memory != "expected" or texts is None or "rows" in options):
        raise RetrofitError("a budget is measured: give memory='expected', texts to read, and no rows")
    if budget is None and (window is None or (texts, context, batch) != (None, None, None)):
        raise RetrofitError("give a window; or a budget, which texts, context and batch are for")
    if not isinstance(base, PreTrainedModel):
        if not isinstance(base, str) and not hasattr(base, "__fspath__"):
            raise RetrofitError(f"the base must be a transformers model, a path or a Hub id, not {type(base).__name__}")
        path = str(base)
        base = load_base(path, **(model_kwargs or {}))
        refuse_retrofit(base.config, path)
    elif model_kwargs:
        raise RetrofitError("model_kwargs are for loading: pass them with a path or id, not with a loaded model")
    family = find_family(base.config)
    if type(base).__name__.removeprefix("Retrofit") != family.causal_lm.__name__.removeprefix("Retrofit"):
        raise RetrofitError(f"{type(base).__name__} is not a plain causal LM: load the base with AutoModelForCausalLM")
    quantiser = getattr(base, "hf_quantizer", None)
    if quantiser is not None and base.quantization_method.value not in METHODS:
        raise RetrofitError(
            f"a base quantised by {base.quantization_method.value} is not supported: load it in bfloat16 or float32, "
            "or quantise it with torchao or bitsandbytes"
        )
    if any(parameter.is_meta for parameter in base.parameters()):
        raise RetrofitError("some weights of the base are not loaded (meta or offloaded to disk): load all of it")

    if budget is not None:
        from .budget import fit_budget, read_budget

        size = read_budget(budget, base.config, base.dtype, context=context, batch=batch, layers=layers, others=others)
        made = fit_budget(
            base,
            texts or (),
            size,
            sinks=4 if sinks is None else sinks,
            window=window,
            context=context,
            layers=layers,
            others=others,
            **options,
        )
        return made[0].train(base.training)
    assert window is not None
    sinks = sinks or 0
    name, revision = _origin(base)
    frequencies = base.model.rotary_emb.inv_freq.dtype
    rounded = None if frequencies.itemsize >= 4 else str(frequencies).removeprefix("torch.")
    origin = {"base": name, "base_revision": revision, "rotary_dtype": rounded}
    settings = new_memory(memory, window, sinks, layers, others, options, by_layer=by_layer or {}, **origin)
    check_base(base.config, settings)
    model = skeleton(base.config, settings)
    added, there = sum(p.numel() for _, p in model.memory_parameters()), base.num_parameters()
    if added > MOST * there:
        raise RetrofitError(
            f"memory {memory!r} would add {added:,} parameters with these options, and its base has {there:,}: "
            "choose smaller options"
        )
    _share(base, model)
    if quantiser is not None:
        _keep_quantiser(base, model)
    model.generation_config = copy.deepcopy(base.generation_config)
    if getattr(base, "hf_device_map", None) and len(set(base.hf_device_map.values())) > 1:
        from accelerate import dispatch_model

        model = dispatch_model(model, base.hf_device_map)
    return model.train(base.training)


def skeleton(config: Any, settings: MemoryConfig) -> Any:
    """The patched model of a base's configuration, every tensor on the meta device: shapes without weights."""
    family = find_family(config)
    values = {key: value for key, value in config.to_dict().items() if key not in NOT_INHERITED}
    ours = family.config(**values, memory=settings.to_dict())
    ours._attn_implementation = config._attn_implementation
    ours._experts_implementation = config._experts_implementation
    with torch.device("meta"):
        return family.causal_lm(ours)


def _keep_quantiser(base: Any, model: Any) -> None:
    """Let ``model`` be saved as its quantised base would be, the memory as it is.

    It is not called quantised: transformers' Trainer would refuse to train it, and what is trained is not.
    """
    model.hf_quantizer, model.quantization_method = base.hf_quantizer, base.quantization_method
    settings = copy.deepcopy(base.config.quantization_config)
    name = "modules_to_not_convert" if hasattr(settings, "modules_to_not_convert") else "llm_int8_skip_modules"
    setattr(settings, name, sorted({*(getattr(settings, name) or ()), "lm_head", "memory"}))
    model.config.quantization_config = settings


def _origin(base: PreTrainedModel) -> tuple[str | None, str | None]:
    """Name and revision of the checkpoint behind ``base``."""
    memory = getattr(base.config, "memory", None)
    if memory:
        return memory.get("base"), memory.get("base_revision")
    return getattr(base.config, "_name_or_path", None) or None, getattr(base.config, "_commit_hash", None)


def _share(base: Any, model: Any) -> None:
    """Point ``model``'s parameters at ``base``'s storage, frozen; copy buffers; give every memory fresh parameters."""
    for path, module in list(model.named_modules()):
        if getattr(module, "is_retrofit_memory", False):
            device = base.get_submodule(path.removesuffix(".memory")).q_proj.weight.device
            module.to_empty(device=device)
            module.to(torch.promote_types(base.dtype, torch.float32))
            module.reset_parameters()
            continue
        if ".memory." in f"{path}.":
            continue
        source = base.get_submodule(path)
        if is_retrofit(base):  # LoRA beside a memory is part of the retrofit, not of the base
            source = getattr(source, "base_layer", source)
        if is_own_layer(source):
            model.set_submodule(path, shared(source))
            continue
        if module._parameters.keys() != source._parameters.keys():
            raise RetrofitError(
                f"{path} of the base is a {type(source).__name__} whose weights are not those of its family: first "
                "merge or remove whatever was added to it, such as a LoRA adapter"
            )
        for name, parameter in source.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=False))
        for name, buffer in source.named_buffers(recurse=False):
            module.register_buffer(name, buffer.clone(), persistent=name not in source._non_persistent_buffers_set)
    model.tie_weights()

"""What a run refuses: a recipe before its base is loaded, and what transformers' Trainer offers and ours does not."""

import os
from typing import Any

import torch
from transformers import get_scheduler

from distill.config import DistillConfig
from distill.lora import check_settings, lora_layers
from distill.parallel.zero import read_config
from patches.config import MemoryConfig
from patches.errors import RetrofitError, first_line
from patches.kinds import KINDS, find_kind, new_memory
from retrofit.hub import HUB_ID

# settings that do not go together, and what the second does that the first cannot have
APART = (
    ("activation_offloading", "segment", "which keeps no activations"),
    ("torch_compile", "segment", "of which each has a graph of its own"),
    ("torch_compile", "local_steps", "which go back through each layer while the next one waits"),
    ("torch_compile", "window_sampling", "which would compile a step for every window that is drawn"),
    ("torch_compile", "deepspeed", "whose engine runs the model in its own way"),
    ("torch_compile", "fsdp", "which gathers weights while a step runs"),
    ("fsdp", "deepspeed", "which divides the weights as well"),
    ("fsdp", "segment", "because all processes gather weights in step, and rows differ in their segments"),
    ("fsdp", "activation_offloading", "which moves the weights as well"),
    ("fsdp", "local_steps", "which need the weights of a layer whole"),
    ("fsdp", "lora", "whose weights it would save empty"),
)
ZERO3 = (
    ("lora", "which would save it empty"),
    ("segment", "whose processes gather weights in step though rows may have different numbers of segments"),
    ("activation_offloading", "which moves the weights as well"),
    ("local_steps", "which has no layer's weights whole"),
)
UNSET: tuple[Any, ...] = (None, 0, "fixed", {})  # what such a setting is where it was not made


def check_recipe(recipe: DistillConfig) -> None:
    """Check everything about a recipe that can be known without its base.

    Raises:
        RetrofitError: a memory, one of its options, a field of LoRA or a DeepSpeed file does not exist,
            the memory has nothing to fit, or settings do not go together.
    """
    find_trainable(recipe.memory)
    memory_of(recipe)
    if recipe.lora:
        check_settings(recipe.lora)
    _check_schedule(recipe)
    if recipe.hub_model_id is not None and not HUB_ID.fullmatch(recipe.hub_model_id):
        raise RetrofitError(f"hub_model_id: {recipe.hub_model_id!r} names no repository of the Hub: write user/name")
    read_config(recipe.deepspeed)
    refuse_together(recipe)


def memory_of(recipe: DistillConfig) -> MemoryConfig:
    """The recipe's memory; raises as :func:`patches.kinds.new_memory`."""
    return new_memory(recipe.memory, options=recipe.options, **recipe.of_memory)


def budgets(recipe: DistillConfig, config: Any) -> tuple[int, int]:
    """S + W of the layer that forgets first, and of the layer with the memory that forgets last.

    Args:
        config: the base's transformers configuration.

    Raises:
        RetrofitError: rows never leave the window of a layer with the memory, or layers that this base has not.
    """
    memory = memory_of(recipe)
    widest = max(one.window for one in memory.of_layers(config) if one and one.kind == memory.kind)
    recipe.check_length(widest)
    return recipe.sinks + min(memory.windows(config)), recipe.sinks + widest


def _check_schedule(recipe: DistillConfig) -> None:
    name, options = recipe.lr_scheduler_type, recipe.lr_scheduler_kwargs
    if options and name in ("constant", "constant_with_warmup"):
        raise RetrofitError(f"lr_scheduler_kwargs: {name} has none: leave them out")
    idle = torch.optim.SGD([torch.zeros(1)], lr=recipe.learning_rate)
    try:
        schedule = get_scheduler(name, idle, 0, max(3, recipe.max_steps), options or None)
        for _ in range(0 if name in ("reduce_lr_on_plateau", "greedy") else 2):  # those go by the evaluations
            idle.step()
            schedule.step()
    except (TypeError, ValueError, ArithmeticError) as error:
        raise RetrofitError(f"lr_scheduler_kwargs do not fit {name}: {first_line(error)}") from None


def find_trainable(memory: str) -> Any:
    """The class of a kind of memory that can be fitted.

    Raises:
        RetrofitError: there is no such kind, or it has nothing to fit.
    """
    kind = find_kind(memory)
    if not kind.trainable:
        choices = ", ".join(name for name, kind in KINDS.items() if kind.trainable)
        raise RetrofitError(
            f"memory {memory!r} has nothing to fit: choose one of {choices}, or export it with `retrofit patch`"
        )
    return kind


def refuse_together(settings: Any) -> None:
    """Refuse settings that do not go together.

    Args:
        settings: a recipe or the trainer's arguments.

    Raises:
        RetrofitError: two such are set.
    """
    for name, other, why in APART:
        value = getattr(settings, other, None)
        if getattr(settings, name) and value not in UNSET:
            raise RetrofitError(f"{name} does not go with {other}={value}, {why}: leave one of them out")


def refuse_unsupported(model: Any, args: Any) -> None:
    """Refuse what transformers' Trainer offers and this one would ignore, or fail at in the middle of a run.

    Raises:
        RetrofitError: one of these is asked for, by the arguments, the model or accelerate's configuration.
    """
    refuse_together(args)
    kind = model.config.memory["kind"]
    if args.torch_compile and not find_kind(kind).compiles:
        raise RetrofitError(
            f"torch_compile does not work with memory {kind!r}, whose steps are decided on the host: leave it out"
        )

    def launcher(name: str) -> bool:
        return os.environ.get(name, "false").lower() in ("1", "true", "yes")

    asked = {
        "FSDP of accelerate's configuration": (
            launcher("ACCELERATE_USE_FSDP") and not args.fsdp,
            "remove it there and set fsdp",
        ),
        "context, sequence and tensor parallelism": (
            getattr(args, "parallelism_config", None)
            or launcher("ACCELERATE_USE_PARALLELISM_CONFIG")
            or getattr(model, "_device_mesh", None) is not None,
            "set segment for rows longer than a GPU holds, and fsdp or deepspeed for a base larger than that",
        ),
        "label_smoothing_factor": (
            args.label_smoothing_factor,
            "set it to 0: the teacher's distribution is the label",
        ),
        "neftune_noise_alpha": (args.neftune_noise_alpha, "remove it, because the teacher would get the noise as well"),
        "use_liger_kernel": (args.use_liger_kernel, "remove it, because the loss here never makes all logits anyway"),
    }
    for name, (wanted, advice) in asked.items():
        if wanted:
            raise RetrofitError(f"DistillTrainer does not support {name}: {advice}")
    engine = getattr(args, "hf_deepspeed_config", None)
    if args.fsdp:
        _check_fsdp(model, args)
    if engine is None or not engine.is_zero3():
        return
    for name, why in ZERO3:
        if lora_layers(model) if name == "lora" else getattr(args, name):
            raise RetrofitError(f"{name} does not work with ZeRO-3, {why}: use zero2, or leave {name} out")


def _check_fsdp(model: Any, args: Any) -> None:
    plugin = getattr(args, "fsdp_plugin_args", None) or {}
    if plugin.get("fsdp_version") != 2:
        raise RetrofitError(
            "FSDP is supported in its second version only: set version to 2 in fsdp_config, or upgrade transformers"
        )
    if args.world_size == 1:
        raise RetrofitError("FSDP divides the weights among processes: start two or more (--nproc), or leave it out")
    if lora_layers(model):
        raise RetrofitError("LoRA does not work with FSDP, which would save it empty: use zero2")
    if getattr(model, "hf_quantizer", None) is not None:
        raise RetrofitError("FSDP does not divide quantised weights: leave fsdp out")

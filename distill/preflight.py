"""What a run refuses before it loads its base: the recipe's memory, its LoRA, its DeepSpeed file."""

from typing import Any

import torch
from transformers import get_scheduler

from distill.config import DistillConfig
from distill.lora import check_settings
from distill.parallel.zero import read_config
from distill.unsupported import refuse_together
from patches.config import MemoryConfig
from patches.errors import RetrofitError, first_line
from patches.kinds import KINDS, find_kind, new_memory
from retrofit.hub import HUB_ID


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

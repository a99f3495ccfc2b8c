"""What a run refuses before it loads its base: the recipe's memory, its reporters, its LoRA, its DeepSpeed file."""

from typing import Any

import torch
from transformers import get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from distill.lora import check_settings
from distill.parallel.zero import read_config
from distill.recipe import Recipe
from distill.unsupported import refuse_together
from patches.config import MemoryConfig
from patches.errors import RetrofitError, nearest
from patches.kinds import KINDS, find_kind, new_memory
from retrofit.evaluation.definitions import HUB_ID
from retrofit.hub_errors import first_line


def check_recipe(recipe: Recipe) -> None:
    """Check everything about a recipe that can be known without its base.

    Raises:
        RetrofitError: a memory, one of its options, a reporter, a field of LoRA or a DeepSpeed file does not exist,
            the memory has nothing to fit, or settings do not go together.
    """
    find_trainable(recipe.memory)
    memory_of(recipe)
    _check_reporters(recipe.report_to)
    if recipe.lora:
        check_settings(recipe.lora)
    _check_schedule(recipe)
    if recipe.push_to is not None and not HUB_ID.fullmatch(recipe.push_to):
        raise RetrofitError(f"push_to: {recipe.push_to!r} names no repository of the Hub: write user/name")
    read_config(recipe.deepspeed)
    refuse_together(recipe)


def memory_of(recipe: Recipe) -> MemoryConfig:
    """The recipe's memory; raises as :func:`patches.kinds.new_memory`."""
    return new_memory(
        recipe.memory,
        recipe.window,
        recipe.sinks,
        recipe.layers,
        recipe.others,
        recipe.options,
        by_layer=recipe.by_layer,
    )


def budgets(recipe: Recipe, config: Any) -> tuple[int, int]:
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


def _check_schedule(recipe: Recipe) -> None:
    if recipe.scheduler_options and recipe.scheduler in ("constant", "constant_with_warmup"):
        raise RetrofitError(f"scheduler_options: {recipe.scheduler} has none: leave them out")
    idle = torch.optim.SGD([torch.zeros(1)], lr=recipe.lr)
    try:
        schedule = get_scheduler(recipe.scheduler, idle, 0, max(3, recipe.steps), recipe.scheduler_options or None)
        for _ in range(2):
            idle.step()
            schedule.step()
    except (TypeError, ValueError, ArithmeticError) as error:
        raise RetrofitError(f"scheduler_options do not fit {recipe.scheduler}: {first_line(error)}") from None


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


def reporters(report_to: str) -> list[str]:
    """``"wandb,tensorboard"`` as a list for ``TrainingArguments``; ``"none"`` is empty, ``"all"`` what is installed.

    Raises:
        RetrofitError: an unknown name, or one whose package is not installed.
    """
    names = [name.strip() for name in report_to.split(",") if name.strip() not in ("", "none")]
    installed = get_available_reporting_integrations()
    if names == ["all"]:
        return installed
    _check_reporters(report_to)
    for name in names:
        if name not in installed:
            raise RetrofitError(f"report_to: {name!r} is not installed: pip install {name}, or remove it")
    return names


def _check_reporters(report_to: str) -> None:
    known = ["none", "all", *INTEGRATION_TO_CALLBACK]
    for name in filter(None, map(str.strip, report_to.split(","))):
        if name not in known:
            raise RetrofitError(f"report_to: unknown {name!r}{nearest(name, known)}")

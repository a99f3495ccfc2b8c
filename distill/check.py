"""A recipe looked at as far as nothing but itself can tell: its memory, its names, what does not go together."""

from pathlib import Path

from distill.lora import check_settings
from distill.recipe import Recipe
from distill.reporting import check_names
from distill.zero import SHIPPED
from patches.errors import RetrofitError, nearest
from patches.kinds import find_kind


def check_recipe(recipe: Recipe) -> None:
    """What :func:`distill.run.distill` would refuse before it loads the base; `--dry-run` looks at the base too.

    Raises:
        RetrofitError: the memory, one of its options, a reporter, a LoRA field or a DeepSpeed file there is none of, or
            a memory that there is nothing to fit in.
    """
    kind = find_kind(recipe.memory)
    kind.read_options(recipe.options)
    if not kind.trainable:
        raise RetrofitError(f"memory {recipe.memory!r} has nothing to fit: export it as it is with `retrofit patch`")
    check_names(recipe.report_to)
    if recipe.lora:
        check_settings(recipe.lora)
    name = recipe.deepspeed
    if name is not None and name not in SHIPPED and not Path(name).expanduser().is_file():
        raise RetrofitError(f"deepspeed: there is no file {name}{nearest(name, SHIPPED)}: give zero2, zero3 or a file")

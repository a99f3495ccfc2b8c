"""`retrofit distill R --dry-run`: what a run will be and what it will take, from its base's configuration alone.

Operations per sequence of T tokens, P being the body's weights, V E the head's, T' the scored positions; A and G are
attention over the pairs that are seen and the memory's scan (retrofit/costs/flops.py):

    teacher    2 P T + A(full)
    student    2 P T + A(window) + G
    backward   2 P T + 2.5 A(window) + 2 G     the base is frozen: gradients of activations only
    recompute  the student once more, with gradient checkpointing
    local step  the teacher's body, and at each layer twice projections and A(window), and 3 G; no head
    head       2 V E T' each for teacher, student and gradient

Memory is distill/simulate.py's, plus weights, the trained parameters (the memory's, LoRA's) with gradient and AdamW's
two moments (16 bytes each, DeepSpeed divides them as its stages say). LoRA's operations and activations are left out.
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distill.config import STEPS, DistillConfig
from distill.lora import add_lora
from distill.objective import Objective
from distill.preflight import budgets, check_recipe, memory_of
from distill.simulate import step_bytes
from distill.windows import check_draws, draw_window
from patches.config import MemoryConfig, check_base
from patches.errors import RetrofitError
from retrofit.costs.bases import base_config
from retrofit.costs.estimate import DTYPES, layer_memories
from retrofit.costs.flops import Shape, attention_flops, distinct, forward_flops
from retrofit.files import write_json
from retrofit.patching import skeleton
from retrofit.plain_yaml import dump_yaml
from retrofit.table import print_table

GPUS = (1, 2, 4, 8, 16, 32)
STAGES = (0, 2, 3)
GIB = 2**30
COLUMNS = {
    "gpus": ("GPUs", "d"),
    "rows_per_step": ("rows per step", ",d"),
    "tokens_per_step": ("tokens per step", ",d"),
    "tokens": ("tokens in all (M)", ",.0f"),
    "gpu_hours": ("GPU hours", ",.1f"),
    "zero0": ("GiB, no ZeRO", ",.1f"),
    "zero2": ("GiB, ZeRO-2", ",.1f"),
    "zero3": ("GiB, ZeRO-3 or FSDP2", ",.1f"),
}


@dataclass(frozen=True)
class Plan:
    """What a recipe costs, for one GPU: each does the same work however many there are."""

    base_parameters: int
    trained: int
    step_flops: int  # of a step that is not local, with the recipe's own checkpointing
    local_flops: int  # of a local step
    step_flops_plain: int
    step_flops_checkpointed: int
    base_bytes: int
    gathered_bytes: int  # the largest module that ZeRO-3 gathers: a layer, or the embedding
    activation_bytes: int
    scored: float  # positions per row, at most: every label counts
    windows: dict[tuple[int, int], int]  # (W, S): steps
    origin: str

    def memory(self, gpus: int, stage: int) -> int:
        """Bytes of one GPU of so many under ZeRO ``stage``; the CUDA context and fragmentation come on top."""
        base, trained = self.base_bytes, 4 * self.trained
        rest = 12 * self.trained  # gradient and moments
        if stage >= 2:
            rest //= gpus
        if stage == 3 and gpus > 1:
            base, trained = base // gpus + self.gathered_bytes, trained // gpus
        return base + trained + rest + self.activation_bytes


def plan(recipe: DistillConfig) -> Plan:
    """Work out ``recipe``; its data is not looked at: every row is taken to be full and labelled throughout.

    Raises:
        RetrofitError: no base, one whose configuration cannot be had, or a memory, loss, sampling or LoRA that does not
            fit it.
    """
    if recipe.base is None:
        raise RetrofitError("the recipe has no 'base': set it in the recipe or with --base")
    check_recipe(recipe)
    if recipe.max_steps < 1:  # the length of the data decides, which is not looked at
        recipe.max_steps = STEPS
    config, origin = base_config(recipe.base)
    own = getattr(config, "dtype", None)
    dtype = DTYPES.get(recipe.dtype) or (own if isinstance(own, torch.dtype) else torch.float32)
    settings = memory_of(recipe)
    check_base(config, settings)
    budgets(recipe, config)
    model = skeleton(config, settings)
    Objective.of(recipe).check(model)
    if recipe.window_sampling == "ahn":
        check_draws(model)
    memory = sum(parameter.numel() for _, parameter in model.memory_parameters())
    parameters = model.num_parameters() - memory
    if recipe.lora:
        add_lora(model, recipe.lora)
    trained = model.num_parameters() - parameters

    windows = Counter(_windows(recipe))
    plain, recomputed, local, scored = (
        sum(count * figure for figure, count in zip(column, windows.values(), strict=True)) / recipe.max_steps
        for column in zip(*(_sequence(config, recipe, window) for window in windows), strict=True)
    )
    rows = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
    widest = min(windows, key=sum)  # the smallest window leaves most to the memory
    activations = step_bytes(
        config,
        _settings(recipe, *widest),
        recipe.per_device_train_batch_size,
        recipe.max_length,
        dtype,
        recipe.gradient_checkpointing,
        Objective.of(recipe),
        recipe.activation_offloading,
    )
    shape = Shape.of(config)
    plain, recomputed, local = (int(flops * rows) for flops in (plain, recomputed, local))
    return Plan(
        base_parameters=parameters,
        trained=trained,
        step_flops=plain + (recomputed - plain) * (recipe.gradient_checkpointing + (recipe.segment is not None)),
        local_flops=local,
        step_flops_plain=plain,
        step_flops_checkpointed=recomputed,
        base_bytes=parameters * dtype.itemsize,
        gathered_bytes=max(shape.body // shape.layers, shape.head) * dtype.itemsize,
        activation_bytes=activations,
        scored=scored,
        windows=dict(windows),
        origin=origin,
    )


def hours(plan: Plan, recipe: DistillConfig, peak_tflops: float, utilisation: float) -> float:
    """Hours of all steps on GPUs of this peak (10^12 dense operations a second), each used to this share."""
    flops = (recipe.max_steps - recipe.local_steps) * plan.step_flops + recipe.local_steps * plan.local_flops
    return flops / (peak_tflops * 1e12 * utilisation) / 3600


def table(plan: Plan, recipe: DistillConfig, peak_tflops: float, utilisation: float) -> list[dict[str, Any]]:
    """One row per number of GPUs: what is learned from, what it costs, GiB per GPU under each ZeRO stage."""
    rows = []
    for gpus in GPUS:
        per_step = gpus * recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
        rows.append(
            {
                "gpus": gpus,
                "rows_per_step": per_step,
                "tokens_per_step": per_step * recipe.max_length,
                "tokens": recipe.max_steps * per_step * recipe.max_length / 1e6,
                "gpu_hours": gpus * hours(plan, recipe, peak_tflops, utilisation),
                **{f"zero{stage}": plan.memory(gpus, stage) / GIB for stage in STAGES},
            }
        )
    return rows


def summary(plan: Plan, recipe: DistillConfig, peak_tflops: float, utilisation: float) -> list[str]:
    """The figures that depend on nothing but the recipe, in words, and how far they can be trusted."""
    totals = Counter({W + S: 0 for W, S in plan.windows})
    for (W, S), count in plan.windows.items():
        totals[W + S] += count
    drawn = ", ".join(f"{total} tokens in {count} steps" for total, count in sorted(totals.items()))
    flops = f"{plan.step_flops_plain / 1e12:,.3g}, {plan.step_flops_checkpointed / 1e12:,.3g} with checkpointing"
    took = hours(plan, recipe, peak_tflops, utilisation)
    chosen = "on" if recipe.gradient_checkpointing else "off"
    chosen += ", and each segment is computed twice" if recipe.segment else ""
    local = (
        f"; {plan.local_flops / 1e12:,.3g} in each of {recipe.local_steps} local steps" if recipe.local_steps else ""
    )
    passes = ""
    if recipe.to_recipe()["max_steps"] < 1:
        passes = f"; {recipe.num_train_epochs} passes over the data will decide the number of steps"
    divided = recipe.deepspeed or ("fsdp" if recipe.fsdp else "each holds the whole model (DDP)")
    return [
        f"base: {recipe.base}, {plan.base_parameters:,} parameters, frozen ({plan.origin})",
        f"trained: {plan.trained:,} parameters ({plan.trained / plan.base_parameters:.2%} of the base)",
        f"sinks and window: {drawn}; scored positions per row: {plan.scored:,.0f} at most",
        f"TFLOP per step and GPU: {flops} (checkpointing is {chosen}){local}",
        f"several GPUs: {divided} (--deepspeed none, zero2, zero3 or --fsdp)",
        f"hours: {took:,.2f} for {recipe.max_steps} steps on any number of GPUs, at "
        f"{utilisation:.0%} of {peak_tflops:,.0f} TFLOP/s (989 is H100 and H200, dense bfloat16), full rows{passes}",
        "GiB: weights and optimizer by formula, activations from the step run on tensors without data, within 20 % of "
        "real steps on a CPU (docs/estimate.md); not checked on a GPU, whose context comes on top",
    ]


def dry_run(
    recipe: DistillConfig, *, peak_tflops: float, utilisation: float, json_file: Path | None = None
) -> dict[str, Any]:
    """Print the resolved recipe, what it comes to, and a row per number of GPUs; write the same to ``json_file``.

    Returns:
        What ``json_file`` holds.

    Raises:
        RetrofitError: as :func:`plan`.
    """
    found = plan(recipe)
    rows = table(found, recipe, peak_tflops, utilisation)
    print(dump_yaml(recipe.to_recipe()))
    print("\n".join(summary(found, recipe, peak_tflops, utilisation)))
    print_table("", rows, COLUMNS)
    windows = [{"window": W, "sinks": S, "steps": count} for (W, S), count in found.windows.items()]
    data = {"recipe": recipe.to_recipe(), **asdict(found), "windows": windows, "rows": rows}
    data["hours"] = hours(found, recipe, peak_tflops, utilisation)
    if json_file is not None:
        write_json(json_file, data)
    return data


def _settings(recipe: DistillConfig, window: int, sinks: int) -> MemoryConfig:
    return replace(memory_of(recipe), window=window, sinks=sinks)


def _windows(recipe: DistillConfig) -> list[tuple[int, int]]:
    """(W, S) of every step."""
    if recipe.window_sampling == "ahn":
        return [draw_window(recipe.seed, step, recipe.max_length) for step in range(recipe.max_steps)]
    return [(recipe.window, recipe.sinks)] * recipe.max_steps


def _sequence(config: Any, recipe: DistillConfig, window: tuple[int, int]) -> tuple[float, float, float, int]:
    """Operations of one row, without and with checkpointing and in a local step, and its scored positions."""
    shape, T = Shape.of(config), recipe.max_length
    settings = _settings(recipe, *window)
    base, memories = (layer_memories(config, one) for one in (None, settings))
    full, student = (forward_flops(shape, one, T, head=0) for one in (base, memories))
    attention = sum(count * attention_flops(shape, memory, T) for memory, count in distinct(memories))
    patched = [(memory, count) for memory, count in distinct(memories) if memory is not None]
    scan = sum(count * memory.flops(T) for memory, count in patched)
    backward = student + 1.5 * attention + scan
    scored = max(0, T - min(settings.windows(config)) - settings.sinks)
    with_teacher = recipe.loss != "ce"
    head = (3 if with_teacher else 2) * 2 * shape.head * scored
    plain = full * with_teacher + student + backward + head
    layers = sum(count * (2 * shape.projections * T + attention_flops(shape, memory, T)) for memory, count in patched)
    return plain, plain + student, full + 2 * layers + 3 * scan, scored

"""What transformers' Trainer and DeepSpeed offer and distillation does not: refused before anything is made."""

import os
from typing import Any

from distill.lora import lora_layers
from patches.errors import RetrofitError
from patches.kinds import find_kind

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

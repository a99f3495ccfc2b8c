"""Quantised bases: which are taken, how they are called, their layers shared, their weights as numbers."""

import copy
from typing import Any

from torch import Tensor, nn

from patches.errors import RetrofitError

METHODS = ("torchao", "bitsandbytes")
IN_PLACE = "support_avx512bf16_for_cpu"  # whether the first call without a gradient rewrites 4-bit weights
HOOKS = ("forward", "_old_forward", "_hf_hook")  # what accelerate puts on a module of another model


def quantisation(model: Any) -> str | None:
    """How a base was quantised, ``"bitsandbytes, 4 bits"``; None if it was not."""
    method = getattr(model, "quantization_method", None)
    if method is None:
        return None
    how = model.config.quantization_config
    if method.value == "bitsandbytes":
        return f"bitsandbytes, {8 if how.load_in_8bit else 4} bits"
    return f"{method.value}, {type(how.quant_type).__name__}"


def is_own_layer(module: nn.Module) -> bool:
    """Whether quantisation has put a class of its own in a layer's place: bitsandbytes does, torchao leaves it."""
    return type(module).__module__.partition(".")[0] == "bitsandbytes"


def shared(module: nn.Module) -> nn.Module:
    """A layer for another model that holds the very weights of this one, frozen.

    Raises:
        RetrofitError: the weights have become what only inference on this CPU reads.
    """
    if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
        raise RetrofitError(
            "this base has been called, and on this CPU bitsandbytes then keeps its 4-bit weights in a form without "
            "gradients: load it again, and patch it before you call it"
        )
    if hasattr(module, IN_PLACE):  # so neither model rewrites what both hold
        setattr(module, IN_PLACE, False)
    own = copy.copy(module)
    for name in ("_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"):
        setattr(own, name, getattr(own, name).copy())
    for name in HOOKS:
        own.__dict__.pop(name, None)
    for name, parameter in own.named_parameters(recurse=False):
        if parameter.requires_grad:  # a bias; a quantised weight is a class of its own, and has no gradient anyway
            setattr(own, name, nn.Parameter(parameter.detach(), requires_grad=False))
    return own


def numbers(weight: Tensor) -> Tensor:
    """A weight as a plain tensor; torchao's classes cannot be indexed number by number, bitsandbytes' hold bytes."""
    plain: Tensor = weight.dequantize() if hasattr(weight, "qdata") else weight
    return plain

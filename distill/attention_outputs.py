"""The MSE loss: how far each layer's attention output is from the teacher's, before the output projection.

AHN's ablation "distill" (arXiv 2510.07318; its code adds it to the KL): teacher and student run side by side, each on
its own hidden states, and every layer with a memory is to give what full attention gives.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from patches.errors import RetrofitError


@contextmanager
def attention_outputs(model: Any, wanted: bool = True) -> Iterator[list[Tensor]]:
    """A list that fills with the heads' outputs ``(B, T, H * D)`` of each layer with a memory, as forward passes run.

    Args:
        model: a retrofitted model, unwrapped.
        wanted: False leaves the list empty, and the model alone.
    """
    outputs: list[Tensor] = []
    handles = []
    if wanted:
        for index in model.model.memories():
            projection = model.model.layers[int(index)].self_attn.o_proj
            handles.append(projection.register_forward_pre_hook(lambda _module, args: outputs.append(args[0])))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def check_comparable(model: Any) -> None:
    """Refuse a memory that the loss would not see.

    Raises:
        RetrofitError: the memory joins behind the output projection.
    """
    if model.config.memory["kind"] == "tensor-cache":
        raise RetrofitError(
            "loss 'mse' compares what goes into each layer's output projection, and memory 'tensor-cache' joins behind "
            "it: take loss 'kl' or 'ce'"
        )


def squared_errors(student: list[Tensor], teacher: list[Tensor], scored: Tensor) -> Tensor:
    """Squared differences, averaged over layers and width.

    Args:
        student, teacher: one ``(B, T, H * D)`` per layer.
        scored: (B, T) bool, where to look.

    Returns:
        (P,) in fp32 (fp64).

    Raises:
        RetrofitError: the student's outputs carry no gradient though one is wanted: checkpointing is reentrant.
    """
    if torch.is_grad_enabled() and not all(output.requires_grad for output in student):
        raise RetrofitError(
            "loss 'mse' needs the attention's outputs with their gradient, which reentrant checkpointing cuts off: "
            "set use_reentrant to false"
        )
    wide = torch.promote_types(student[0].dtype, torch.float32)
    errors = [
        (ours[scored].to(wide) - theirs[scored].to(wide)).square().mean(-1)
        for ours, theirs in zip(student, teacher, strict=True)
    ]
    return torch.stack(errors).mean(0)

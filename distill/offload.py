"""Activations in main memory: what a backward pass will need leaves the device as soon as the forward pass has made it.

Tensors wait in pinned memory, and every copy is put in line behind the work that it needs, so that nobody waits for it
but what uses it. Weights stay where they are: with a frozen base they are most of what a backward pass reads.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

LEAST = 2**20  # bytes: what is smaller is not worth a copy
Waiting = Callable[[], Tensor]  # brings a tensor back


def in_main_memory(tensor: Tensor) -> Waiting | Tensor:
    """``tensor`` copied to main memory, or itself where it is there already."""
    if tensor.device.type == "cpu":
        return tensor
    there = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    return partial(there.to, tensor.device, non_blocking=True)


@contextmanager
def offloaded(model: Any, send: Callable[[Tensor], Waiting | Tensor] | None = None) -> Iterator[None]:
    """Inside the block autograd saves large tensors that are no weights of ``model`` by ``send``.

    Args:
        model: the one that runs, or that it wraps; ZeRO-3 must not have parted its weights.
        send: where to, :func:`in_main_memory` by default.
    """
    send = send or in_main_memory
    weights = {parameter.untyped_storage() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Waiting | Tensor:
        keep = tensor.nbytes < LEAST or tensor.untyped_storage() in weights
        return tensor if keep else send(tensor)

    def unpack(saved: Waiting | Tensor) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield

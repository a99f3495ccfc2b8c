"""The head: log-probabilities of hidden states, the way back from them, and the KL, in float32 for every base.

Logits rounded to bfloat16 cannot show small differences: at logits of 33 the rounding alone is worth a KL of 7e-4. So
the products of 16-bit states and weights are added up and returned in float32, for the training loss and for every
evaluation alike.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# whether GEMMs of 16-bit matrices can return float32: on CUDA, from torch 2.8 on
WIDE_GEMM = torch.version.cuda is not None and "dtype" in torch.ops.aten.mm.overloads()
TILE_ELEMENTS = 2**24  # where they cannot, so much of the head is widened at a time: 64 MiB


def chunks(positions: int, vocabulary: int, elements: int) -> Iterator[slice]:
    """Slices of ``positions`` whose logits are at most ``elements``; one empty slice if there is no position."""
    size = max(1, elements // vocabulary)
    for at in range(0, max(positions, 1), size):
        yield slice(at, at + size)


def log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of hidden states.

    Args:
        hidden: (C, E), after the final norm.
        weight: (V, E), the head.
        bias: (V,) or None.
        temperature: the logits are divided by it.

    Returns:
        (C, V) in float32, from float32 products; in float64 for a float64 head.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    hidden = hidden.to(weight.dtype)
    with torch.autocast(hidden.device.type, enabled=False):  # it would round the products again
        if weight.dtype == wide:
            logits = F.linear(hidden, weight, bias)
        else:
            if WIDE_GEMM and hidden.is_cuda:
                logits = torch.mm(hidden, weight.T, out_dtype=wide)
            else:
                logits = torch.empty(len(hidden), len(weight), dtype=wide, device=hidden.device)
                hidden = hidden.to(wide)
                for tile in _tiles(weight):
                    logits[:, tile] = hidden @ weight[tile].to(wide).T
            if bias is not None:
                logits += bias
    return (logits.div_(temperature) if temperature != 1.0 else logits).log_softmax(-1)


def through_head(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient at the hidden states, (C, E), from that at the logits, (C, V); both in float32 (float64).

    A GEMM of bfloat16 matrices gets the gradient rounded, once, which moves the result by .2 % however small the KL is.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    with torch.autocast(gradient.device.type, enabled=False):
        if weight.dtype == wide:
            return gradient @ weight
        if WIDE_GEMM and gradient.is_cuda and weight.dtype == torch.bfloat16:  # float16 has not the range
            return torch.mm(gradient.to(weight.dtype), weight, out_dtype=wide)
        total = torch.zeros(len(gradient), weight.shape[1], dtype=wide, device=gradient.device)
        for tile in _tiles(weight):
            total.addmm_(gradient[:, tile], weight[tile].to(wide))
        return total


def kl(log_p: Tensor, p: Tensor, log_q: Tensor, out: Tensor | None = None) -> Tensor:
    """KL(p || q) over the last dimension, nats; ``out`` is overwritten, and may be ``log_p``."""
    return torch.sub(log_p, log_q, out=out).mul_(p).sum(-1)


@contextmanager
def gathered(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the block weights that ZeRO-3 or FSDP2 has spread over processes are whole in every one of them.

    FSDP2 puts others in their place: take them from their module, inside the block. Every process must come here.
    """
    modules = list(modules)
    parts: list[Any] = [p for module in modules for p in module.parameters() if hasattr(p, "ds_id")]
    units: list[Any] = [module for module in modules if hasattr(module, "unshard") and is_shared(module)]
    for unit in units:
        unit.unshard()
    try:
        if parts:
            from deepspeed import zero

            with zero.GatheredParameters(parts):
                yield
        else:
            yield
    finally:
        for unit in units:
            unit.reshard()


def is_shared(module: nn.Module) -> bool:
    """Whether processes hold a part each of some weight of ``module``."""
    return any(hasattr(parameter, "ds_id") or hasattr(parameter, "to_local") for parameter in module.parameters())


def _tiles(weight: Tensor) -> Iterator[slice]:
    """Slices of the vocabulary."""
    size = max(1, TILE_ELEMENTS // weight.shape[1])
    return (slice(at, at + size) for at in range(0, len(weight), size))

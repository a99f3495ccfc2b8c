"""The dtype of sums: float32 or wider for states, gates and products, whatever the model's own dtype is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# torch 2.9 has a new switch for products on CUDA, and complains where the old one is read when both were used
SWITCH: Any = torch.backends.cuda.matmul
NAME, EXACT = ("fp32_precision", ("ieee", "none")) if hasattr(SWITCH, "fp32_precision") else ("allow_tf32", (False,))


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 where the model itself is: what states and gates are in."""
    return torch.float64 if dtype == torch.float64 else torch.float32  # promote_types is dispatched like an operation


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``; a cast that changes nothing is dispatched like any operation."""
    return x if x.dtype == dtype else x.to(dtype)


@contextmanager
def exact_products(tf32: bool = False) -> Iterator[None]:
    """Inside the block float32 products on CUDA are exact, whatever torch's global switch says; not with ``tf32``.

    A compiler does not see this: what it compiles follows the switch.
    """
    if tf32 or torch.compiler.is_compiling() or (before := getattr(SWITCH, NAME)) in EXACT:
        yield
        return
    setattr(SWITCH, NAME, EXACT[0])
    try:
        yield
    finally:
        setattr(SWITCH, NAME, before)

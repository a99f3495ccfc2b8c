"""Quantised bases: which are taken, and their weights as numbers."""

from torch import Tensor

METHODS = ("torchao",)  # those that leave a layer's class as it is and quantise its weight


def numbers(weight: Tensor) -> Tensor:
    """A weight as a plain tensor; torchao's classes cannot be indexed number by number."""
    plain: Tensor = weight.dequantize() if hasattr(weight, "qdata") else weight
    return plain

"""A block of tokens joins KVM's rows: the step in which each block waits for the one before, so it should be short."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

ROUNDINGS = 64  # likenesses that differ by less, in units of the last place of 1, are equal


def merge(rows: Tensor, probe: Tensor, written: Tensor, head: Tensor) -> Tensor:
    """Each token is added to the row whose sum of keys has the likest direction; ties go to the first row.

    Args:
        rows: ``(B, H_kv, M, R)``; the first D numbers of each are its sum of keys.
        probe: what is compared, of unit length, ``(B, H_kv, C, D)``.
        written: what each token adds, ``(B, H_kv, C, R)``.
        head: number of each head in the batch ``(B, H_kv, 1)``.

    Returns:
        The new rows; their gradient goes to ``rows`` and ``written``.
    """
    with torch.no_grad():
        address = normalize(rows[..., : probe.shape[-1]], dim=-1)
        target = first_best(probe @ address.transpose(-1, -2))
    return add_to_rows(rows, target, written, head)


def add_to_rows(rows: Tensor, target: Tensor, written: Tensor, head: Tensor) -> Tensor:
    """``rows`` with what each token writes (B, H_kv, C, R) added to the row ``target`` (B, H_kv, C) of its head."""
    target = torch.add(target, head, alpha=rows.shape[2])  # the row in all heads' rows
    return rows.flatten(0, 2).index_add(0, target.flatten(), written.flatten(0, 2)).view_as(rows)


def first_best(near: Tensor) -> Tensor:
    """Index of the first of the largest numbers along the last dimension."""
    best = near.amax(-1, keepdim=True)
    return (near >= best - roundings(near)).view(torch.uint8).argmax(-1)


def roundings(like: Tensor) -> float:
    """The difference up to which likenesses in the dtype of ``like`` are equal."""
    return ROUNDINGS * torch.finfo(like.dtype).eps


def load_merge(device: str, gradient: bool) -> Callable[..., Any]:
    """:func:`merge` in two Triton kernels.

    Raises:
        ImportError: there is no Triton, or no GPU for it.
    """
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ImportError("Triton's kernels need a GPU")
    from .kvm_triton import merge, triton

    if triton is None:
        raise ImportError("KVM's kernels need triton: pip install triton")
    return merge

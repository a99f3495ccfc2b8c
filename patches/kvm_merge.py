"""A block of tokens joins KVM's rows: each block waits for the one before, so this step is a kernel of its own.

The PyTorch implementation is the reference; on a GPU two Triton kernels do the same.
"""

# mypy: disable-error-code="no-untyped-def"
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

try:
    import triton
    from triton import language as tl
except ImportError:  # an export imports every file that it carries
    triton, tl = None, SimpleNamespace(constexpr=None)

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
    """:func:`merge` by Triton.

    Raises:
        ImportError: there is no Triton, or no GPU for it.
    """
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ImportError("Triton's kernels need a GPU")
    if triton is None:
        raise ImportError("KVM's kernels need triton: pip install triton")
    return merge_by_triton


TOKENS, ROWS, COLUMNS = 16, 32, 64  # tiles; no product may be smaller than 16


def kernel(function: Any) -> Any:
    """A function that Triton compiles, where there is a Triton."""
    return function if triton is None else triton.jit(function)


def merge_by_triton(rows: Tensor, probe: Tensor, written: Tensor, head: Tensor) -> Tensor:
    """:func:`merge` in two kernels in place of ten of PyTorch's, in float32: find each token's row, add the tokens.

    Nothing is added atomically: each row sums its tokens in their order, so that a run repeats bit for bit. Products
    are of float32 numbers, not rounded to TF32.
    """
    rows, probe, written = rows.contiguous(), probe.contiguous(), written.contiguous()
    (B, H, M, R), (C, D) = rows.shape, probe.shape[2:]
    target = torch.empty(B, H, C, dtype=torch.long, device=rows.device)
    width = max(16, triton.next_power_of_2(D))
    grid = (B * H, triton.cdiv(C, TOKENS))
    with torch.cuda.device_of(rows):  # Triton launches where torch is, not where the tensors are
        find[grid](probe, rows.detach(), target, C, M, R, D, roundings(rows), width, TOKENS, ROWS)
        return _Added.apply(rows, written, target)


class _Added(torch.autograd.Function):
    """Tokens added to rows; a token's gradient is that of its row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, written: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(target)
        (B, H, M, R), C = rows.shape, written.shape[2]
        out = torch.empty_like(rows)
        grid = (B * H, triton.cdiv(M, ROWS), triton.cdiv(R, COLUMNS))
        add[grid](rows, written, target, out, C, M, R, TOKENS, ROWS, COLUMNS)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (target,) = ctx.saved_tensors
        return grad, grad.gather(2, target.unsqueeze(-1).expand(-1, -1, -1, grad.shape[-1])), None


@kernel
def likeness(x, rows, head, first, M, R, D, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Cosines of tokens ``x`` (tokens, WIDTH) of unit length and of the rows from ``first`` on, (tokens, ROWS)."""
    row, d = first + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    there = (row[:, None] < M) & (d[None, :] < D)
    sums = tl.load(rows + (head * M + row[:, None]) * R + d[None, :], mask=there, other=0.0)
    length = tl.maximum(tl.sqrt(tl.sum(sums * sums, 1)), 1e-12)  # as torch's normalize has it
    near = tl.dot(x, tl.trans(sums), input_precision="ieee") / length[None, :]
    return tl.where(row[None, :] < M, near, float("-inf"))


@kernel
def find(probe, rows, target, C, M, R, D, tie, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """The first of the likest rows for a few tokens of one head; a program for each such few."""
    head = tl.program_id(0)
    token, d = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    there = (token[:, None] < C) & (d[None, :] < D)
    x = tl.load(probe + (head * C + token[:, None]) * D + d[None, :], mask=there, other=0.0)
    best = tl.full([TOKENS], float("-inf"), tl.float32)
    for first in range(0, M, ROWS):
        best = tl.maximum(best, tl.max(likeness(x, rows, head, first, M, R, D, WIDTH, ROWS), 1))
    # once more: which one is the first is known only when the best is
    found = tl.full([TOKENS], 2147483647, tl.int32)
    for first in range(0, M, ROWS):
        near = likeness(x, rows, head, first, M, R, D, WIDTH, ROWS)
        row = first + tl.arange(0, ROWS)
        found = tl.minimum(found, tl.min(tl.where(near >= best[:, None] - tie, row[None, :], 2147483647), 1))
    tl.store(target + head * C + token, tl.minimum(found, M - 1).to(tl.int64), mask=token < C)


@kernel
def add(rows, written, target, out, C, M, R, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of the new rows of one head: the old ones, and each token that joins one of them, in the tokens' order."""
    head = tl.program_id(0)
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    at = (head * M + row[:, None]) * R + column[None, :]
    there = (row[:, None] < M) & (column[None, :] < R)
    total = tl.load(rows + at, mask=there, other=0.0)
    for first in range(0, C, TOKENS):
        token = first + tl.arange(0, TOKENS)
        joined = tl.load(target + head * C + token, mask=token < C, other=-1)
        shown = (token[:, None] < C) & (column[None, :] < R)
        x = tl.load(written + (head * C + token[:, None]) * R + column[None, :], mask=shown, other=0.0)
        one = (joined[None, :] == row[:, None]).to(tl.float32)
        total += tl.dot(one, x, input_precision="ieee")
    tl.store(out + at, total, mask=there)

"""Softmax attention on CUDA: a window by compiled FlexAttention, keys that all are seen by torch's own flash kernel."""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from .window import decode_attention, window_attention

BLOCK = 128  # queries, and keys, of one entry of FlexAttention's mask
NARROWEST, WIDEST = 16, 256  # heads that the kernels take


def load_window(device: str, gradient: bool) -> Callable[..., Any]:
    """Window attention by FlexAttention.

    Raises:
        ImportError: there is no GPU for it, or torch has none.
    """
    if device != "cuda":
        raise ImportError("FlexAttention needs a GPU")
    try:
        from torch.nn.attention.flex_attention import BlockMask, flex_attention  # noqa: F401
    except ImportError as error:
        raise ImportError(f"FlexAttention does not import ({error}): pip install -U torch") from error
    return flex_window


def load_decode(device: str, gradient: bool) -> Callable[..., Any]:
    """Attention to all keys by the flash kernel; raises as :func:`load_window`."""
    if device != "cuda" or (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8):
        raise ImportError("torch's flash kernel needs an NVIDIA GPU of the Ampere generation or later")
    return flash_decode


def flex_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    *,
    window: int,
    start: int,
    scale: float,
    dropout: float,
    lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """As ``window_attention`` of kernels.py; what FlexAttention does not take, PyTorch's own operations do."""
    if dropout or q.shape[-1] < NARROWEST:
        how = {"window": window, "start": start, "scale": scale, "dropout": dropout, "lse": lse}
        return window_attention(q, k, v, sink_k, sink_v, **how)  # type: ignore[arg-type]
    nothing = max(window - start, 0)  # places before token 0
    keys, values = (torch.cat([s, x[:, :, nothing:]], 2) for s, x in ((sink_k, k), (sink_v, v)))
    mask = make_block_mask(q.shape[2], keys.shape[2], sink_k.shape[2], window, start, str(q.device))
    out, sums = attend()(q, keys, values, block_mask=mask, scale=scale, enable_gqa=True)
    return out, sums if lse else None


def flash_decode(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float, lse: bool, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """As ``decode_attention`` of kernels.py, without a gradient; without the log-sum-exp torch chooses its kernel."""
    if dropout or not lse or q.shape[-1] % 8 or q.shape[-1] > WIDEST:
        return decode_attention(q, k, v, scale=scale, dropout=dropout, lse=lse, causal=causal)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return flash_forward(q, k, v, causal, scale)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output ``(B, H, n, D)`` and log-sum-exp ``(B, H, n)`` of ``(B, n, H, D)``; the last query is at the last key."""
    lengths = q.shape[1], k.shape[1]
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, *lengths, 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2), sums


@cache
def attend() -> Callable[..., Any]:
    """FlexAttention, compiled, with its log-sum-exp."""
    from torch.nn.attention import flex_attention as module

    compiled: Callable[..., Any] = torch.compile(module.flex_attention)
    if not hasattr(module, "AuxRequest"):  # before torch 2.9
        return partial(compiled, return_lse=True)

    def with_lse(*rows: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        out, aux = compiled(*rows, **how, return_aux=module.AuxRequest(lse=True))
        return out, aux.lse

    return with_lse


@lru_cache(maxsize=8)
def make_block_mask(n: int, length: int, sinks: int, window: int, start: int, device: str) -> Any:
    """Which blocks of the ``length`` keys, sinks first, the ``n`` queries see; the same for all layers.

    The keys behind the sinks end with the last query's own.
    """
    from torch.nn.attention.flex_attention import BlockMask

    behind = start + n - length  # index of a key behind the sinks, less its place

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        t, j = first + query, shift + key
        return torch.where(key < ending, key <= t - width, (j <= t) & (t - j < width))

    with torch.inference_mode(False):  # a later call may want a gradient
        # numbers that a mask captures would be compiled into its kernel, and each other start would be another kernel
        first, shift, ending, width = (torch.full((), x, device=device) for x in (start, behind, sinks, window))
        # the first and last query of each block of queries, the first and last key of each block of keys
        rows, columns = (torch.arange(0, size, BLOCK, device=device) for size in (n, length))
        early, late = start + rows[:, None], start + (rows + BLOCK).clamp(max=n)[:, None] - 1
        low, high = behind + columns, behind + (columns + BLOCK).clamp(max=length) - 1
        far = (columns < sinks) & (late >= window + columns)
        some = (columns + BLOCK > sinks) & (low <= late) & (high > early - window) | far
        full = (columns >= sinks) & (high <= early) & (low > late - window)
        (count, order), (full_count, full_order) = (
            (seen.sum(-1).int()[None, None], seen.int().argsort(dim=-1, descending=True, stable=True).int()[None, None])
            for seen in (some & ~full, full)
        )
        blocks = (count, order, full_count, full_order)
        return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(n, length))

"""Window attention by compiled FlexAttention, for CUDA in any dtype: one mask by blocks, gradients of both results."""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

BLOCK = 128


def needs_flex(function: Callable[..., Any]) -> Callable[[str, bool], Any]:
    """A loader of ``function``, with an ``ImportError`` where FlexAttention is missing or cannot run."""

    def load(device: str, gradient: bool) -> Any:
        if device != "cuda":
            raise ImportError("FlexAttention needs a GPU")
        try:
            from torch.nn.attention.flex_attention import BlockMask, flex_attention  # noqa: F401
        except ImportError as error:
            raise ImportError(f"FlexAttention does not import ({error}): pip install -U torch") from error
        return function

    return load


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
    lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """As ``window_attention`` of kernels.py, without dropout."""
    nothing = max(window - start, 0)  # places before token 0
    keys, values = (torch.cat([s, x[:, :, nothing:]], 2) for s, x in ((sink_k, k), (sink_v, v)))
    mask = make_block_mask(q.shape[2], keys.shape[2], sink_k.shape[2], window, start, str(q.device))
    out, sums = attend()(q, keys, values, block_mask=mask, scale=scale, enable_gqa=True)
    return out, sums if lse else None


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
        t, j = start + query, behind + key
        return torch.where(key < sinks, key <= t - window, (j <= t) & (t - j < window))

    with torch.inference_mode(False):  # a later call may want a gradient
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

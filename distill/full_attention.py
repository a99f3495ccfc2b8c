"""Full attention of a segment behind a cache, without a mask of all pairs: of 4,096 and 131,072 tokens, gigabytes.

Queries see all that came before their segment, and of the segment what is not after them. These are two calls that need
no mask as wide as the row, joined by their log-sum-exp; on a GPU torch's flash kernel takes both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from patches.config import keep_their_window, native_window
from patches.kernels import HALVES
from patches.merged_softmax import join, look

NAME = "retrofit_without_mask"


def attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None = None, **how: Any
) -> tuple[Tensor, None]:
    """As transformers' attention functions: ``q`` (B, H, n, D), the last n of ``k``, ``v`` (B, H_kv, m, D) are its own.

    Returns:
        ``(B, n, H, D)``, and no weights.
    """
    seen = k.shape[2] - q.shape[2]
    if not seen:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, scaling=scaling, **how)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    before = look(q, k[:, :, :seen], v[:, :, :seen], None, scale, 0.0)
    own = look(q, k[:, :, seen:], v[:, :, seen:], None, scale, 0.0, causal=True)
    return join(before, own).transpose(1, 2), None


AttentionInterface.register(NAME, attend)


@contextmanager
def without_mask(model: Any, padded: bool) -> Iterator[None]:
    """Inside the block the full attention of ``model`` makes no mask, where it can do without: no gradient is wanted.

    Args:
        padded: whether rows begin with padding, which only a mask can hide.
    """
    config = model.config
    before, on_cpu = config._attn_implementation, model.device.type == "cpu"
    slides = native_window(config) is not None or bool(keep_their_window(config))
    if before != "sdpa" or padded or slides or not (on_cpu or model.dtype in HALVES):
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before

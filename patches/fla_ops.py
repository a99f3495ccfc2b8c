"""flash-linear-attention behind the table of kernels: its Triton kernels for both recurrences, where they run.

Arguments and results are those of kernels.py; fla itself wants ``(B, T, H, D)``. Its ``chunk_delta_rule``, which
refuses float32, is not used: the gated rule without a decay is the same.
"""

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .scan import STEPWISE

# key and value sizes are filled up to a multiple: rows of whole 16 bytes, and even, as the 16-bit backward asks
TILE = 8
FORGOTTEN = -30.0  # log of a decay of 1e-13
INSTALL = "pip install 'retrofit-lm[fla]'"


def load_form(op: str, device: str, gradient: bool) -> Callable[..., Any]:
    """One of fla's ops: its form in chunks for many tokens, the other one for few.

    Raises:
        ImportError: it does not import, or would not run on this device.
    """
    refuse(device, gradient)
    try:
        module = import_module(f"fla.ops.{op}")
        forms = getattr(module, f"chunk_{op}"), getattr(module, f"fused_recurrent_{op}")
    except Exception as error:  # without triton, or with another one than it knows, anything
        raise ImportError(f"flash-linear-attention does not import ({error}): {INSTALL}") from error
    return partial(run_form, *forms, gradient)


def refuse(device: str, gradient: bool) -> None:
    """Raise ``ImportError`` where fla's kernels would fail or, worse, be wrong."""
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ImportError("flash-linear-attention needs a GPU")
    if device != "cuda" or not torch.cuda.is_available() or not gradient:
        return
    try:
        from triton import __version__ as triton
    except ImportError as error:
        raise ImportError("flash-linear-attention needs triton: pip install triton") from error
    version = tuple(int(part) for part in triton.split("+")[0].split(".")[:3] if part.isdigit())
    if torch.cuda.get_device_capability()[0] == 9 and (3, 4) <= version < (3, 7, 1):
        # fla #640, #826: the backward is miscompiled, and fla 0.6 refuses to run it
        raise ImportError(f"Triton {triton} miscompiles its backward on Hopper: pip install -U 'torch>=2.12.1'")


def run_form(
    chunks: Callable[..., Any],
    steps: Callable[..., Any],
    gradient: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    *,
    scale: float,
    normalise: bool = False,
) -> tuple[Tensor, Tensor]:
    """One of fla's ops: sizes filled up, everything once for each query head, as its kernels want it.

    They have no form for several queries that read one state, so that each gets a copy, of which one is kept.
    """
    states = max(x.shape[1] for x in (k, v, beta, log_decay) if x is not None)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    beta, log_decay = (None if gate is None else gate.mT for gate in (beta, log_decay))
    (B, T, H), K, V = q.shape[:3], q.shape[-1], v.shape[-1]
    if T == 0:
        empty = q.new_zeros(B, states, K, V, dtype=torch.float32)
        return q.new_zeros(B, H, T, V, dtype=torch.float32), empty if state is None else state
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    q, k, v = (_fill_tiles(_repeat_heads(x, H).to(dtype)) for x in (q, k, v))
    more = {} if beta is None else {"beta": _repeat_heads(beta, H), "use_qk_l2norm_in_kernel": normalise}
    if log_decay is None:
        g = q.new_zeros(B, T, H, dtype=torch.float32)
    else:
        # it sums them over a chunk in float32: what forgets all that float32 could keep must not drown the others
        g = _repeat_heads(log_decay, H).float().clamp_min(FORGOTTEN)
    if state is not None:
        state = pad(state.float(), (0, -V % TILE, 0, -K % TILE)).repeat_interleave(H // states, 1)
    run = steps if not gradient and T <= STEPWISE else chunks
    out, last = run(q=q, k=k, v=v, g=g, **more, scale=scale, initial_state=state, output_final_state=True)
    # a view would keep what was filled up and the other queries' copies alive
    return out[..., :V].float().transpose(1, 2), last[:, :: H // states, :K, :V].contiguous()


def _fill_tiles(x: Tensor) -> Tensor:
    extra = -x.shape[-1] % TILE
    return pad(x, (0, extra)) if extra else x


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """``x`` (B, T, H_kv, ...) once for each query head."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)

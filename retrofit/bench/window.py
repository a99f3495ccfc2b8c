"""`retrofit bench window`: blocked sinks + window attention beside the dense mask it replaces."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from patches.config import check_window
from patches.errors import RetrofitError
from patches.window import window_attention
from retrofit.bench.timing import TIME_AND_MEMORY, interleaved, mib, peak_extra_bytes, quotient, ratios, spread

COLUMNS = TIME_AND_MEMORY


@dataclass(frozen=True)
class Case:
    """One attention layer's work: T tokens, H query heads on H_kv key/value heads of D, window W and S sinks."""

    length: int = 16384
    window: int = 1024
    sinks: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    backward: bool = False

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)
        if self.length <= self.window + self.sinks:
            raise RetrofitError(
                f"length={self.length}: nothing leaves a window of {self.window} and {self.sinks} sinks"
            )
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise RetrofitError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")


def run(case: Case, repeats: int = 3) -> list[dict[str, Any]]:
    """Seconds and peak extra memory of both forms, and their ratios.

    The dense arm is given its mask ready made in the timed runs, since a model builds it once for all layers; in the
    measured memory the mask is included, since the model has to hold it.

    Returns:
        Rows ``dense mask`` and ``blocked`` with ``seconds`` (median; ``_low``, ``_high``) and ``extra_mib``, then the
        row ``dense / blocked`` with the ratios of both.
    """
    dense, blocked = prepare_dense(case), prepare_blocked(case)
    mask = dense_mask(case)
    _check_equal(dense(mask), blocked())
    seconds = interleaved({"dense mask": lambda: dense(mask), "blocked": blocked}, repeats)
    bytes_ = {
        "dense mask": peak_extra_bytes(_prepare_dense_with_mask, case),
        "blocked": peak_extra_bytes(prepare_blocked, case),
    }
    rows: list[dict[str, Any]] = [
        {"name": name, **spread("seconds", seconds[name]), "extra_mib": mib(bytes_[name])} for name in seconds
    ]
    ratio = spread("seconds", ratios(seconds["dense mask"], seconds["blocked"]))
    return [*rows, {"name": "dense / blocked", **ratio, "extra_mib": quotient(*bytes_.values())}]


def dense_mask(case: Case) -> Tensor:
    """(T, T), True where a query sees a key: the last W tokens and the first S."""
    t = torch.arange(case.length)[:, None]
    j = torch.arange(case.length)
    return (j <= t) & ((j > t - case.window) | (j < case.sinks))  # booleans only: t - j would take 8 T^2 bytes


def prepare_dense(case: Case) -> Callable[[Tensor], Tensor]:
    """Inputs, and the dense form on them: the mask in, (B, T, H, D) out."""
    q, k, v = _inputs(case)

    def dense(mask: Tensor) -> Tensor:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
        return _finish(out, q, k, v)

    return dense


def _prepare_dense_with_mask(case: Case) -> Callable[[], Tensor]:
    dense = prepare_dense(case)
    return lambda: dense(dense_mask(case))


def prepare_blocked(case: Case) -> Callable[[], Tensor]:
    """The same inputs, and the blocked form on them: (B, T, H, D) out."""
    q, k, v = _inputs(case)

    def blocked() -> Tensor:
        before = k.new_zeros(1, case.kv_heads, case.window, case.head_dim)  # there is nothing before slot 0
        out = window_attention(
            q,
            torch.cat([before, k], 2),
            torch.cat([before, v], 2),
            k[:, :, : case.sinks],
            v[:, :, : case.sinks],
            window=case.window,
            start=0,
            scale=case.head_dim**-0.5,
        )
        return _finish(out, q, k, v)

    return blocked


def _inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, case.length, case.head_dim) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator, requires_grad=case.backward) for shape in shapes)
    return q, k, v


def _finish(out: Tensor, *inputs: Tensor) -> Tensor:
    if out.requires_grad:
        torch.autograd.grad(out.sum(), inputs)
    return out.detach()


def _check_equal(dense: Tensor, blocked: Tensor) -> None:
    difference = (dense - blocked).abs().max().item()
    if not difference < 1e-4:
        raise RetrofitError(f"the two forms differ by {difference:.1e}: these timings would compare different things")

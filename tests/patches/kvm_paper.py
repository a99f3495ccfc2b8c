"""KVM as the paper has it (Key-Value Means, arXiv 2605.09877), by itself: for models that are trained with it.

A retrofit cannot use this form of the keys: its base rotates all channels and does not normalise keys; nor has it the
paper's sinks, which are rows that nothing joins. Rows, schedule and attention are those of the retrofit's memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm
from torch.nn.functional import pad as fill

from patches.cache import Stream
from patches.kvm import Rule, attend_rows, attend_window, lay_stream, no_rows
from patches.kvm_merge import add_to_rows, first_best
from patches.kvm_rows import Blocks, _rank
from patches.merged_softmax import Frame, join

LN_EPS = 1e-5


@dataclass
class LayerNormKeys:
    """The paper's form, for models trained with it: keys without their rotated part, layer-normalised, twice when read.

    Attributes:
        weight, bias: of LN_s ``(D,)``, shared by all heads.
        rotated: the first so many channels carry positions and are zeroed.
        barred: rows at the front that nothing joins.
    """

    weight: Tensor
    bias: Tensor
    rotated: int
    barred: int

    def written(self, k: Tensor, index: Tensor) -> Tensor:
        return self.address(fill(k[..., self.rotated :], (self.rotated, 0)))

    def probe(self, key: Tensor) -> Tensor:
        return key

    def address(self, sums: Tensor) -> Tensor:
        return layer_norm(sums, sums.shape[-1:], self.weight, self.bias, LN_EPS)

    def merge(self, rows: Tensor, probe: Tensor, written: Tensor, head: Tensor) -> Tensor:
        """In place of ``patches.kvm_merge.merge``."""
        near = self.compare(rows, probe)
        return add_to_rows(rows, first_best(self.bar(near)), written, head)

    def compare(self, rows: Tensor, probe: Tensor) -> Tensor:
        return probe @ self.address(rows[..., : probe.shape[-1]]).mT

    def bar(self, near: Tensor) -> Tensor:
        return near.masked_fill(torch.arange(near.shape[-1]) < self.barred, float("-inf"))

    def read(self, sums: Tensor, length: Tensor, index: Tensor, edge: Tensor) -> Tensor:
        return self.address(sums)

    def queries(self, q: Tensor, index: Tensor) -> Tensor:
        return q


def choose(rows: Tensor, blocks: Blocks, number: int, keys: LayerNormKeys, after: int) -> tuple[Tensor, Tensor]:
    """As ``patches.kvm_rows.choose``, in whose place it must stand; barred rows count only when tokens found others."""
    probe, M = blocks.probe[number], rows.shape[2]
    near = keys.compare(rows, probe)
    founds = _rank(near.amax(-1) if M else near.new_zeros(near.shape[:3])) < after - M
    near = keys.bar(near)
    founded = M + founds.cumsum(-1) - 1
    fresh = (probe @ keys.address(blocks.key[number]).mT).masked_fill(~founds.unsqueeze(2), float("-inf"))
    first = first_best(torch.cat([near, fresh], -1))
    joined = torch.where(first < M, first, founded.gather(-1, (first - M).clamp_min(0)))
    return torch.where(founds, founded, joined), founds


@dataclass
class Past:
    """What decoding needs of the tokens before: the last W keys, values and gates (zeros before the first), the rows.

    Attributes:
        k, v: ``(B, H_kv, W, D)``.
        gates: ``(B, H_kv, W)``.
        rows: ``(B, H_kv, M, 2 D + 4)``, see ``kvm_rows``.
        seen: tokens so far.
    """

    k: Tensor
    v: Tensor
    gates: Tensor
    rows: Tensor
    seen: int


def kvm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    keys: LayerNormKeys,
    rule: Rule,
    window_temperature: Tensor | None = None,
    past: Past | None = None,
) -> tuple[Tensor, Past]:
    """KVM attention over ``n`` more tokens, any number of them at a time.

    Args:
        q: queries ``(B, H, n, D)``.
        k, v: keys and values ``(B, H_kv, n, D)``.
        gates: merge gates ``1 + ELU(W_g x)``, ``(B, H_kv, n)``.
        keys: the paper's form of the keys.
        rule: chunk, window, budget, temperature of the rows.
        window_temperature: ``(H,)``, of the window; None is 1.
        past: what the call before returned.

    Returns:
        ``(B, H, n, D)``, and what the next call needs.
    """
    window, n = rule.schedule.window, k.shape[2]
    if window_temperature is not None:
        # a factor of the window's logits alone: of all logits, and taken back from those of the rows
        q = q * window_temperature[:, None, None]
        rule = Rule(**{**vars(rule), "temperature": rule.temperature / window_temperature})
    if past is None:
        k, v, gates = (fill(x, (0, 0) * (x.dim() - 3) + (window, 0)) for x in (k, v, gates))
        seen, rows = 0, no_rows(k)
    else:
        k, v, gates = (torch.cat(pair, 2) for pair in ((past.k, k), (past.v, v), (past.gates, gates)))
        seen, rows = past.seen, past.rows
    frame = Frame(seen, n, 0, rule.schedule.chunk)
    none = k[:, :, :0]
    laid = lay_stream(Stream(k, v, gates, none, none), frame, seen, window)
    q = frame.lay(q, seen)
    near = attend_window(q, laid, rule, frame)
    far, rows = attend_rows(q, laid, rows, keys, rule, frame)
    out = frame.collect(near[0] if far is None else join(near, far), None)
    return out, Past(k[:, :, n:], v[:, :, n:], gates[:, :, n:], rows, seen + n)

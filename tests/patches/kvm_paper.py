"""KVM as the paper has it (Key-Value Means, arXiv 2605.09877), by itself: for models that are trained with it.

A retrofit cannot use this form of the keys: its base rotates all channels and does not normalise keys. Rows, schedule
and attention are the ones that the retrofit's memory uses.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm
from torch.nn.functional import pad as fill

from patches.frames import Frame
from patches.kvm_blocks import Rule, attend_blocks, no_rows

LN_EPS = 1e-5


@dataclass
class LayerNormKeys:
    """The paper's form, for models trained with it: keys without their rotated part, layer-normalised, twice when read.

    Attributes:
        weight, bias: of LN_s ``(D,)``, shared by all heads.
        rotated: the first so many channels carry positions and are zeroed.
    """

    weight: Tensor
    bias: Tensor
    rotated: int
    cosine = False

    def written(self, k: Tensor, index: Tensor) -> Tensor:
        return self.address(fill(k[..., self.rotated :], (self.rotated, 0)))

    def probe(self, key: Tensor) -> Tensor:
        return key

    def address(self, sums: Tensor) -> Tensor:
        return layer_norm(sums, sums.shape[-1:], self.weight, self.bias, LN_EPS)

    def read(self, sums: Tensor, length: Tensor, index: Tensor, edge: Tensor) -> Tensor:
        return self.address(sums)

    def queries(self, q: Tensor, index: Tensor) -> Tensor | None:
        return None


@dataclass
class Past:
    """What decoding needs of the tokens before: the last W keys, values and gates (zeros before the first), the rows.

    Attributes:
        k, v: ``(B, H_kv, W, D)``.
        gates: ``(B, H_kv, W, 1)``.
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
        gates: merge gates ``1 + ELU(W_g x)``, ``(B, H_kv, n, 1)``.
        keys: the paper's form of the keys, or another one.
        rule: chunk, window, budget, sinks (``barred`` rows), temperature of the rows.
        window_temperature: ``(H,)``, of the window; None is 1.
        past: what the call before returned.

    Returns:
        ``(B, n, H, D)``, and what the next call needs.
    """
    window, n = rule.schedule.window, k.shape[2]
    if window_temperature is not None:
        # a factor of the window's logits alone: of all logits, and taken back from those of the rows
        q = q * window_temperature[:, None, None]
        rule = Rule(**{**vars(rule), "temperature": rule.temperature / window_temperature})
    if past is None:
        k, v, gates = (fill(x, (0, 0, window, 0)) for x in (k, v, gates))
        seen, rows = 0, no_rows(k)
    else:
        k, v, gates = (torch.cat(pair, 2) for pair in ((past.k, k), (past.v, v), (past.gates, gates)))
        seen, rows = past.seen, past.rows
    frame = Frame(seen, n, [0], 0, rule.schedule.chunk, k.device)
    k_laid, v_laid, gates_laid = (frame.lay(x, seen - window, -window) for x in (k, v, gates))
    none = k[:, :, :0]
    out, rows = attend_blocks(frame.lay(q, seen), k_laid, v_laid, gates_laid, none, none, rows, keys, rule, frame)
    return frame.collect(out, None), Past(k[:, :, n:], v[:, :, n:], gates[:, :, n:], rows, seen + n)

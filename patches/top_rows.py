"""Tokens that left the window and are kept as rows of their own: the R with the highest scores, each score given once.

A score never changes, so who is kept after every eviction follows from one sort: token ``j`` is there as long as fewer
than R tokens that have been evicted so far stand above it. No loop over tokens decides it, and the result is the same
however a text is fed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

EMPTY = float("-inf")  # the score of a place that holds no token


@dataclass
class Choice:
    """Who is there while ``n`` tokens arrive at R rows, for each row of the batch and key head.

    Attributes:
        alive: whether each of the R + n candidates is kept after each arrival ``(B, H_kv, n, R + n)``.
        kept: indices of the R candidates that stay after all, in order of arrival ``(B, H_kv, R)``.
    """

    alive: Tensor
    kept: Tensor


def choose(held: Tensor, new: Tensor) -> Choice:
    """Who stays when tokens with scores ``new`` (B, H_kv, n) come, one after the other, to rows with scores ``held``.

    Of tokens with equal scores the later one stays: the first layer of a model gives the same word the same score.

    Args:
        held: scores of the R rows in order of arrival ``(B, H_kv, R)``; empty rows, in front, have ``EMPTY``.

    With R = 2 rows that hold scores 5 and 1, a token with 3 takes the place of 1, and one with 2 is dropped at once:

    >>> choice = choose(torch.tensor([[[5.0, 1.0]]]), torch.tensor([[[3.0, 2.0]]]))
    >>> choice.alive[0, 0].int().tolist()
    [[1, 0, 1, 0], [1, 0, 1, 0]]
    >>> choice.kept[0, 0].tolist()
    [0, 2]
    """
    rows, n = held.shape[-1], new.shape[-1]
    scores = torch.cat([held, new], -1)
    device = scores.device
    # the later of two equals first: a stable sort of the reversed order
    order = scores.shape[-1] - 1 - scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(-1)
    above_of_held = (order < rows).cumsum(-1).gather(-1, rank) - (torch.arange(rows + n, device=device) < rows).long()
    stands_above = rank[..., rows:, None] < rank[..., None, :]  # (.., n, R + n): new token i above candidate j
    above = above_of_held.unsqueeze(-2) + stands_above.cumsum(-2)
    there = torch.arange(rows + n, device=device) < rows + torch.arange(1, n + 1, device=device)[:, None]
    alive = (above < rows) & there & (scores > EMPTY).unsqueeze(-2)
    if not rows:
        return Choice(alive, order[..., :0])
    last = alive[..., -1, :] if n else scores > EMPTY
    # empty places in front, then those that stay; both in order of arrival
    kept = last.to(torch.uint8).argsort(dim=-1, stable=True)[..., -rows:]
    return Choice(alive, kept)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """The candidates at ``index`` (B, H_kv, R) of ``x`` (B, H_kv, C, ...) -> ``(B, H_kv, R, ...)``."""
    at = index.view(*index.shape, *[1] * (x.dim() - 3)).expand(*index.shape, *x.shape[3:])
    return x.gather(2, at)

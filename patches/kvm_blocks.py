"""KVM's attention over many tokens at once: rows change once per chunk, one after the other; all else is batched."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad as fill

from .frames import Frame, blocks_attention
from .kvm_rows import Keys, Schedule, absorb, prepare, read_rows

GATHERED = 2**22  # keys gathered at a time, in elements: bounds the extra memory of the overlapping windows


@dataclass
class Rule:
    """What does not change from call to call.

    Attributes:
        schedule: how many rows there are when.
        temperature: ``(H,)``, factor of the logits of rows.
        scale: factor of all logits.
        barred: rows at the front that nothing joins (the paper's sinks; ours are not rows).
        gate_appends: whether the gate weakens appended tokens too.
        dropout: probability, as in the base's attention.
    """

    schedule: Schedule
    temperature: Tensor
    scale: float
    barred: int = 0
    gate_appends: bool = False
    dropout: float = 0.0

    def evicted(self, index: int) -> int:
        """Blocks that have left the window by the time the token at ``index`` attends."""
        return max(0, index // self.schedule.chunk + 1 - self.schedule.window // self.schedule.chunk)


def no_rows(k: Tensor) -> Tensor:
    """The rows before the first block, for keys ``k`` (B, H_kv, n, D)."""
    return k.new_zeros(*k.shape[:2], 0, 2 * k.shape[3] + 4, dtype=torch.promote_types(k.dtype, torch.float32))


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    rows: Tensor,
    keys: Keys,
    rule: Rule,
    frame: Frame,
) -> tuple[Tensor, Tensor]:
    """Attend chunk by chunk over sinks, rows and window, and write each block when it leaves the window.

    Args:
        q: queries of the frame's tokens ``(B, H, F, D)``.
        k, v: keys and values of the W tokens before the frame and of its own ``(B, H_kv, W + F, D)``.
        gates: write gates of the same tokens ``(B, H_kv, W + F, 1)``.
        sink_k, sink_v: ``(B, H_kv, S, D)``.
        rows: those before this call.
        frame: the tokens' places; its unit is the chunk.

    Returns:
        The heads ``(B, F, H, D)`` and the rows after the last new token.
    """
    chunk, window = rule.schedule.chunk, rule.schedule.window
    count = frame.size // chunk
    done = [[rule.evicted(start - 1) for start in frame.start]]
    for j in range(count):
        done.append([rule.evicted(min(b + j * chunk, last)) for b, last in zip(frame.base, frame.last, strict=True)])
    blocks = None
    if done[0] != done[-1]:
        # the block that leaves as chunk j arrives lies W before it
        block_index = frame.indices(-window, frame.size - window)
        blocks = prepare(k[:, :, : frame.size], v[:, :, : frame.size], gates[:, :, : frame.size], block_index, keys, chunk)

    moved = keys.queries(q, frame.indices(0, frame.size))
    q, moved = (None if x is None else x.unflatten(2, (count, chunk)).transpose(1, 2) for x in (q, moved))
    near_k, near_v = (x[:, :, chunk:].unfold(2, window, chunk).permute(0, 2, 1, 4, 3) for x in (k, v))

    pieces = []
    for span in _spans(frame, done, rule.schedule, k.shape[0] * q.shape[2] * k.shape[3], sink_k.shape[2]):
        states = []
        for j in span:
            if done[j] != done[j + 1]:
                assert blocks is not None
                before, after = ([rule.schedule.rows(n) for n in numbers] for numbers in (done[j], done[j + 1]))
                active = [x != y for x, y in zip(done[j], done[j + 1], strict=True)]
                rows = absorb(rows, blocks, j, keys, before, after, active, rule.barred, rule.gate_appends)
            states.append(rows)
        most = rows.shape[2]
        stacked = torch.stack([fill(state, (0, 0, 0, most - state.shape[2])) for state in states], 1)
        at = slice(span.start, span.stop)
        full = min(frame.base) + (span.start + 1) * chunk >= window
        begins = frame.column(frame.base) + torch.arange(span.start + 1, span.stop + 1, device=q.device) * chunk - window
        row_k, row_v = read_rows(stacked, keys, begins - 1)
        counts = [[rule.schedule.rows(n) for n in done[j + 1]] for j in span]
        pieces.append(
            _attend(
                q[:, at],
                None if moved is None else moved[:, at],
                (sink_k, row_k.to(k.dtype), near_k[:, at]),
                (sink_v, row_v.to(v.dtype), near_v[:, at]),
                _mask(counts, begins, sink_k.shape[2], most, full, window, chunk),
                rule,
            )
        )
    return torch.cat(pieces, 1), rows


def _spans(frame: Frame, done: list[list[int]], schedule: Schedule, width: int, sinks: int) -> Iterator[range]:
    """Chunks to attend together: alike in what they see, so that one mask does where it can, and not too many."""
    first, held, before = 0, 0, None
    for j in range(len(done) - 1):
        # the first chunks have no full window yet, those after them no rows
        full = min(frame.base) + (j + 1) * schedule.chunk >= schedule.window
        sort = full, min(done[j + 1]) > 0
        if j > first and (sort != before or held >= GATHERED):
            yield range(first, j)
            first, held = j, 0
        before = sort
        held += width * (sinks + schedule.window + schedule.rows(max(done[j + 1])))
    yield range(first, len(done) - 1)


def _mask(counts: list[list[int]], begins: Tensor, sinks: int, most: int, full: bool, window: int, chunk: int) -> Tensor:
    """Which keys a chunk's queries see: sinks, rows, and of the window what is not ahead of them.

    Args:
        counts: rows of each state: for each of ``n`` chunks, of each batch row or of all.
        begins: index of each window's first token ``(1 or B, n)``; negative ones are not there.
        sinks, most: columns of sinks and of rows.
        full: whether all windows are full.

    Returns:
        ``(1 or B, 1 or n, C, S + M + W)``.
    """
    device = begins.device
    causal = torch.ones(chunk, window, dtype=torch.bool, device=device).tril(window - chunk)
    sight = fill(causal, (sinks + most, 0), value=True)
    if full and all(count == most for chunk_counts in counts for count in chunk_counts):
        return sight[None, None]
    held = torch.tensor(counts, device=device).T.unsqueeze(-1)
    there = [
        torch.ones(*held.shape[:2], sinks, dtype=torch.bool, device=device),
        torch.arange(most, device=device) < held,
        torch.arange(window, device=device) >= -begins.unsqueeze(-1),
    ]
    return sight & torch.cat(there, -1).unsqueeze(2)


def _attend(
    q: Tensor,
    moved: Tensor | None,
    k: tuple[Tensor, Tensor, Tensor],
    v: tuple[Tensor, Tensor, Tensor],
    mask: Tensor,
    rule: Rule,
) -> Tensor:
    """One softmax over sinks ``(B, H_kv, S, D)``, rows ``(B, n, H_kv, M, D)`` and windows; ``q`` (B, n, H, C, D)."""
    chunks, heads = q.shape[1:3]
    kv_heads = k[1].shape[2]
    sink_k, sink_v = (x.unsqueeze(1).expand(-1, chunks, -1, -1, -1) for x in (k[0], v[0]))
    values = torch.cat([sink_v, v[1], v[2]], 3)
    # a temperature belongs to a query head, so the heads of a group cannot share keys
    exact = torch.cat([sink_k, k[2]], 3).repeat_interleave(heads // kv_heads, 2)
    warmed = k[1].repeat_interleave(heads // kv_heads, 2) * rule.temperature.to(k[1].dtype)[:, None, None]
    if moved is not None:  # twice the channels: the queries as they are meet tokens, the moved ones meet rows
        D = q.shape[-1]
        q, exact, warmed = torch.cat([q, moved], -1), fill(exact, (0, D)), fill(warmed, (D, 0))
    sinks = sink_k.shape[3]
    keys = torch.cat([exact[..., :sinks, :], warmed, exact[..., sinks:, :]], 3)
    return blocks_attention(q, keys, values, mask, rule.scale, rule.dropout)

"""KVM's attention over many tokens at once: rows change once per chunk, one after the other; all else is batched."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad as fill

from .frames import Frame, blocks_attention
from .kvm_rows import Keys, Schedule, absorb, prepare, read_rows

GATHERED = 2**22  # keys gathered at a time, in elements: bounds the extra memory of the overlapping windows
GATHERING = 32  # what gathering a key costs, in products of a query with a key


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
        index = frame.indices(-window, frame.size - window)
        k_out, v_out, gates_out = (x[:, :, : frame.size] for x in (k, v, gates))
        blocks = prepare(k_out, v_out, gates_out, index, keys, chunk, rule.gate_appends)
    moved = keys.queries(q, frame.indices(0, frame.size))
    together = _together(rule.schedule, rule.schedule.rows(max(done[-1])))
    pieces = []
    for span in _spans(frame, done, rule.schedule, k.shape[0] * q.shape[1] * k.shape[3], sink_k.shape[2], together):
        states = []
        for j in span:
            if done[j] != done[j + 1]:
                assert blocks is not None
                before, after = ([rule.schedule.rows(n) for n in numbers] for numbers in (done[j], done[j + 1]))
                active = [x != y for x, y in zip(done[j], done[j + 1], strict=True)]
                rows = absorb(rows, blocks, j, keys, before, after, active, rule.barred)
            states.append(rows)
        most, size = rows.shape[2], min(together, len(span)) * chunk
        states = [fill(x, (0, 0, 0, most - x.shape[2])) if x.shape[2] < most else x for x in states]
        begins = (
            torch.arange(span.start + 1, span.stop + 1, device=q.device) * chunk - window + frame.column(frame.base)
        )
        read = read_rows(torch.stack(states, 1), keys, begins - 1)
        queries = slice(span.start * chunk, span.stop * chunk)
        tokens = slice((span.start + 1) * chunk, span.stop * chunk + window)
        counts = [[rule.schedule.rows(n) for n in done[j + 1]] for j in span]
        full = min(frame.base) + (span.start + 1) * chunk >= window
        pieces.append(
            _attend(
                q[:, :, queries],
                None if moved is None else moved[:, :, queries],
                (sink_k, sink_v),
                read,
                (k[:, :, tokens], v[:, :, tokens]),
                _mask(counts, begins, sink_k.shape[2], most, full, window, chunk, size),
                size,
                rule,
            )
        )
    return torch.cat(pieces, 1), rows


def _together(schedule: Schedule, rows: int) -> int:
    """Chunks whose queries share a gathered window, though each then passes over the rows of the others.

    With g chunks a query meets ``W + g (M + C)`` keys and pays its share, one in ``g C``, of gathering them.
    """
    best = GATHERING * schedule.window / (schedule.chunk * (rows + schedule.chunk))
    return max(1, round(best**0.5))


def _spans(
    frame: Frame, done: list[list[int]], schedule: Schedule, width: int, sinks: int, together: int
) -> Iterator[range]:
    """Chunks to attend at once: alike in what they see, so that one mask does where it can, and not too many.

    A multiple of ``together`` each, or fewer than that.
    """
    chunks = len(done) - 1
    # the first chunks have no full window yet, those after them no rows
    sorts = [
        (min(frame.base) + (j + 1) * schedule.chunk >= schedule.window, min(done[j + 1]) > 0) for j in range(chunks)
    ]
    first = 0
    while first < chunks:
        alike = next((j for j in range(first, chunks) if sorts[j] != sorts[first]), chunks)
        held, last = 0, first
        while last < alike and (last == first or held < GATHERED):
            step = min(together, alike - last) if last == first or alike - last >= together else alike - last
            if step < together and last > first:
                break
            last += step
            held += width * (sinks + schedule.window + step * (schedule.chunk + schedule.rows(max(done[last]))))
        yield range(first, last)
        first = last


def _mask(
    counts: list[list[int]], begins: Tensor, sinks: int, most: int, full: bool, window: int, chunk: int, size: int
) -> Tensor:
    """Which keys queries see: sinks, the rows of their own chunk, and of its window what is not ahead of them.

    Args:
        counts: rows of each state: for each of ``n`` chunks, of each batch row or of all.
        begins: index of each chunk's window's first token ``(1 or B, n)``; negative ones are not there.
        sinks, most: columns of sinks and of one state's rows.
        full: whether all windows are full.
        size: queries that share their keys, some chunks' worth.

    Returns:
        ``(1 or B, 1 or n C / size, size, S + size / C * M + W + size - C)``.
    """
    device, together = begins.device, size // chunk
    query = torch.arange(size, device=device)[:, None]
    token = torch.arange(window + size - chunk, device=device)
    state = torch.arange(together, device=device).repeat_interleave(most)
    near = (token >= query // chunk * chunk) & (token <= query + window - chunk)
    sight = torch.cat([near.new_ones(size, sinks), state == query // chunk, near], 1)
    if full and all(count == most for chunk_counts in counts for count in chunk_counts):
        return sight[None, None]
    held = torch.arange(most, device=device) < torch.tensor(counts, device=device).T.unsqueeze(-1)
    begun = token >= -begins[:, ::together].unsqueeze(-1)
    held = held.unflatten(1, (-1, together)).flatten(2)
    there = torch.cat([begun.new_ones(*begun.shape[:2], sinks), held, begun], -1)
    return sight & there.unsqueeze(2)


def _attend(
    q: Tensor,
    moved: Tensor | None,
    sinks: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    near: tuple[Tensor, Tensor],
    mask: Tensor,
    size: int,
    rule: Rule,
) -> Tensor:
    """One softmax over sinks, rows and window for the queries of some chunks, ``size`` of them at a time.

    Args:
        q: ``(B, H, n C, D)``; ``moved``: as they meet the rows, if otherwise.
        sinks: keys and values ``(B, H_kv, S, D)``.
        rows: of each chunk ``(B, n, H_kv, M, D)``.
        near: of all windows of these chunks ``(B, H_kv, W + (n - 1) C, D)``.
        mask: see :func:`_mask`.

    Returns:
        ``(B, n C, H, D)``.
    """
    chunk, window = rule.schedule.chunk, rule.schedule.window
    heads, kv_heads = q.shape[1], near[0].shape[1]
    wide, count = window + size - chunk, q.shape[2] // size
    q = q.unflatten(2, (count, size)).transpose(1, 2)
    sink_k, sink_v = (x.unsqueeze(1).expand(-1, count, -1, -1, -1) for x in sinks)
    row_k, row_v = (x.unflatten(1, (count, -1)).transpose(2, 3).flatten(3, 4).to(near[0].dtype) for x in rows)
    near_k, near_v = (x.unfold(2, wide, size).permute(0, 2, 1, 4, 3) for x in near)
    # a temperature belongs to a query head, so the heads of a group cannot share keys
    if heads > kv_heads:
        sink_k, row_k, near_k = (x.repeat_interleave(heads // kv_heads, 2) for x in (sink_k, row_k, near_k))
    row_k = row_k * rule.temperature.to(row_k.dtype)[:, None, None]
    if moved is not None:  # twice the channels: the queries as they are meet tokens, the moved ones meet rows
        D = q.shape[-1]
        q = torch.cat([q, moved.unflatten(2, (count, size)).transpose(1, 2)], -1)
        row_k = fill(row_k, (D, 0))
        sink_k, near_k = fill(sink_k, (0, D)), fill(near_k, (0, D))
    keys, values = torch.cat([sink_k, row_k, near_k], 3), torch.cat([sink_v, row_v, near_v], 3)
    return blocks_attention(q, keys, values, mask, rule.scale, rule.dropout)

"""KVM's attention over many tokens at once: rows change once per chunk, one after the other; all else is batched."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad as fill

from .frames import Frame
from .kvm_budget import Schedule
from .kvm_rows import Keys, absorb, prepare, read_rows
from .merged_softmax import GATHERED, GPU_GATHERED, Part, Place, join, look, look_in_blocks


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
    near = _near(q, k, v, sink_k, sink_v, rule, frame)
    far, rows = _far(q, k, v, gates, rows, keys, rule, frame)
    return (near[0] if far is None else join(near, far)), rows


def _done(rule: Rule, frame: Frame) -> list[list[int]]:
    """Blocks written in each row, before and after the first token of each of the frame's chunks."""
    done, chunk = [[rule.evicted(start - 1) for start in frame.start]], rule.schedule.chunk
    for j in range(frame.size // chunk):
        done.append([rule.evicted(min(b + j * chunk, last)) for b, last in zip(frame.base, frame.last, strict=True)])
    return done


def _near(q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, rule: Rule, frame: Frame) -> Part:
    """What queries see of the sinks and of the window, which begins W tokens before the end of their chunk."""
    chunk, window, device = rule.schedule.chunk, rule.schedule.window, q.device
    # several chunks at a time on a CPU; elsewhere one, whose mask is one that kernels know
    size = min(frame.size, max(chunk, window // 4 // chunk * chunk)) if device.type == "cpu" else chunk
    query, sinks = torch.arange(size, device=device)[:, None], sink_k.shape[2]
    token = torch.arange(window + size - chunk, device=device)  # from W before the end of the block's first chunk
    seen = (token >= query // chunk * chunk) & (token <= query + window - chunk)
    sight = torch.cat([seen.new_ones(size, sinks), seen], 1)[None]

    def there(blocks: range) -> Tensor | None:
        before = chunk - window  # of a block's first token
        if min(frame.base) + blocks.start * size + before >= 0:
            return None
        first = frame.column(frame.base) + torch.arange(blocks.start, blocks.stop, device=device) * size + before
        begun = token >= -first.unsqueeze(-1)
        return torch.cat([begun.new_ones(*begun.shape[:2], sinks), begun], -1)

    places = Place(sink_k, sink_v, 0, sinks), Place(k[:, :, chunk:], v[:, :, chunk:], size, window + size - chunk)
    return look_in_blocks(q, size, places, sight, there, rule.scale, rule.dropout, causal=size == chunk)


def _far(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, rows: Tensor, keys: Keys, rule: Rule, frame: Frame
) -> tuple[Part | None, Tensor]:
    """What queries see of the rows (None: there are none), and the rows after the last new token."""
    chunk, window, counts = rule.schedule.chunk, rule.schedule.window, rule.schedule.rows
    done = frame.once(("done", window), lambda: _done(rule, frame))
    most = counts(max(done[-1]))
    if not most:
        return None, rows
    blocks = None
    if done[0] != done[-1]:
        # the block that leaves as chunk j arrives lies W before it
        index = frame.indices(-window, frame.size - window)
        k_out, v_out, gates_out = (x[:, :, : frame.size] for x in (k, v, gates))
        blocks = prepare(k_out, v_out, gates_out, index, keys, chunk, rule.gate_appends)
    moved = keys.queries(q, frame.indices(0, frame.size))
    q = (q if moved is None else moved) * rule.temperature.to(q.dtype)[:, None, None]
    at_once = GATHERED if k.device.type == "cpu" else GPU_GATHERED
    together = max(1, at_once // (k.shape[0] * k.shape[1] * k.shape[3] * most))
    parts = []
    for first in range(0, frame.size // chunk, together):
        span = range(first, min(first + together, frame.size // chunk))
        states = []
        for j in span:
            if done[j] != done[j + 1]:
                assert blocks is not None
                before, after = ([counts(n) for n in numbers] for numbers in (done[j], done[j + 1]))
                active = [x != y for x, y in zip(done[j], done[j + 1], strict=True)]
                rows = absorb(rows, blocks, j, keys, before, after, active, rule.barred)
            states.append(rows)
        most = max(rows.shape[2], 1)
        states = [fill(x, (0, 0, 0, most - x.shape[2])) if x.shape[2] < most else x for x in states]
        edge = frame.indices(span.start * chunk, span.stop * chunk)[:, ::chunk] + chunk - window - 1
        row_k, row_v = (x.flatten(0, 1).to(k.dtype) for x in read_rows(torch.stack(states, 1), keys, edge))
        held = [[counts(n) for n in done[j + 1]] for j in span]
        mask = None
        if any(count != most for each in held for count in each):
            number = frame.once(("held", first, rule.schedule), partial(torch.tensor, held, device=q.device))
            mask = torch.arange(most, device=q.device) < number.T.unsqueeze(-1)  # (1 or B, n, M)
            mask = mask.expand(len(q), -1, -1).flatten(0, 1).unsqueeze(1)
        queries = q[:, :, span.start * chunk : span.stop * chunk].unflatten(2, (-1, chunk)).transpose(1, 2)
        part = look(queries.flatten(0, 1), row_k, row_v, mask, rule.scale, rule.dropout)
        parts.append([x.unflatten(0, (-1, len(span))).flatten(1, 2) for x in part])
    out, lse = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    return (out, lse), rows

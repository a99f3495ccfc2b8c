"""KVM (Key-Value Means, arXiv 2605.09877) for a pretrained base: rows of merged keys and values beside the window.

The window loses a whole chunk at a time; each token of it either founds a row or joins the row whose key is likest.
Rows are read by the same softmax as the window. How the paper's form of the keys is replaced, so that a row of a single
token is that token's own key, is :class:`patches.kvm_rows.RotaryKeys`; nobody has published KVM on a pretrained model,
this is ours.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import elu
from torch.nn.functional import pad as fill
from transformers import initialization as init

from .cache import Stream, newest_at_places
from .errors import RetrofitError, one_of
from .kvm_rows import RotaryKeys, absorb, prepare, read_rows
from .memory import Joined, Kept, Memory, Step
from .merged_softmax import Frame, Part, join, look, look_in_blocks
from .modules import WideLinear
from .options import Options, above_zero, true_or_false, whole_number
from .precision import cast, wide
from .sequence import Pass, once_for_all_layers
from .window import Place, count_together, join_blocks

CHUNK = 256  # the paper's, and the most that is chosen unasked


@dataclass(frozen=True)
class KVMOptions(Options):
    """Options of ``kvm``.

    Attributes:
        chunk: tokens that leave the window together; divides it. None: half of the window, or the largest divisor
            below that is at most 256 and, under a fixed budget, at most ``rows``.
        budget: ``"fixed"``, ``"power_law"`` (``factor * e ** exponent`` rows after e tokens) or ``"saturating"``
            (``N e / (N + e)``, N being ``saturation``).
        rows: rows per key/value head under a fixed budget, the least under the others. None: as many as fill the bytes
            of an AHN state, ``H D^2`` elements, if fixed; otherwise no least number.
        factor, exponent, saturation: of the growing budgets.
        multiple: growing budgets are rounded down to a multiple of this.
        positions: where a row's key stands when it is read: ``"row"``, the mean position of its tokens; ``"edge"``,
            just before the window (for contexts beyond the base's trained length); ``"nope"``, at the query itself.
        gate_appends: whether the merge gate also weakens tokens that found rows, as one of the two public codes has it.
    """

    chunk: int | None = None
    budget: str = "fixed"
    rows: int | None = None
    factor: float = 16.0
    exponent: float = 0.5
    saturation: int = 1024
    multiple: int = 1
    positions: str = "row"
    gate_appends: bool = False

    def __post_init__(self) -> None:
        one_of("budget", self.budget, "fixed", "power_law", "saturating")
        one_of("positions", self.positions, "row", "edge", "nope")
        for name in ("chunk", "rows", "saturation", "multiple"):
            if getattr(self, name) is not None or name in ("saturation", "multiple"):
                whole_number(name, getattr(self, name))
        for name in ("factor", "exponent"):
            above_zero(name, getattr(self, name))
        if self.exponent > 1:
            raise RetrofitError(f"exponent={self.exponent}: rows cannot be more than tokens: choose 1 or less")
        true_or_false("gate_appends", self.gate_appends)


class Schedule:
    """How many rows there are once so many blocks of ``chunk`` tokens have left a window of ``window``.

    The first block founds a row per token. The block ``[b, b + C)`` that leaves when ``e = b + W`` tokens have been
    seen adds as many as the budget allows, ``b + C`` in all at most. With blocks of 2 and 3 rows:

    >>> schedule = Schedule(KVMOptions(), least=3, chunk=2, window=4)
    >>> [schedule.rows(blocks) for blocks in range(5)]
    [0, 2, 3, 3, 3]
    """

    def __init__(self, options: KVMOptions, least: int, chunk: int, window: int):
        self.options, self.least, self.chunk, self.window = options, least, chunk, window
        self._counts = [0, chunk]

    def rows(self, blocks: int) -> int:
        """Rows after ``blocks`` blocks; 0 or fewer blocks leave none."""
        counts = self._counts
        if len(counts) <= blocks:
            counts = [*counts]  # another thread may be counting, too
            while len(counts) <= blocks:
                left, now = (len(counts) - 1) * self.chunk, counts[-1]
                allowed = min(self.budget(left + self.window), left + self.chunk)
                counts.append(min(max(now, allowed), now + self.chunk))
            self._counts = counts
        return counts[max(blocks, 0)]

    def budget(self, tokens: int) -> int:
        """The rows that a head may hold after so many tokens."""
        chosen = self.options
        if chosen.budget == "fixed":
            return self.least
        if chosen.budget == "power_law":
            allowed = math.floor(chosen.factor * float(tokens) ** chosen.exponent)
        else:
            allowed = math.floor(chosen.saturation * tokens / (chosen.saturation + tokens))
        return max(self.least, allowed // chosen.multiple * chosen.multiple)


make_schedule = lru_cache(Schedule)  # what it has counted serves all layers and calls


@dataclass
class Rule:
    """What does not change from call to call; ``temperature`` (H,) is a factor of the rows' logits alone."""

    schedule: Schedule
    temperature: Tensor
    scale: float
    gate_appends: bool = False
    dropout: float = 0.0

    def evicted(self, index: int) -> int:
        """Blocks that have left the window by the time the token at ``index`` attends."""
        return max(0, index // self.schedule.chunk + 1 - self.schedule.window // self.schedule.chunk)


class KVM(Memory):
    """Rows of merged tokens, seen by the window's softmax; the exact sinks stand apart from them.

    Trained: a merge gate per key/value head, zero at first (every token then weighs 1 in a row's mean), and a
    temperature of the rows' logits per query head, 1 at first. The window has no temperature: below it the model stays
    its base.
    """

    kind = "kvm"
    needs_key_bias = True
    Options = KVMOptions

    def __init__(self, config: Any, window: int, sinks: int, options: Any):
        super().__init__(config, window, sinks, options)
        self.longest = config.max_position_embeddings
        self.merge_gate = WideLinear(self.hidden_size, self.kv_heads, bias=False)
        self.temperature = nn.Parameter(torch.empty(self.heads))

    def reset_parameters(self) -> None:
        init.zeros_(self.merge_gate.weight)
        init.ones_(self.temperature)

    def check_window(self, window: int, sinks: int) -> None:
        chunk = self.options.chunk
        if chunk is None:
            return
        if window % chunk:
            raise RetrofitError(
                f"window={window} is not a multiple of chunk={chunk}: choose a window of whole chunks, or no chunk"
            )
        if self.options.budget == "fixed" and chunk > self.rows:
            raise RetrofitError(
                f"chunk={chunk} is more than rows={self.rows}, and the first chunk founds a row per token: choose more "
                "rows or a smaller chunk"
            )

    @property
    def rows(self) -> int:
        """Rows per head: the fixed budget, or the least of a growing one."""
        if self.options.rows is not None:
            return self.options.rows
        if self.options.budget != "fixed":
            return 1
        return max(1, self.heads * self.head_dim**2 // (self.kv_heads * self._row_elements))

    @property
    def chunk(self) -> int:
        """Tokens that leave the window together."""
        if self.options.chunk is not None:
            return self.options.chunk
        most = max(1, min(self.window // 2, CHUNK, self.rows if self.options.budget == "fixed" else CHUNK))
        return next(size for size in range(most, 0, -1) if self.window % size == 0)

    @property
    def schedule(self) -> Schedule:
        return make_schedule(self.options, self.rows, self.chunk, self.window)

    @property
    def _row_elements(self) -> int:
        return 2 * self.head_dim + 4

    @property
    def state_grows(self) -> bool:
        return self.options.budget != "fixed"

    def state_tensors(self, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Kept]:
        """A long sequence is, under a growing budget, the longest input the base is made for."""
        rows = self.rows
        if tokens is not None:
            rows = self.schedule.rows((tokens - self.sinks - 1) // self.chunk + 1 - self.window // self.chunk)
        elif self.state_grows:
            rows = self.schedule.rows(max(1, (self.longest - self.sinks - self.window) // self.chunk))
        return {"rows": Kept((self.kv_heads, rows, self._row_elements), wide(dtype))}

    def seen_beyond(self, t: Tensor) -> Tensor:
        index = t - self.sinks  # blocks are counted from behind the sinks
        begin = (index // self.chunk + 1) * self.chunk - self.window
        blocks = [self.schedule.rows(n) for n in range(max(1, (len(t) - self.sinks - 1) // self.chunk + 2))]
        left = (begin // self.chunk).clamp(0, len(blocks) - 1)
        return self.sinks + index - begin.clamp_min(0) + 1 + torch.tensor(blocks)[left]

    def state_flops(self, evicted: int) -> int:
        # every evicted token is compared with all rows: to be appended, then to be merged
        rows = self.schedule.rows(max(0, evicted // self.chunk))
        return 2 * 2 * rows * self.kv_heads * self.head_dim * evicted

    def write_gates(self, x: Tensor) -> Tensor:
        """``1 + ELU(W_g x)`` of each key/value head, ``(B, n, H_kv)``, float32 or wider."""
        return 1 + elu(self.merge_gate(x))

    def attend(self, step: Step) -> Joined:
        layer, now, dtype = step.layer, step.now, wide(step.k.dtype)
        rule = Rule(self.schedule, self.temperature, step.scale, self.options.gate_appends, step.dropout)
        bias = None if step.key_bias is None else cast(step.key_bias, dtype).view(self.kv_heads, 1, -1)
        keys = RotaryKeys(now, now.origin() + self.sinks, bias, self.options.positions)
        if now.decoding:
            return self._decode_token(step, keys, rule), None
        frame = Frame(now.seen, now.new, self.sinks, self.chunk)
        stream = layer.stream(now, step.k, step.v, step.gates)
        laid = lay_stream(stream, frame, now.seen, self.window)
        rows = layer.state.get("rows", no_rows(step.k))
        q = frame.lay(step.q, now.seen)
        near = attend_window(q, laid, rule, frame)
        far, layer.state["rows"] = attend_rows(q, laid, rows, keys, rule, frame)
        of_sinks = frame.sink_attention(step.q, stream.sink_k, stream.sink_v, step.scale, step.dropout)
        layer.commit(stream, now)
        return frame.collect(near[0] if far is None else join(near, far), of_sinks), None

    def _decode_token(self, step: Step, keys: RotaryKeys, rule: Rule) -> Tensor:
        """One token: if it begins a chunk, the oldest chunk becomes rows first; then it attends. ``(B, H, 1, D)``."""
        layer, now, chunk, window = step.layer, step.now, self.chunk, self.window
        index = now.seen - self.sinks
        rows, left = layer.state["rows"], rule.evicted(index)
        if rule.evicted(index - 1) != left:
            ring = (torch.arange(chunk, device=step.q.device) + index) % window  # the chunk W tokens ago
            k, v = (x[:, :, self.sinks + ring] for x in (layer.keys, layer.values))
            indices = torch.arange(index - window, index - window + chunk, device=step.q.device)
            blocks = prepare(k, v, layer.gates[:, :, ring], indices, keys, chunk, rule.gate_appends)
            rows = layer.state["rows"] = absorb(rows, blocks, 0, keys, rule.schedule.rows(left))
        layer.replace(now, step.k, step.v, step.gates)

        near, at, edge = locate_token(now, window, self.sinks, chunk)
        parts = [look(step.q, layer.keys, layer.values, near, step.scale, step.dropout)]
        if rows.shape[2]:
            q = keys.queries(step.q, at) * cast(rule.temperature, step.q.dtype).view(-1, 1, 1)
            row_k, row_v = (cast(x[:, 0], step.k.dtype) for x in read_rows(rows.unsqueeze(1), keys, edge))
            parts.append(look(q, row_k, row_v, None, step.scale, step.dropout))
        return join(*parts)


@once_for_all_layers
def locate_token(now: Pass, window: int, sinks: int, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """For one token: which of sinks and ring it sees ``(1, 1, S + W)``, its index ``(1,)`` and that of the last token
    before its window ``(1,)``."""
    index = now.seen - sinks
    begin = max(0, (index // chunk + 1) * chunk - window)
    seen = newest_at_places(index + 1, window, now.device) >= begin
    near = torch.cat([seen.new_ones(sinks), seen])[None, None]
    at, edge = (torch.full((1,), number, device=now.device) for number in (index, begin - 1))
    return near, at, edge


def no_rows(k: Tensor) -> Tensor:
    """The rows before the first block, for keys ``k`` (B, H_kv, n, D)."""
    return k.new_zeros(*k.shape[:2], 0, 2 * k.shape[3] + 4, dtype=wide(k.dtype))


def lay_stream(stream: Stream, frame: Frame, seen: int, window: int) -> Stream:
    """The frame's tokens and the W before them, of a stream that begins W tokens before the new ones."""
    assert stream.gates is not None
    k, v, gates = (frame.lay(x, seen - window, -window) for x in (stream.k, stream.v, stream.gates))
    return replace(stream, k=k, v=v, gates=gates)


def attend_window(q: Tensor, laid: Stream, rule: Rule, frame: Frame) -> Part:
    """What queries see of the sinks and of the window, which begins W tokens before the end of their chunk."""
    chunk, window, device = rule.schedule.chunk, rule.schedule.window, q.device
    # several chunks at a time on a CPU; elsewhere one, whose mask is one that kernels know
    size = min(frame.size, max(chunk, window // 4 // chunk * chunk)) if device.type == "cpu" else chunk
    query, sinks = torch.arange(size, device=device)[:, None], laid.sink_k.shape[2]
    token = torch.arange(window + size - chunk, device=device)  # from W before the end of the block's first chunk
    seen = (token >= query // chunk * chunk) & (token <= query + window - chunk)
    sight = torch.cat([seen.new_ones(size, sinks), seen], 1)[None]

    def there(blocks: range) -> Tensor | None:
        before = frame.base + chunk - window  # index of a block's first token, less its own offset
        if before + blocks.start * size >= 0:
            return None
        first = torch.arange(blocks.start, blocks.stop, device=device) * size + before
        begun = token >= -first[:, None]
        return torch.cat([begun.new_ones(len(begun), sinks), begun], -1)[None]

    near_k, near_v = laid.k[:, :, chunk:], laid.v[:, :, chunk:]
    places = Place(laid.sink_k, laid.sink_v, 0, sinks), Place(near_k, near_v, size, window + size - chunk)
    return look_in_blocks(q, size, places, sight, there, rule.scale, rule.dropout, causal=size == chunk)


def attend_rows(
    q: Tensor, laid: Stream, rows: Tensor, keys: RotaryKeys, rule: Rule, frame: Frame
) -> tuple[Part | None, Tensor]:
    """What queries see of the rows (None: there are none), and the rows after the last new token.

    A block joins the rows when it leaves the window, as the next chunk begins. Arguments: queries of the frame's F
    tokens ``(B, H, F, D)``, what :func:`lay_stream` gave, and the rows before this call.
    """
    chunk, window, counts = rule.schedule.chunk, rule.schedule.window, rule.schedule.rows
    chunks = frame.size // chunk
    # blocks written before the first new token, and once each of the frame's chunks has begun
    done = [rule.evicted(frame.start - 1)]
    done += [rule.evicted(min(frame.base + j * chunk, frame.last)) for j in range(chunks)]
    most = counts(done[-1])
    if not most:
        return None, rows
    first_index = torch.arange(frame.base, frame.base + frame.size, device=q.device)
    blocks = None
    if done[0] != done[-1]:
        # the block that leaves as chunk j arrives lies W before it
        assert laid.gates is not None
        k, v, gates = (x[:, :, : frame.size] for x in (laid.k, laid.v, laid.gates))
        blocks = prepare(k, v, gates, first_index - window, keys, chunk, rule.gate_appends)
    q = keys.queries(q, first_index) * rule.temperature.to(q.dtype)[:, None, None]
    together = count_together(laid.k, most)
    parts = []
    for first in range(0, chunks, together):
        span = range(first, min(first + together, chunks))
        states = []
        for j in span:
            if done[j] != done[j + 1]:
                assert blocks is not None
                rows = absorb(rows, blocks, j, keys, counts(done[j + 1]))
            states.append(rows)
        most = max(rows.shape[2], 1)
        states = [fill(x, (0, 0, 0, most - x.shape[2])) if x.shape[2] < most else x for x in states]
        edge = torch.arange(span.start, span.stop, device=q.device) * chunk + (frame.base + chunk - window - 1)
        row_k, row_v = (x.flatten(0, 1).to(laid.k.dtype) for x in read_rows(torch.stack(states, 1), keys, edge))
        held, mask = [counts(done[j + 1]) for j in span], None
        if any(count != most for count in held):
            mask = torch.arange(most, device=q.device) < torch.tensor(held, device=q.device)[:, None]  # (n, M)
            mask = mask.expand(len(q), -1, -1).flatten(0, 1).unsqueeze(1)
        queries = q[:, :, span.start * chunk : span.stop * chunk].unflatten(2, (-1, chunk)).transpose(1, 2)
        part = look(queries.flatten(0, 1), row_k, row_v, mask, rule.scale, rule.dropout)
        parts.append([join_blocks(x, len(span)) for x in part])
    out, lse = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    return (out, lse), rows

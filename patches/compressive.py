"""Compressive memory (Compressive Transformer, arXiv 1911.05507): evicted tokens are pooled, some to a row, in a queue.

As the AHN paper compares with it: no parameters, the rows are seen by the window's softmax. Every token is in exactly
one place: sinks, window, tail (evicted, but its group of ``ratio`` is not complete: still exact), row, or forgotten.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad as fill

from .cache import MemoryCacheLayer, Stream, plain_stream
from .errors import one_of
from .frames import Frame, blocks_attention, joined_attention, sink_attention, take
from .linear import wide
from .memory import Joined, Kept, Memory
from .options import Options, whole_number
from .rotary import Turn, rotate, unrotate
from .step import Step

GATHERED = 2**22  # keys gathered at a time, in elements: bounds the extra memory of the overlapping windows


@dataclass(frozen=True)
class CompressiveOptions(Options):
    """Options of ``compressive``.

    Attributes:
        ratio: consecutive tokens that become one row.
        pool: ``"average"`` or ``"max"``, channel by channel, of keys (rotated as they are) and of values.
        rows: rows kept, the oldest is forgotten first. None: as many as make rows and tail together as large as an
            AHN state, ``H D^2`` elements.
    """

    ratio: int = 4
    pool: str = "average"
    rows: int | None = None

    def __post_init__(self) -> None:
        one_of("pool", self.pool, "average", "max")
        whole_number("ratio", self.ratio)
        if self.rows is not None:
            whole_number("rows", self.rows)


class Compressive(Memory):
    """A queue of pooled rows behind the window.

    With G groups complete when the token at index ``t`` (padding and sinks not counted) attends, G being
    ``(t - W + 1) // ratio``, it sees the last ``rows`` of those groups and every token from ``ratio * G`` on as it is.

    The state is one buffer of keys and one of values: ``rows`` places for the queue, group g at ``g % rows``, and
    ``ratio - 1`` for the tail, slot s at ``s % (ratio - 1)``.
    """

    kind = "compressive"
    trainable = False
    Options = CompressiveOptions

    @property
    def rows(self) -> int:
        """Places in the queue."""
        if self.options.rows is not None:
            return self.options.rows
        return max(1, self.heads * self.head_dim // (2 * self.kv_heads) - self.tail)

    @property
    def tail(self) -> int:
        """Evicted tokens that may be waiting for their group to complete."""
        return self.options.ratio - 1

    def state_tensors(self, dtype: torch.dtype, tokens: int | None = None) -> dict[str, Kept]:
        kept = Kept((self.kv_heads, self.rows + self.tail, self.head_dim), dtype)  # the cache's own, not wider
        return {"keys": kept, "values": kept}

    def seen_beyond(self, t: Tensor) -> Tensor:
        index = t - self.sinks
        groups = ((index - self.window + 1) // self.options.ratio).clamp_min(0)
        return self.sinks + index - self.options.ratio * groups + 1 + groups.clamp_max(self.rows)

    def complete(self, index: int) -> int:
        """Groups that have left the window whole by the time the token at ``index`` attends."""
        return max(0, (index - self.window + 1) // self.options.ratio)

    def pooled(self, tokens: Tensor, turn: Turn | None) -> Tensor:
        """Groups ``(B, H_kv, g * ratio, D)`` -> rows ``(B, H_kv, g, D)``; ``turn``: see :meth:`_turn`, for keys."""
        ratio = self.options.ratio
        if self.options.pool == "average":
            return tokens.unflatten(2, (-1, ratio)).mean(3)
        if turn is None:
            return tokens.unflatten(2, (-1, ratio)).amax(3)
        tokens = unrotate(tokens.to(turn[0].dtype), *turn).to(tokens.dtype)
        return rotate(tokens.unflatten(2, (-1, ratio)).amax(3).to(turn[0].dtype), *turn).to(tokens.dtype)

    def _turn(self, step: Step) -> Turn | None:
        """Tables that turn position 0 to that of each row's first token, ``(B, 1, D)``, where padding has moved it.

        The largest channel of rotated keys is not the same at other positions: a padded row is pooled at its own.
        """
        if step.now.pad is None:
            return None
        cos, sin = step.now.turn_of_starts()
        return cos.to(wide(step.k.dtype)), sin.to(wide(step.k.dtype))

    def attend(self, step: Step) -> Joined:
        layer, n = step.layer, step.now.new
        frame = step.now.frame(self.sinks, self.options.ratio)
        if layer is not None and self._one_more(step, layer, frame):
            return self._decode(step, layer, frame), None
        stream, queue = self._stream(step)
        before = [self.complete(start - 1) for start in frame.start]
        rows = [
            _Rows(self, frame, queued, tokens, turn, step.now.seen, before)
            for queued, tokens, turn in zip(queue, (stream.k, stream.v), (self._turn(step), None), strict=True)
        ]
        out = self._blocks(step, frame, stream, rows)
        of_sinks = sink_attention(frame, step.q, stream.sink_k, stream.sink_v, step.scale, step.dropout)
        if layer is not None:
            after = frame.column([self.complete(last) for last in frame.last])
            for name, held in zip(("keys", "values"), rows, strict=True):
                layer.state[name] = held.keep(after)
            k, v = stream.k[:, :, self.tail :], stream.v[:, :, self.tail :]
            layer.commit(Stream(k, v, None, stream.sink_k, stream.sink_v), n)
        return frame.collect(out, of_sinks), None

    def _stream(self, step: Step) -> tuple[Stream, tuple[Tensor, Tensor]]:
        """The tail, the W slots before this call and its new tokens; the queue's keys and values."""
        layer = step.layer
        if layer is not None and layer.evicting:
            stream = layer.stream(step.k, step.v, None, step.now.pad)
            waiting = step.now.slots(step.now.seen - self.window - self.tail, self.tail)
            places = self.rows + waiting % max(self.tail, 1)
            k, v = (layer.state[name][:, :, places] for name in ("keys", "values"))
            k, v = torch.cat([k, stream.k], 2), torch.cat([v, stream.v], 2)
            queue = layer.state["keys"][:, :, : self.rows], layer.state["values"][:, :, : self.rows]
            return Stream(k, v, None, stream.sink_k, stream.sink_v), queue
        k, v = step.k, step.v
        if layer is not None and step.now.seen:
            k, v = torch.cat([layer.keys, k], 2), torch.cat([layer.values, v], 2)
        wide = self.window + self.tail
        empty = k.new_zeros(*k.shape[:2], self.rows, k.shape[3])
        return plain_stream(k, v, None, step.now.pad, seen=step.now.seen, window=wide, sinks=self.sinks), (empty, empty)

    def _blocks(self, step: Step, frame: Frame, stream: Stream, rows: "list[_Rows]") -> Tensor:
        """Attend over sinks, rows and exact tokens, block by block: ``(B, F, H, D)``."""
        ratio, reach = self.options.ratio, self._reach
        query, sinks = frame.lay(step.q, step.now.seen), (stream.sink_k, stream.sink_v)
        pieces = []
        for first, count, size in self._spans(frame, step.k.shape[0] * step.k.shape[1] * step.k.shape[3]):
            span = range(first, first + count * size, size)
            oldest, groups = self._sight(size)
            seen = []
            for held, sink in zip(rows, sinks, strict=True):
                near = held.tokens[:, :, first : span.stop + reach].unfold(2, reach + size, size)
                far = held.groups(first // ratio + oldest, (count - 1) * (size // ratio) + groups)
                blocks = (x.permute(0, 2, 1, 4, 3) for x in (far.unfold(2, groups, size // ratio), near))
                seen.append(torch.cat([sink.unsqueeze(1).expand(-1, count, -1, -1, -1), *blocks], 3))
            folded = query[:, :, first : span.stop].unflatten(2, (count, size)).transpose(1, 2)
            mask = self._mask(frame, span, sinks[0].shape[2])
            pieces.append(blocks_attention(folded, seen[0], seen[1], mask, step.scale, step.dropout))
        return torch.cat(pieces, 1)

    def _sight(self, size: int) -> tuple[int, int]:
        """The oldest row that ``size`` queries may see, counted from the group they begin with, and how many."""
        oldest = (1 - self.window) // self.options.ratio - self.rows
        return oldest, (size - self.window) // self.options.ratio - oldest

    def _mask(self, frame: Frame, span: range, sinks: int) -> Tensor:
        """Which keys the queries of the blocks at ``span`` see: ``(1 or B, 1 or N, size, S + rows + tokens)``."""
        size, ratio = span.step, self.options.ratio
        oldest, groups = self._sight(size)
        query = torch.arange(size, device=frame.device)[:, None]
        token = torch.arange(-self._reach, size, device=frame.device)
        group = torch.arange(oldest, oldest + groups, device=frame.device)
        done = (query - self.window + 1).div(ratio, rounding_mode="floor")
        far, near = (group < done) & (group >= done - self.rows), (token <= query) & (token >= done * ratio)
        mask = torch.cat([near.new_ones(size, sinks), far, near], 1)[None, None]
        if min(frame.base) + span.start >= self._regular:
            return mask
        begin = frame.column(frame.base) + torch.arange(span.start, span.stop, size, device=frame.device)
        begin = begin.unsqueeze(-1)  # (1 or B, N, 1)
        there = torch.cat([group >= -begin // ratio, token >= -begin], -1)  # nothing lies before the first token
        return mask & fill(there, (sinks, 0), value=True).unsqueeze(2)

    @property
    def _reach(self) -> int:
        """Exact tokens before a block that may be seen, in whole groups."""
        return -(-(self.window + self.tail) // self.options.ratio) * self.options.ratio

    @property
    def _regular(self) -> int:
        """Index from which a block has all the rows and tokens that its mask looks for."""
        return max(self._reach, -self._sight(1)[0] * self.options.ratio)

    def _spans(self, frame: Frame, width: int) -> Iterator[tuple[int, int, int]]:
        """First token, number and size of blocks to attend at once: those that one mask serves, and the others."""
        ratio = self.options.ratio
        size = min(frame.size, max(ratio, max(64, self.window // 4) // ratio * ratio))
        group = max(1, GATHERED // (width * (self.sinks + self.rows + self._reach + size)))
        irregular = self._regular - min(frame.base)
        first = 0
        while first + size <= frame.size:
            count = min(group, (frame.size - first) // size)
            if first < irregular:
                count = min(count, -(-(irregular - first) // size))
            yield first, count, size
            first += count * size
        if first < frame.size:
            yield first, 1, frame.size - first

    def _one_more(self, step: Step, layer: MemoryCacheLayer, frame: Frame) -> bool:
        """Whether this is plain decoding: one token, all sinks there, no graph for in-place writes to break."""
        return layer.evicting and step.now.new == 1 and min(frame.start) >= 0 and not step.differentiates(layer)

    def _decode(self, step: Step, layer: MemoryCacheLayer, frame: Frame) -> Tensor:
        """One token: the one it evicts goes to the tail, or completes a group. ``(B, 1, H, D)``."""
        ratio, device = self.options.ratio, step.q.device
        old = [self.complete(index - 1) for index in frame.start]
        new = [self.complete(index) for index in frame.start]
        k, v, _ = layer.push(step.k, step.v, None)
        slot = step.now.seen - self.window  # the evicted one
        waiting = torch.arange(slot - self.tail, slot, device=device) % max(self.tail, 1) + self.rows
        changed = [row for row, (x, y) in enumerate(zip(old, new, strict=True)) if x != y]
        for name, token, turn in (("keys", k, self._turn(step)), ("values", v, None)):
            state = layer.state[name]
            if changed:
                row = self.pooled(torch.cat([state[:, :, waiting], token], 2), turn)[:, :, 0]
                if len(new) == 1:
                    state[:, :, (new[0] - 1) % self.rows] = row
                else:
                    state[changed, :, [(new[b] - 1) % self.rows for b in changed]] = row[changed]
            if self.tail:
                state[:, :, self.rows + slot % self.tail] = token[:, :, 0]

        complete = frame.column(new)
        queue = torch.arange(self.rows, device=device) < complete
        place = torch.arange(self.tail, device=device)
        index = slot - (slot - place) % max(self.tail, 1) - frame.column(frame.skip)
        far = torch.cat([queue, (index >= complete * ratio) & (index >= 0)], 1)
        ring = step.now.seen - (step.now.seen - torch.arange(self.window, device=device)) % self.window
        near = ring >= frame.column(frame.skip)
        near = torch.cat([near.new_ones(len(near), self.sinks), near], 1)
        parts = [(step.q, layer.keys, layer.values, near), (step.q, layer.state["keys"], layer.state["values"], far)]
        return joined_attention(parts, step.scale, step.dropout)


class _Rows:
    """The keys (or the values) of a call: exact tokens and all rows, those in the queue and those that come to be."""

    def __init__(
        self,
        memory: Compressive,
        frame: Frame,
        queue: Tensor,
        tokens: Tensor,
        turn: Turn | None,
        seen: int,
        before: list[int],
    ):
        """Args: the queue ``(B, H_kv, rows, D)``, the stream from the tail on, groups complete before this call."""
        self.memory, self.frame, self.seen = memory, frame, seen
        self.stream, self.before = tokens, frame.column(before)
        self.tokens = frame.lay(tokens, seen - memory.window - memory.tail, -memory._reach)
        self.all = torch.cat([queue, memory.pooled(self.tokens, turn)], 2)

    def groups(self, first: int, count: int) -> Tensor:
        """Rows ``first .. first + count - 1``, counted from the frame's first group on, ``(B, H_kv, count, D)``."""
        group = torch.arange(first, first + count, device=self.frame.device)
        return self._find(group + self.frame.column(self.frame.base) // self.memory.options.ratio)

    def _find(self, group: Tensor) -> Tensor:
        """Rows by their group ``(1 or B, m)``."""
        memory, ratio = self.memory, self.memory.options.ratio
        fresh = group - (self.frame.column(self.frame.base) - memory._reach) // ratio + memory.rows
        return take(self.all, torch.where(group < self.before, group % memory.rows, fresh))

    def keep(self, after: Tensor) -> Tensor:
        """The buffer to be cached, ``after`` (1 or B, 1) groups being complete."""
        memory, n = self.memory, self.frame.n
        place = torch.arange(memory.rows, device=after.device)
        queue = self._find(after - 1 - (after - 1 - place) % memory.rows)
        slot = self.seen + n - memory.window  # of the first token in the window
        # slot s of the tail lies at s % tail
        place = torch.arange(memory.tail, device=after.device)
        index = n + (place - slot) % max(memory.tail, 1)
        return torch.cat([queue, self.stream[:, :, index]], 2)

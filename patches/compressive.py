"""Compressive memory (Compressive Transformer, arXiv 1911.05507): evicted tokens are pooled, some to a row, in a queue.

As the AHN paper compares with it: no parameters, the rows are seen by the window's softmax. Every token is in exactly
one place: sinks, window, tail (evicted, but its group of ``ratio`` is not complete: still exact), row, or forgotten.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad as fill

from .errors import one_of
from .frames import Frame, take
from .memory import Joined, Kept
from .merged_softmax import Part, Place, join, look, look_in_blocks
from .options import Options, whole_number
from .precision import wide
from .rotary import Turn, rotate, unrotate
from .step import Evicted, Step
from .window_only import WindowOnly


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


class Compressive(WindowOnly):
    """A queue of pooled rows behind the window.

    With G groups complete when the token at index ``t`` (padding and sinks not counted) attends, G being
    ``(t - W + 1) // ratio``, it sees the last ``rows`` of those groups and every token from ``ratio * G`` on as it is.

    The state is one buffer of keys and one of values: ``rows`` places for the queue, group g at ``g % rows``, and
    ``ratio - 1`` for the tail, slot s at ``s % (ratio - 1)``.
    """

    kind = "compressive"
    trainable = False
    size = "rows"
    writes_back = compiles = False
    joins_window = True
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

    def recall(self, step: Step, local: Tensor, gone: Evicted, k: Tensor, v: Tensor, gates: Tensor | None) -> Joined:
        assert step.lse is not None
        frame = step.now.frame(self.sinks, self.options.ratio, gone.start, gone.count)  # of the evicted tokens
        if step.layer is not None and step.layer.state and self.decodes(step, step.layer):
            return join((local, step.lse), self._look_at_state(step, step.layer.state, gone, k, v, frame)), None
        held = {} if step.layer is None else step.layer.state
        keys = self._line_up(held.get("keys"), k, self._turn(step), gone, frame)
        values = self._line_up(held.get("values"), v, None, gone, frame)
        if step.layer is not None:
            step.layer.state = {"keys": self._keep(keys, gone, frame), "values": self._keep(values, gone, frame)}
        out, lse = self._far(frame.lay(step.q[:, :, gone.first :], gone.start), keys, values, frame, step)
        out, lse = frame.collect(out, None), frame.collect(lse.unsqueeze(-1), None).squeeze(-1)
        if gone.written is not None:
            lse = lse.masked_fill(~gone.written.unsqueeze(-1), float("-inf"))
        seen = join((local[:, gone.first :], step.lse[:, gone.first :]), (out, lse))
        return (torch.cat([local[:, : gone.first], seen], 1) if gone.first else seen), None

    def _look_at_state(
        self, step: Step, state: dict[str, Tensor], gone: Evicted, k: Tensor, v: Tensor, frame: Frame
    ) -> Part:
        """What one token's query sees of the state, once the token that it evicts is in there."""
        ratio = self.options.ratio
        complete = [(last + 1) // ratio for last in frame.last]
        whole = [row for row, last in enumerate(frame.last) if (last + 1) % ratio == 0]  # whose group completes
        for name, token, turn in (("keys", k, self._turn(step)), ("values", v, None)):
            held = state[name]
            if whole:
                pooled = self.pooled(torch.cat([held[:, :, self.rows :], token], 2), turn)[:, :, 0]
                if len(complete) == 1:
                    held[:, :, (complete[0] - 1) % self.rows] = pooled
                else:
                    held[whole, :, [(complete[row] - 1) % self.rows for row in whole]] = pooled[whole]
            if self.tail:
                held[:, :, self.rows + gone.start % self.tail] = token[:, :, 0]
        there = frame.once(("there", self.rows), lambda: self._there(gone.start, complete, frame))
        return look(step.q, state["keys"], state["values"], there, step.scale, step.dropout)

    def _there(self, start: int, complete: list[int], frame: Frame) -> Tensor:
        """Which rows and waiting tokens there are, the token at slot ``start`` among them ``(1 or B, 1, m)``."""
        tail, device = torch.arange(self.tail, device=frame.device), frame.device
        index = start - (start - tail) % max(self.tail, 1) - frame.column(frame.skip)
        waits = (index >= frame.column(complete) * self.options.ratio) & (index >= 0)
        return torch.cat([torch.arange(self.rows, device=device) < frame.column(complete), waits], 1).unsqueeze(1)

    def _line_up(self, held: Tensor | None, x: Tensor, turn: Turn | None, gone: Evicted, frame: Frame) -> "Line":
        if held is None:
            held = x.new_zeros(*x.shape[:2], self.rows + self.tail, x.shape[3])
        place = torch.arange(gone.start - self.tail, gone.start, device=x.device) % max(self.tail, 1)
        waiting = torch.cat([held[:, :, self.rows + place], x], 2)
        tokens = frame.lay(waiting, gone.start - self.tail)
        oldest = frame.column([base // self.options.ratio - self.rows for base in frame.base])
        queue = take(held, (oldest + torch.arange(self.rows, device=x.device)) % self.rows)
        return Line(waiting, tokens, torch.cat([queue, self.pooled(tokens, turn)], 2))

    def _keep(self, line: "Line", gone: Evicted, frame: Frame) -> Tensor:
        """The state after this call."""
        ratio, device = self.options.ratio, frame.device
        newest = frame.column([(last + 1) // ratio - 1 for last in frame.last])  # group
        oldest = frame.column([base // ratio - self.rows for base in frame.base])
        group = newest - (newest - torch.arange(self.rows, device=device)) % self.rows
        index = gone.count + (torch.arange(self.tail, device=device) - gone.start - gone.count) % max(self.tail, 1)
        return torch.cat([take(line.rows, group - oldest), line.waiting[:, :, index]], 2)

    def _far(self, q: Tensor, keys: "Line", values: "Line", frame: Frame, step: Step) -> Part:
        """What the frame's queries see of rows and of tokens whose group is not complete."""
        ratio = self.options.ratio
        size = min(frame.size, max(64, self.rows // 2) // ratio * ratio or ratio)

        def there(blocks: range) -> Tensor | None:
            first = frame.column(frame.base) + torch.arange(blocks.start, blocks.stop, device=frame.device) * size
            if min(frame.base) + blocks.start * size >= self.rows * ratio:
                return None
            group = first.unsqueeze(-1) // ratio + torch.arange(-self.rows, size // ratio, device=frame.device)
            return fill(group >= 0, (0, size), value=True)

        rows = Place(keys.rows, values.rows, size // ratio, self.rows + size // ratio)
        tokens = Place(keys.tokens, values.tokens, size, size)
        return look_in_blocks(q, size, (rows, tokens), self._sight(size, frame.device), there, step.scale, step.dropout)

    def _sight(self, size: int, device: torch.device) -> Tensor:
        """Which rows and tokens the ``size`` queries of a block see, if they are there ``(1, size, keys)``.

        Rows count from R before the block's first group, tokens from its first one, which each query has just evicted.
        With ratio 2 and 1 row, the four queries of a block see

        >>> from types import SimpleNamespace as of
        >>> of_two = of(options=of(ratio=2), rows=1)
        >>> Compressive._sight(of_two, 4, torch.device("cpu"))[0].int().tolist()  # 3 rows, 4 tokens
        [[1, 0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0]]
        """
        ratio, token = self.options.ratio, torch.arange(size, device=device)
        group = torch.arange(self.rows + size // ratio, device=device)
        done = (token[:, None] + 1) // ratio
        far = (group >= done) & (group < done + self.rows)
        near = (token <= token[:, None]) & (token >= done * ratio)
        return torch.cat([far, near], 1)[None]


@dataclass
class Line:
    """The keys (or the values) of evicted tokens.

    Attributes:
        waiting: the tail and this call's, by slot ``(B, H_kv, tail + count, D)``.
        tokens: the same as the frame has them ``(B, H_kv, F, D)``.
        rows: the queue, oldest first, and the groups of the frame ``(B, H_kv, R + F / ratio, D)``.
    """

    waiting: Tensor
    tokens: Tensor
    rows: Tensor

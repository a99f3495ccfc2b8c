"""Compressive memory (Compressive Transformer, arXiv 1911.05507): evicted tokens are pooled, some to a row, in a queue.

As the AHN paper compares with it: no parameters, the rows are seen by the window's softmax. Every token is in exactly
one place: sinks, window, tail (evicted, but its group of ``ratio`` is not complete: still exact), row, or forgotten.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad as fill

from .cache import newest_at_places
from .errors import one_of
from .memory import Evicted, Joined, Kept, Step, WindowMemory
from .merged_softmax import Frame, Part, join, look, look_in_blocks
from .options import Options, whole_number
from .precision import wide
from .rotary import Turn, rotate, unrotate
from .window import Place


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


class Compressive(WindowMemory):
    """A queue of pooled rows behind the window.

    With G groups complete when the token at index ``t`` (sinks not counted) attends, G being
    ``(t - W + 1) // ratio``, it sees the last ``rows`` of those groups and every token from ``ratio * G`` on as it is.

    The state is one buffer of keys and one of values: ``rows`` places for the queue, group g at ``g % rows``, and
    ``ratio - 1`` for the tail, token t at ``t % (ratio - 1)``.
    """

    kind = "compressive"
    trainable = False
    size = "rows"
    writes_back = decodes_ragged = compiles = False
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
        """Groups ``(B, H_kv, g * ratio, D)`` -> rows ``(B, H_kv, g, D)``; keys with :meth:`_find_turn`."""
        ratio = self.options.ratio
        if self.options.pool == "average":
            return tokens.unflatten(2, (-1, ratio)).mean(3)
        if turn is None:
            return tokens.unflatten(2, (-1, ratio)).amax(3)
        tokens = unrotate(tokens.to(turn[0].dtype), *turn).to(tokens.dtype)
        return rotate(tokens.unflatten(2, (-1, ratio)).amax(3).to(turn[0].dtype), *turn).to(tokens.dtype)

    def _find_turn(self, step: Step) -> Turn | None:
        """Tables that turn position 0 to that of each text's first token ``(1, 1, D)``, if that is another one.

        The largest channel of rotated keys is not the same at other positions: a text is pooled as it is by itself.
        """
        if step.now.starts.origins == (0,):
            return None
        cos, sin = step.now.turn(step.now.origin()[:, None])
        return cos.to(wide(step.k.dtype)), sin.to(wide(step.k.dtype))

    def recall(self, step: Step, near: Tensor, lse: Tensor | None, gone: Evicted) -> Joined:
        assert lse is not None
        first, state = gone.first, step.layer.state
        frame = Frame(step.now.seen + gone.start, gone.count, self.sinks, self.options.ratio)  # of the evicted tokens
        if step.now.decoding:
            return join((near, lse), self._decode_token(step, state, gone, frame)), None
        keys = self._line_up(state.get("keys"), gone.k, self._find_turn(step), frame)
        values = self._line_up(state.get("values"), gone.v, None, frame)
        if step.layer.keeps:
            step.layer.state = {"keys": self._keep_state(keys, frame), "values": self._keep_state(values, frame)}
        q = frame.lay(step.q[:, :, first:], step.now.seen + gone.start)
        out, far = self._attend_blocks(q, keys, values, frame, step)
        far_part = frame.collect(out, None), frame.collect(far.unsqueeze(-1), None).squeeze(-1)
        seen = join((near[:, :, first:], lse[:, :, first:]), far_part)
        return (torch.cat([near[:, :, :first], seen], 2) if first else seen), None

    def _decode_token(self, step: Step, state: dict[str, Tensor], gone: Evicted, frame: Frame) -> Part:
        """What one token's query sees of the state, once the token that it evicts is in there."""
        complete = (frame.last + 1) // self.options.ratio
        for name, token, turn in (("keys", gone.k, self._find_turn(step)), ("values", gone.v, None)):
            held = state[name]
            if (frame.last + 1) % self.options.ratio == 0:
                pooled = self.pooled(torch.cat([held[:, :, self.rows :], token], 2), turn)[:, :, 0]
                held[:, :, (complete - 1) % self.rows] = pooled
            if self.tail:
                held[:, :, self.rows + frame.start % self.tail] = token[:, :, 0]
        rows = torch.arange(self.rows, device=step.q.device) < complete
        waiting = newest_at_places(frame.last + 1, self.tail, step.q.device) >= complete * self.options.ratio
        return look(
            step.q, state["keys"], state["values"], torch.cat([rows, waiting])[None, None], step.scale, step.dropout
        )

    def _line_up(self, held: Tensor | None, x: Tensor, turn: Turn | None, frame: Frame) -> "Line":
        """The tail and the queue of the state in their order, and the evicted tokens ``x`` behind them."""
        if held is None:
            held = x.new_zeros(*x.shape[:2], self.rows + self.tail, x.shape[3])
        place = torch.arange(frame.start - self.tail, frame.start, device=x.device) % max(self.tail, 1)
        waiting = torch.cat([held[:, :, self.rows + place], x], 2)
        tokens = frame.lay(waiting, frame.sinks + frame.start - self.tail)
        oldest = frame.base // self.options.ratio - self.rows  # group
        queue = held[:, :, (oldest + torch.arange(self.rows, device=x.device)) % self.rows]
        return Line(waiting, tokens, torch.cat([queue, self.pooled(tokens, turn)], 2))

    def _keep_state(self, line: "Line", frame: Frame) -> Tensor:
        """The state after this call."""
        ratio, device = self.options.ratio, line.rows.device
        oldest = frame.base // ratio - self.rows
        group = newest_at_places((frame.last + 1) // ratio, self.rows, device) - oldest
        token = newest_at_places(frame.last + 1, self.tail, device) - frame.start + self.tail
        return torch.cat([line.rows[:, :, group], line.waiting[:, :, token]], 2)

    def _attend_blocks(self, q: Tensor, keys: "Line", values: "Line", frame: Frame, step: Step) -> Part:
        """What the frame's queries see of rows and of tokens whose group is not complete."""
        ratio, device = self.options.ratio, q.device
        size = min(frame.size, max(64, self.rows // 2) // ratio * ratio or ratio)

        def there(blocks: range) -> Tensor | None:
            first = frame.base + torch.arange(blocks.start, blocks.stop, device=device) * size
            if frame.base + blocks.start * size >= self.rows * ratio:
                return None
            group = first[:, None] // ratio + torch.arange(-self.rows, size // ratio, device=device)
            return fill(group >= 0, (0, size), value=True)[None]

        rows = Place(keys.rows, values.rows, size // ratio, self.rows + size // ratio)
        tokens = Place(keys.tokens, values.tokens, size, size)
        return look_in_blocks(q, size, (rows, tokens), self._make_sight(size, device), there, step.scale, step.dropout)

    def _make_sight(self, size: int, device: torch.device) -> Tensor:
        """Which rows and tokens the ``size`` queries of a block see, if they are there ``(1, size, keys)``.

        Rows count from R before the block's first group, tokens from its first one, which each query has just evicted.
        With ratio 2 and 1 row, the four queries of a block see

        >>> from types import SimpleNamespace as of
        >>> of_two = of(options=of(ratio=2), rows=1)
        >>> Compressive._make_sight(of_two, 4, torch.device("cpu"))[0].int().tolist()  # 3 rows, 4 tokens
        [[1, 0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0]]
        """
        ratio, token = self.options.ratio, torch.arange(size, device=device)
        group = torch.arange(self.rows + size // ratio, device=device)
        done = (token[:, None] + 1) // ratio
        far = (group >= done) & (group < done + self.rows)
        near = (token <= token[:, None]) & (token >= done * ratio)
        return torch.cat([far, near], 1)[None]


class Line(NamedTuple):
    """The keys (or the values) of evicted tokens."""

    waiting: Tensor  # the tail and this call's (B, H_kv, tail + count, D)
    tokens: Tensor  # the same as the frame has them (B, H_kv, F, D)
    rows: Tensor  # the queue, oldest first, and the groups of the frame (B, H_kv, R + F / ratio, D)

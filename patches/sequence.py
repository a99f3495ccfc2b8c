"""The texts of a batch: where each begins, how long it is, and what a forward pass over them shares among its layers.

A batch arrives as transformers gives it: slots counted from 0, padding in front. Inside, every text begins at *index*
0: slot ``t`` of a row with ``pad`` slots of padding is its token with index ``t - pad``. Memories know indices alone.
Where texts of different padding meet in one call, each is attended to by itself (:attr:`Pass.texts`); in decoding,
where every text has one token, they stay together and ``index`` has an entry for each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .errors import RetrofitError
from .precision import cast
from .rotary import Rotary, Turn, after, back, for_heads, square_length, turned

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Starts:
    """Where texts start: ``pads`` and ``origins`` have one entry where all rows are alike, else one for each row.

    >>> Starts(pads=(3, 0)).select([1, 1])  # rows 1 and 1 of a batch whose row 0 is padded
    Starts(pads=(0,), origins=(0,), ended=False)

    Attributes:
        pads: slots of padding in front of each row; a single 0 if no row has any.
        origins: rotary position of each text's first token.
        ended: whether padding follows a row, which can then not be continued.
    """

    pads: tuple[int, ...] = (0,)
    origins: tuple[int, ...] = (0,)
    ended: bool = False

    @property
    def padded(self) -> bool:
        return any(self.pads)

    @property
    def alike(self) -> bool:
        """Whether nothing need be told apart: no row has padding, and all stand at the same positions."""
        return not self.padded and self.rows == 1

    @property
    def rows(self) -> int:
        """How many rows are told apart."""
        return max(len(self.pads), len(self.origins))

    def select(self, rows: list[int]) -> "Starts":
        """The starts of a batch of these rows."""
        if self.rows == 1:
            return self
        pads, origins = self.expand()
        return make_starts([pads[row] for row in rows], [origins[row] for row in rows], self.ended)

    def expand(self) -> tuple[list[int], list[int]]:
        """``pads`` and ``origins`` with an entry for each row that is told apart."""
        pads, origins = (list(x) * (self.rows // len(x)) for x in (self.pads, self.origins))
        return pads, origins


UNPADDED = Starts()


def make_starts(pads: list[int], origins: list[int], ended: bool) -> Starts:
    alike = len(set(origins)) == 1
    return Starts(tuple(pads) if any(pads) else (0,), tuple(origins[:1] if alike else origins), ended)


def find_starts(before: Starts, seen: int, new: int, mask: Tensor | None, positions: Tensor | None) -> Starts:
    """Where texts start once ``new`` tokens have come after ``seen`` others.

    Padding on the right of the new tokens is harmless (nothing later reads it) and is allowed. Once all texts have
    begun, a token that comes alone is taken to be real and to stand at the next position, because looking would make
    the host wait for a GPU; on a CPU it is looked at.

    Args:
        before: the starts of what is in the cache.
        mask: ``(B, seen + new)``, 1 or True for real tokens, or None.
        positions: rotary positions of the new tokens ``(1 or B, new)``; None: their slots.

    Raises:
        RetrofitError: the mask has another length, other padding than before, or a hole that a memory would have filled
            with padding; or positions do not go up by one from token to token.
    """
    total = seen + new
    if mask is not None and mask.shape[1] != total:
        raise RetrofitError(
            f"attention_mask is {mask.shape[1]} long, but {seen} cached and {new} new tokens need {total}: cover all "
            "tokens seen so far"
        )
    if mask is None and (before.padded or before.ended):
        raise RetrofitError("this cache holds padded rows: pass their attention_mask, with all tokens seen so far")
    given = mask if mask is not None else positions
    if given is None:
        if before.origins != (0,):
            raise RetrofitError("this cache was filled with position_ids of its own: pass those of the new tokens, too")
        return before
    begun = seen and max(before.pads) < seen and not before.ended
    if begun and new == 1 and (given.device.type != "cpu" or _goes_on(before, seen, mask, positions)):
        return before
    with torch.no_grad():
        return _read_starts(before, seen, new, mask, positions, given.device)


def _goes_on(before: Starts, seen: int, mask: Tensor | None, positions: Tensor | None) -> bool:
    """Whether a single token continues every text; cheap on a CPU, and :func:`_read_starts` says what is wrong."""
    pads, origins = before.expand()
    next_positions = [seen + origin - pad for pad, origin in zip(pads, origins, strict=True)]
    if positions is None and set(next_positions) != {seen}:
        return False
    if mask is not None and before.padded:
        mask = mask.bool() == (torch.arange(seen + 1) >= torch.tensor(pads)[:, None])
    if mask is not None and not mask.all():
        return False
    given = next_positions if positions is None else positions.flatten().tolist()
    return given == next_positions or (len(next_positions) == 1 and set(given) == set(next_positions))


def _read_starts(
    before: Starts, seen: int, new: int, mask: Tensor | None, positions: Tensor | None, device: torch.device
) -> Starts:
    real = torch.ones(1, seen + new, dtype=torch.bool, device=device) if mask is None else mask.bool()
    shift = torch.zeros(1, new, dtype=torch.long, device=device)
    if positions is not None:
        shift = positions.to(device) - torch.arange(seen, seen + new, device=device)
    rows = max(len(real), len(shift))
    real, shift = real.expand(rows, -1), shift.expand(rows, -1)
    started = real.cumsum(1) > 0
    pad = (~started).sum(1)
    ended = started & ~real
    # a hole is a masked token with a real one after it, or one that is already in the cache
    hole = ((ended.cumsum(1) > 0) & real).any() | ended[:, :seen].any()
    offset = shift.gather(1, (pad - seen).clamp(0, new - 1)[:, None])[:, 0]  # position less slot
    moved = torch.zeros((), dtype=torch.bool, device=device)
    if seen:
        kept_pad, origin = (torch.tensor(x, device=device) for x in before.expand())
        offset = torch.where(pad < seen, origin - kept_pad, offset)
        moved = (pad.clamp_max(seen) != kept_pad.clamp_max(seen)).any()
    jump = (shift != offset[:, None]) & real[:, seen:]
    origin = (offset + pad).masked_fill(pad >= seen + new, 0)
    facts = torch.stack([hole, moved, jump.any(), ended.any()])
    found = torch.cat([pad, origin, facts]).tolist()  # the only place where the host waits for a GPU
    has_hole, has_moved, has_jump, has_ended = found[2 * rows :]
    if has_hole:
        raise RetrofitError(
            "attention_mask has a hole (masked tokens after real ones, as when a right-padded cache is continued): "
            "pad on the left"
        )
    if has_moved:
        raise RetrofitError(
            "attention_mask has other padding than this cache was filled with: pass the same padding, with all "
            "tokens seen so far"
        )
    if has_jump:
        raise RetrofitError(
            "position_ids must go up by one from token to token, over all calls: packed sequences cannot be separated "
            "in a memory, so give one sequence per row, padded on the left"
        )
    return make_starts(found[:rows], found[rows : 2 * rows], bool(has_ended))


def once_for_all_layers(method: Method) -> Method:
    """Keep what a function of a :class:`Pass` and plain values returns: the first layer computes it, all others of its
    device reuse it."""

    @wraps(method)
    def cached(self: "Pass", *args: Any) -> Any:
        key = (method.__name__, *args)
        if key not in self.results:
            self.results[key] = method(self, *args)
        return self.results[key]

    return cached  # type: ignore[return-value]


@dataclass
class Pass:
    """A forward pass with the memory on, made once by the model for all its layers.

    Counts are Python ints; tensors are made when first asked for, once for all layers on ``device``.

    Attributes:
        seen: tokens of the texts before this pass; of a padded batch: slots.
        new: tokens in it, likewise.
        starts: where each text starts. A memory is only ever given texts that start alike, or one token of each.
        evicting: whether a token leaves some layer's window in this pass or has before.
        rotary: the model's rotary embedding.
        device: where the tensors are; ``home``: where the model was called.
        decoding: whether this is plain decoding: one token of each text, and all sinks and windows are full.
        index: index of each text's first new token ``(1 or B,)`` on ``home``; None: ``seen``, in every text.
    """

    seen: int
    new: int
    starts: Starts
    evicting: bool
    rotary: Rotary
    device: torch.device
    home: torch.device
    decoding: bool = False
    index: Tensor | None = None
    results: dict[Any, Any] = field(default_factory=dict, repr=False)
    elsewhere: dict[torch.device, "Pass"] = field(default_factory=dict, repr=False)

    def to(self, device: Any, **how: Any) -> "Pass":
        """The same pass on another device, made once for all layers there. accelerate's hooks call it, too."""
        device = torch.device(device)
        if device == self.device:
            return self
        if device not in self.elsewhere:
            self.elsewhere[device] = replace(self, device=device, results={}, elsewhere={self.device: self})
        return self.elsewhere[device]

    @property
    @once_for_all_layers
    def texts(self) -> list["Text"]:
        """Rows side by side that start alike, each with a pass of its own; one for the whole batch where all do.

        Two texts of which the second has 3 slots of padding, in a first call of 5 tokens:

        >>> here = torch.device("cpu")
        >>> batch = Pass(0, 5, Starts(pads=(0, 3)), True, None, here, here)
        >>> [(text.rows, text.skip, text.now.seen, text.now.new) for text in batch.texts]
        [(slice(0, 1, None), 0, 0, 5), (slice(1, 2, None), 3, 0, 2)]
        """
        if self.starts.alike:
            return [Text(slice(None), 0, self)]
        found, first = [], 0
        for (pad, origin), rows in groupby(zip(*self.starts.expand(), strict=True)):
            last = first + len(list(rows))
            skip = min(max(pad - self.seen, 0), self.new)
            seen, new, alike = max(self.seen - pad, 0), self.new - skip, Starts(origins=(origin,))
            now = replace(self, seen=seen, new=new, starts=alike, index=None, results={}, elsewhere={})
            found.append(Text(slice(first, last), skip, now))
            first = last
        # one entry may stand for any number of rows
        return found if len(found) > 1 else [found[0]._replace(rows=slice(None))]

    @once_for_all_layers
    def unrotated(self) -> "Pass":
        """The same pass for a layer that does not rotate queries and keys."""

        def stay(positions: Tensor) -> Turn:
            cos, sin = self.rotary(positions)
            return torch.ones_like(cos), torch.zeros_like(sin)

        return replace(self, rotary=stay, results={}, elsewhere={})

    @once_for_all_layers
    def origin(self) -> Tensor:
        """Rotary position of each text's first token ``(1 or B,)``."""
        first, *others = self.starts.origins
        # a single number is filled in, not copied from the host: a GPU need not be waited for
        if not others:
            return torch.full((1,), first, device=self.device)
        return torch.tensor(self.starts.origins).to(self.device)

    def newest(self) -> Tensor:
        """``index``, on this device."""
        assert self.index is not None
        return self.index if self.device == self.home else self.index.to(self.device)

    @once_for_all_layers
    def indices(self, start: int, count: int) -> Tensor:
        """Indices ``(1 or B, count)`` of the tokens from the one on that comes ``start`` after the first new one."""
        if self.index is None:
            return torch.arange(self.seen + start, self.seen + start + count, device=self.device)[None]
        if not start and count == 1:
            return self.newest()[:, None]
        return self.indices(0, 1) + (start if count == 1 else torch.arange(start, start + count, device=self.device))

    @once_for_all_layers
    def places(self, window: int, sinks: int) -> tuple[Tensor, Tensor]:
        """Where in a ring of W the new token of plain decoding goes, and where behind S sinks: ``(1 or B,)`` each."""
        if self.index is None:
            place = torch.full((1,), (self.seen - sinks) % window, device=self.device)
        else:
            place = (self.newest() - sinks) % window
        return place, place + sinks

    def positions(self, start: int, count: int) -> Tensor:
        """Rotary positions of the tokens that :meth:`indices` names."""
        indices = self.indices(start, count)
        return indices if self.starts.origins == (0,) else indices + self.origin()[:, None]

    def first_evicting(self, window: int, sinks: int) -> int:
        """The first query, counted among the new ones, that evicts a token which is no sink.

        Query i evicts the token W before it. With T = 10 tokens, W = 4, S = 1 that is query 5: it evicts token 1, and
        the queries 5 to 9 evict tokens 1 to 5.

        >>> here = torch.device("cpu")
        >>> Pass(0, 10, Starts(), True, None, here, here).first_evicting(window=4, sinks=1)
        5
        """
        return 0 if self.decoding else min(max(window + sinks - self.seen, 0), self.new)

    # ---- rotary tables ----

    def turn(self, positions: Tensor) -> Turn:
        """The rotary tables at ``positions`` (1 or B, n)."""
        if self.device == self.home:
            return self.rotary(positions)
        cos, sin = self.rotary(positions.to(self.home))
        return cos.to(self.device), sin.to(self.device)

    @once_for_all_layers
    def tables(self, start: int, count: int, dtype: torch.dtype) -> Turn:
        """The rotary tables ``(1 or B, count, D)`` of the tokens that :meth:`indices` names."""
        cos, sin = self.turn(self.positions(start, count))
        return cast(cos, dtype), cast(sin, dtype)

    @once_for_all_layers
    def tables_at_zero(self) -> Turn:
        """The rotary tables of position 0 ``(1, 1, D)``; where they are scaled, they change a vector's length."""
        return self.turn(torch.zeros(1, 1, dtype=torch.long, device=self.device))

    @once_for_all_layers
    def mean_tables(self, first: int, count: int) -> Turn:
        """The rotary tables averaged over ``count`` positions from ``first`` on ``(1, 1, D)``."""
        cos, sin = self.turn(torch.arange(first, first + count, device=self.device)[None])
        return cos.mean(1, keepdim=True), sin.mean(1, keepdim=True)

    def rotate_back(self, x: Tensor, start: int) -> Tensor:
        """Rotated queries or keys ``(B, H, n, D)`` of the tokens from ``start`` on, as they were before rotation."""
        cos, sin = self._tables_over_length(start, x.shape[2], x.dtype)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, value=-1)

    @once_for_all_layers
    def _tables_over_length(self, start: int, count: int, dtype: torch.dtype) -> Turn:
        cos, sin = self.tables(start, count, dtype)
        length = square_length(cos, sin)
        return for_heads(cos / length, sin / length)

    def from_first_token(self, x: Tensor) -> Tensor:
        """Queries or keys ``(B, heads, m, D)`` rotated as if each text's first token stood at position 0.

        For what depends on where a token stands and not only on distances: padding must not move it.
        """
        return x if self.starts.origins == (0,) else turned(x, *self._tables_from_first())

    @once_for_all_layers
    def _tables_from_first(self) -> Turn:
        return for_heads(*after(back(*self.turn(self.origin()[:, None])), self.tables_at_zero()))


class Text(NamedTuple):
    """Rows of a batch whose texts start alike.

    Attributes:
        rows: of the batch.
        skip: slots of padding among the pass's new ones.
        now: the pass as it is for these texts alone.
    """

    rows: slice
    skip: int
    now: Pass

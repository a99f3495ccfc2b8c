"""Where each row of a batch starts: found when its first tokens arrive, and kept in the cache.

A *slot* is a place in the padded batch, counted over all calls. Padding is on the left: the text of row b begins at
slot ``pads[b]``, and its token at slot t has rotary position ``t + offsets[b]``.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import RetrofitError


@dataclass(frozen=True)
class Starts:
    """Where rows start: ``pads`` and ``offsets`` have one entry where all rows are alike, else one for each row.

    >>> Starts(pads=(3, 0), offsets=(-3, 0)).select([1, 1])  # rows 1 and 1 of a batch whose row 0 is padded
    Starts(pads=(0,), offsets=(0,), ended=False)

    Attributes:
        pads: slots of padding in front of each row; a single 0 if no row has any.
        offsets: rotary position of a slot less the slot.
        ended: whether padding follows a row, which can then not be continued.
    """

    pads: tuple[int, ...] = (0,)
    offsets: tuple[int, ...] = (0,)
    ended: bool = False
    _on: dict[torch.device, tuple[Tensor | None, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def padded(self) -> bool:
        return any(self.pads)

    @property
    def rows(self) -> int:
        """How many rows are told apart."""
        return max(len(self.pads), len(self.offsets))

    def on(self, device: torch.device) -> tuple[Tensor | None, Tensor]:
        """``pads`` as a tensor ``(B,)``, None if no row has any, and ``offsets`` ``(1 or B,)``; copied there once."""
        if device not in self._on:
            pad = torch.tensor(self.pads, device=device) if self.padded else None
            # a single number is filled in, not copied from the host: a GPU need not be waited for
            one = len(self.offsets) == 1
            offset = torch.full((1,), self.offsets[0], device=device) if one else torch.tensor(self.offsets).to(device)
            self._on[device] = pad, offset
        return self._on[device]

    def select(self, rows: list[int]) -> "Starts":
        """The starts of a batch of these rows."""
        pads = [self.pads[row] for row in rows] if self.padded else [0]
        offsets = [self.offsets[row] for row in rows] if len(self.offsets) > 1 else list(self.offsets)
        return _starts(pads, offsets, self.ended)


def _starts(pads: list[int], offsets: list[int], ended: bool) -> Starts:
    alike = len(set(offsets)) == 1
    return Starts(tuple(pads) if any(pads) else (0,), tuple(offsets[:1] if alike else offsets), ended)


def find_starts(before: Starts, seen: int, new: int, mask: Tensor | None, positions: Tensor | None) -> Starts:
    """Where rows start once ``new`` tokens have come after ``seen`` others.

    Padding on the right of the new tokens is harmless (nothing later reads it) and is allowed. Once all rows have
    begun, a token that comes alone is taken to be real and to stand at the next position, for a GPU would have to be
    waited for; on a CPU looking costs nothing.

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
        if before.offsets != (0,):
            raise RetrofitError("this cache was filled with position_ids of its own: pass those of the new tokens, too")
        return before
    begun = seen and max(before.pads) < seen and not before.ended
    if begun and new == 1 and (given.device.type != "cpu" or _as_before(before, seen, mask, positions)):
        return before
    with torch.no_grad():
        return _look(before, seen, new, mask, positions, given.device)


def _as_before(before: Starts, seen: int, mask: Tensor | None, positions: Tensor | None) -> bool:
    """Whether a single token goes on where all rows stand; cheap on a CPU, and :func:`_look` says what is wrong."""
    if positions is None and before.offsets != (0,):
        return False
    pad, offset = before.on(torch.device("cpu"))
    if mask is not None and pad is not None:
        mask = mask.bool() == (torch.arange(seen + 1) >= pad[:, None])
    if mask is not None and not mask.all():
        return False
    return positions is None or bool((positions == (offset + seen)[:, None]).all())


def _look(
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
    offset = shift.gather(1, (pad - seen).clamp(0, new - 1)[:, None])[:, 0]
    offset = offset.masked_fill(pad >= seen + new, 0)
    if seen:
        kept_pad, kept = before.on(device)
        offset = torch.where(pad < seen, kept, offset)
        moved = pad.clamp_max(seen) != (0 if kept_pad is None else kept_pad.clamp_max(seen))
    else:
        moved = hole
    jump = (shift != offset[:, None]) & real[:, seen:]
    facts = torch.stack([hole, moved.any(), jump.any(), ended.any()])
    found = torch.cat([pad, offset, facts]).tolist()  # the only place where a GPU is waited for
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
    return _starts(found[:rows], found[rows : 2 * rows], bool(has_ended))

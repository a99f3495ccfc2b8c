"""Rows longer than a device holds: teacher and student read them a segment at a time.

A memory is a recurrence of bounded size: what goes from one segment to the next is the student's cache (sinks, window,
write gates, states). So a segment's activations need not live longer than its turn. They are dropped as soon as its
losses are known and computed again in the backward pass, which goes through the segments from the last to the first and
hands the gradient on through the cache. That gradient is the whole row's. What still grows with the row is the
teacher's cache, which main memory can hold, and its hidden states, which main memory does hold.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

Read = Callable[..., Any]  # the decoder's forward: (input_ids, attention_mask, past_key_values, use_cache)


def pieces(length: int, size: int) -> list[slice]:
    """The segments of a row; one token alone joins those before it, because a cache takes it in place.

    >>> pieces(9, 4)
    [slice(0, 4, None), slice(4, 9, None)]
    """
    starts = list(range(0, max(length - 1, 1), size))
    return [slice(*ends) for ends in zip(starts, [*starts[1:], length], strict=True)]


class Reader:
    """A decoder that reads a row piece after piece into a cache."""

    def __init__(self, read: Read, tokens: Mapping[str, Tensor], cache: DynamicCache):
        """
        Args:
            read: the decoder's forward.
            tokens: ``input_ids`` (B, T) and, where rows are padded, ``attention_mask``.
            cache: an empty one.
        """
        self.read, self.tokens, self.cache = read, tokens, cache

    def states(self, piece: slice) -> Tensor:
        """Hidden states (B, n, E) of the tokens in ``piece``, which follow those in the cache."""
        mask = self.tokens.get("attention_mask")
        found: Tensor = self.read(
            input_ids=self.tokens["input_ids"][:, piece],
            attention_mask=None if mask is None else mask[:, : piece.stop],
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        return found

    def twice(self, piece: slice, use: Callable[[Callable[[], Tensor]], Tensor]) -> Tensor:
        """What ``use`` makes of the piece's :meth:`states`, which it calls for; computed again in the backward pass."""
        before = self.cache

        def turn() -> tuple[Tensor, DynamicCache]:
            own = Reader(self.read, self.tokens, _copied(before))  # the second time begins where the first one did
            return use(lambda: own.states(piece)), own.cache

        made, self.cache = checkpoint(turn, use_reentrant=False)
        return made

    def cut(self) -> None:
        """Let no gradient flow back to what was read so far."""
        self.cache = _copied(self.cache)
        for layer in self.cache.layers:
            for name, value in vars(layer).items():
                if isinstance(value, Tensor):
                    setattr(layer, name, value.detach())
            if hasattr(layer, "state"):
                layer.state = {name: tensor.detach() for name, tensor in layer.state.items()}


@contextmanager
def in_segments(decoder: Any, read_all: Callable[[Read], Tensor]) -> Iterator[None]:
    """Inside the block one call of the model around ``decoder``, wrapped or not, is ``read_all`` of the decoder.

    Wrappers (DDP, DeepSpeed) reduce gradients once per call, so all segments must be in one.

    Args:
        read_all: takes the decoder's forward and gives hidden states (B, 1, E), which go to the head.
    """
    read, hooked = decoder.forward, vars(decoder).get("forward")
    decoder.forward = lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=read_all(read))
    try:
        yield
    finally:
        del decoder.forward
        if hooked is not None:  # accelerate puts its own there
            decoder.forward = hooked


def _copied(cache: DynamicCache) -> DynamicCache:
    """A cache that goes its own way: nothing that is added to it is seen by ``cache``. No tensor is copied."""
    own = copy(cache)
    own.layers = [copy(layer) for layer in cache.layers]
    for layer in own.layers:
        if hasattr(layer, "state"):
            layer.state = dict(layer.state)
    return own

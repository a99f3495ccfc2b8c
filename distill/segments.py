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
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.modeling_outputs import MoeModelOutputWithPast

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

    def __init__(self, read: Read, decoder: Any, tokens: Mapping[str, Tensor], cache: DynamicCache):
        """
        Args:
            read: the decoder's forward.
            decoder: the module itself.
            tokens: ``input_ids`` (B, T) and, where rows are padded, ``attention_mask``.
            cache: an empty one.
        """
        self.read, self.decoder, self.tokens, self.cache = read, decoder, tokens, cache

    def states(self, piece: slice) -> Tensor:
        """Hidden states (B, n, E) of the tokens in ``piece``, which follow those in the cache."""
        mask = self.tokens.get("attention_mask")
        with _layer_by_layer(self.decoder):
            found: Tensor = self.read(
                input_ids=self.tokens["input_ids"][:, piece],
                attention_mask=None if mask is None else mask[:, : piece.stop],
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state
        return found

    def twice(self, piece: slice, use: Callable[[Callable[[], Tensor]], Tensor]) -> Tensor:
        """What ``use`` makes of the piece's :meth:`states`, which it calls for; computed again in the backward pass."""
        # capturing self would leak the graph through its cache
        begin, before = partial(Reader, self.read, self.decoder, self.tokens), self.cache

        def turn() -> tuple[Tensor, DynamicCache]:
            own = begin(_fork(before))  # the second time begins where the first one did
            return use(partial(own.states, piece)), own.cache

        made, self.cache = checkpoint(turn, use_reentrant=False)
        return made

    def cut(self) -> None:
        """Let no gradient flow back to what was read so far."""
        self.cache = _fork(self.cache)
        for index, layer in enumerate(self.cache.layers):
            self.cache.layers[index] = _with_tensors(layer, {name: x.detach() for name, x in _tensors(layer).items()})


@contextmanager
def in_segments(decoder: Any, read_all: Callable[[Read], Tensor]) -> Iterator[None]:
    """Inside the block one call of the model around ``decoder``, wrapped or not, is ``read_all`` of the decoder.

    Wrappers (DDP, DeepSpeed) reduce gradients once per call, so all segments must be in one.

    Args:
        read_all: takes the decoder's forward and gives hidden states (B, 1, E), which go to the head.
    """
    read, hooked = decoder.forward, vars(decoder).get("forward")
    # a family with experts asks for the logits of their router, too
    decoder.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=read_all(read))
    try:
        yield
    finally:
        del decoder.forward
        if hooked is not None:  # accelerate puts its own there
            decoder.forward = hooked


def _fork(cache: DynamicCache) -> DynamicCache:
    """A cache that goes its own way: nothing that is added to it is seen by ``cache``. No tensor is copied."""
    if hasattr(cache, "fork"):
        return cache.fork()
    own = copy(cache)
    own.layers = [copy(layer) for layer in cache.layers]
    return own


def _tensors(layer: Any) -> dict[str, Tensor]:
    """What a cache's layer holds, by name."""
    if hasattr(layer, "named_tensors"):
        return layer.named_tensors()
    return {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}


def _with_tensors(layer: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A layer like this one that holds these tensors and no others."""
    own = copy(layer)
    if hasattr(own, "set_tensors"):
        own.keys = own.values = own.gates = None
        own.set_tensors(tensors)
        return own
    for name in _tensors(own):
        setattr(own, name, tensors.get(name))
    for name, tensor in tensors.items():
        setattr(own, name, tensor)
    return own


@contextmanager
def _layer_by_layer(decoder: Any) -> Iterator[None]:
    """Inside the block, gradient checkpointing keeps the cache of each layer, which transformers' leaves out."""
    if not getattr(decoder, "gradient_checkpointing", False) or not torch.is_grad_enabled():
        yield
        return
    hooked = [vars(layer).get("forward") for layer in decoder.layers]
    for layer in decoder.layers:
        layer.forward = _recomputed(layer, layer.forward)
    try:
        with _without_checkpointing(decoder, *decoder.layers):
            yield
    finally:
        for layer, forward in zip(decoder.layers, hooked, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _recomputed(layer: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward whose activations are dropped, and computed again from its input and its cache as it was."""
    index = layer.self_attn.layer_idx

    def run(hidden: Tensor, *args: Any, past_key_values: DynamicCache, **kwargs: Any) -> Any:
        # the graph keeps this function, which must keep neither the graph nor what is dropped with the activations:
        # tensors of the cache are arguments
        held = _tensors(past_key_values.layers[index])
        names = list(held)
        hollow, empty = _with_tensors(past_key_values.layers[index], {}), copy(past_key_values)
        empty.layers = [None] * len(past_key_values.layers)

        def turn(hidden: Tensor, *tensors: Tensor) -> tuple[Any, Any]:
            own = copy(empty)
            own.layers = [*empty.layers]
            own.layers[index] = _with_tensors(hollow, dict(zip(names, tensors, strict=True)))
            with _without_checkpointing(layer):
                return forward(hidden, *args, past_key_values=own, **kwargs), own.layers[index]

        made, past_key_values.layers[index] = checkpoint(turn, hidden, *held.values(), use_reentrant=False)
        return made

    return run


@contextmanager
def _without_checkpointing(*modules: Any) -> Iterator[None]:
    """Inside the block transformers' own checkpointing of these modules is off."""
    before = [module.gradient_checkpointing for module in modules]
    for module in modules:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module, switched in zip(modules, before, strict=True):
            module.gradient_checkpointing = switched

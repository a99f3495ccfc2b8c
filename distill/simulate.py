"""The memory that one training step takes, from shapes: the step itself, run on tensors without data.

Nothing is guessed per kind of memory: a model of two layers (three where nothing is recomputed) runs teacher, student,
loss and backward pass under torch's FakeTensorMode, which computes shapes only, while every storage that comes to life
or dies is counted. What a further layer adds is then linear. The operations are those that torch would run on a CPU;
CUDA's fused attention and flash-linear-attention's kernels hold less or the same.
"""

import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distill.objective import Objective
from distill.offload import Waiting, offloaded
from patches.config import MemoryConfig
from retrofit.costs.flops import Shape
from retrofit.patching import skeleton


class Tracker(TorchDispatchMode):
    """Counts the bytes of storages made inside the block: ``live`` now, ``peak`` at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.live -= size


class Chosen(TorchDispatchMode):
    """Lets ``x[mask]`` run without data, where ``mask`` is, or is a part of, the (rows, tokens) mask of those past
    ``start``: how many it takes is then known from where it lies."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mask = args[1][0] if func is torch.ops.aten.index.Tensor else None
        if mask is not None and mask.dtype == torch.bool:
            x = args[0]
            rows, tokens = mask.shape
            first = mask.storage_offset()
            return x.new_empty(rows * min(tokens, max(0, first + tokens - self.start)), *x.shape[2:])
        return func(*args, **(kwargs or {}))


def step_bytes(
    config: Any,
    settings: MemoryConfig,
    rows: int,
    tokens: int,
    dtype: torch.dtype,
    checkpointing: bool,
    objective: Objective | None = None,
    offload: bool = False,
) -> int:
    """Bytes of activations at the peak of one micro-batch: weights, optimizer and kept gradients not counted.

    Args:
        config: the base's configuration.
        settings: the memory's, with the window of the step; all layers are taken to have the narrowest, and no options
            of their own.
        rows, tokens: of the micro-batch.
        dtype: of the base.
        checkpointing: whether each layer of the student is recomputed in the backward pass.
        objective: the loss; the KL over whole rows by default.
        offload: whether activations wait in main memory, which is not counted.
    """
    window = min(settings.windows(config))
    settings = MemoryConfig(settings.kind, window, settings.sinks, options=settings.options)
    peaks = partial(_peaks, config, settings, rows, dtype, checkpointing, objective or Objective(), offload)
    segment = None if objective is None else objective.segment

    def of_all_layers(tokens: int) -> list[int]:
        two, three = (peaks(tokens, layers) for layers in (2, 3))
        return [a + (config.num_hidden_layers - 2) * (b - a) for a, b in zip(two, three, strict=True)]

    elsewhere = 0  # of the teacher's cache: all but the layer at work and the one that comes next
    if objective is not None and objective.offload_teacher:
        shape = Shape.of(config)
        of_layer = 2 * shape.kv_heads * shape.head_dim * rows * tokens * dtype.itemsize
        elsewhere = max(0, shape.layers - 2) * of_layer
    if segment is not None:
        # a few segments past the window, each adds as much as the one before: to the forward pass, which also holds
        # the teacher's cache, more than to the backward pass
        few = segment * (2 - -(settings.window + settings.sinks) // segment)
        if tokens > few + segment:
            pairs = zip(of_all_layers(few), of_all_layers(few + segment), strict=True)
            forward, backward = (a + (b - a) * (tokens - few) // segment for a, b in pairs)
            return max(forward - elsewhere, backward)
    elif checkpointing:  # a layer's input is all that is kept of it, and that may wait elsewhere
        states = 0 if offload else rows * tokens * config.hidden_size * dtype.itemsize
        return max(peaks(tokens, 2)) + (config.num_hidden_layers - 2) * states
    forward, backward = of_all_layers(tokens)
    return max(forward - elsewhere, backward)


def checkpoint_layers(model: Any) -> None:
    """Recompute each layer in the backward pass; the switch has been renamed since transformers 5.0."""
    name = "activation_checkpointing_enable"
    enable = getattr(model, name) if hasattr(model, name) else model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _peaks(
    config: Any,
    settings: MemoryConfig,
    rows: int,
    dtype: torch.dtype,
    checkpointing: bool,
    objective: Objective,
    offload: bool,
    tokens: int,
    layers: int,
) -> list[int]:
    """The peaks of forward and backward pass with so many layers."""
    alike = {"num_hidden_layers": layers, "layer_types": None, "sliding_window": None}
    small = type(config).from_dict({**config.to_dict(), **alike})
    small._attn_implementation = "sdpa"
    with FakeTensorMode():
        model = _materialise(skeleton(small, settings), dtype)
        if checkpointing:
            checkpoint_layers(model)
        ids = torch.zeros(rows, tokens, dtype=torch.long)
        start = settings.window + settings.sinks
        scored = (torch.arange(tokens) >= start).expand(rows, -1)
        with Tracker() as tracker, Chosen(start):
            with offloaded(model, _gone) if offload else nullcontext():
                loss = objective.losses(model, model, {"input_ids": ids, "labels": ids}, scored).sum()
            forward, tracker.peak = tracker.peak, tracker.live
            loss.backward()
        return [forward, tracker.peak]


def _gone(tensor: torch.Tensor) -> Waiting:
    """What is elsewhere takes no bytes here until it comes back."""
    return partial(torch.empty, tensor.shape, dtype=tensor.dtype)


def _materialise(model: Any, dtype: torch.dtype) -> Any:
    """Give the skeleton tensors (of the mode it is called in), its memory float32, and that its gradients."""
    model.train()
    for path, module in model.named_modules():
        memory = ".memory." in f".{path}."
        for name, parameter in list(module.named_parameters(recurse=False)):
            kind = torch.promote_types(dtype, torch.float32) if memory else dtype
            fresh = nn.Parameter(torch.zeros(parameter.shape, dtype=kind), requires_grad=memory)
            if memory:  # so that a gradient is added to, not made: it is counted with the optimizer
                fresh.grad = torch.zeros_like(fresh)
            setattr(module, name, fresh)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    return model

"""Layers at work, call after call: what training layer by layer, the mse loss and calibration look at."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from patches.cache import ScratchLayer
from patches.memory import Step
from patches.sequence import Pass, Starts


@dataclass
class LayerCall:
    """One call of a layer's attention.

    Attributes:
        index: of the layer.
        attention: the module.
        args, kwargs: what it was called with.
        output: what it gave ``(B, T, E)``.
        heads: what it gave its output projection ``(B, T, H * D)``.
        residual: what the layer was given ``(B, T, E)``, before its norm.
    """

    index: int
    attention: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    heads: Tensor
    residual: Tensor

    @property
    def x(self) -> Tensor:
        """The attention's input ``(B, T, E)``."""
        found: Tensor = self.kwargs["hidden_states"] if "hidden_states" in self.kwargs else self.args[0]
        return found

    def repeat(self, attention: Any, now: Pass) -> Tensor:
        """What ``attention``, this one or another model's, makes of the same input with its memory on ``(B, T, E)``.

        Args:
            now: the pass, of ``plan`` of the model's body.
        """
        # not called: this one's call is under way, and would come here again
        changed = {**self.kwargs, "attention_mask": None, "memory_pass": now}
        return attention.forward(*self.args, **changed)[0]

    def step(self, body: Any) -> Step:
        """The call as a memory is shown it: queries, keys and values of whole texts, before rotation."""
        x, memory = self.x, self.attention.memory
        now = Pass(0, x.shape[1], Starts(), False, body.turn, x.device, x.device)
        now = now if self.attention.use_rope else now.unrotated()
        layer = ScratchLayer(memory.kind, memory.window, memory.sinks)
        q, k, v = self.attention.plain_heads(x)
        return Step(now, x, q, k, v, layer, self.attention.scaling)


@contextmanager
def watch_layers(body: Any, layers: Iterable[int], look: Callable[[LayerCall], None]) -> Iterator[None]:
    """Inside the block ``look`` is shown each call of these layers' attention, once it is done.

    Args:
        body: a retrofitted model's decoder.
    """
    handles, parts = [], dict[tuple[int, str], Tensor]()

    def note(index: int, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            parts[index, name] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

        return hook

    def show(index: int) -> Callable[..., None]:
        def hook(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            seen = parts.pop((index, "heads")), parts.pop((index, "residual"))
            look(LayerCall(index, attention, args, kwargs, output[0], *seen))

        return hook

    for index in layers:
        layer = body.layers[index]
        for module, name in ((layer, "residual"), (layer.self_attn.o_proj, "heads")):
            handles.append(module.register_forward_pre_hook(note(index, name), with_kwargs=True))
        handles.append(layer.self_attn.register_forward_hook(show(index), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

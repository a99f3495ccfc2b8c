"""The first of two stages: each layer is fitted by itself, to what full attention makes of full attention's own inputs.

Each layer gets the input that the teacher's layer gets, and its window and memory are to give what that layer's full
attention gives. The error is the squared difference after the output projection, as a share of the window's own. So a
step is one pass of the teacher and, at each layer, a pass and a small backward pass of its memory; none goes through
the model.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from distill.lora import lora_off
from distill.parallel.zero import window_only
from retrofit.evaluation.scores import evaluating, hidden_states
from retrofit.observer import LayerCall, watch_layers

LEAST = 1e-6  # of the teacher's output: a window that misses it by less misses rounding errors
Tokens = dict[str, Tensor]


class LocalFit:
    """The stage for ``model``, a retrofitted model without a wrapper.

    Attributes:
        layers: indices of the layers that have something to fit, in order.
    """

    def __init__(self, model: Any):
        self.model, self._bare = model, window_only(model)
        fitted = {
            index: [parameter for parameter in memory.parameters() if parameter.requires_grad]
            for index, memory in model.model.memories().items()
        }
        self._fitted = {index: parameters for index, parameters in fitted.items() if parameters}
        self.layers = list(self._fitted)

    def total(self, student: Any, tokens: Tokens, scored: Tensor) -> Tensor:
        """The layers' mean error at each row of ``tokens``, times the row's scored positions, summed; with a gradient.

        Args:
            student: the model as it is trained, wrapped or not.
            tokens: ``input_ids`` (B, T) and, for rows padded on the left, ``attention_mask``.
            scored: (B, T) bool, where to look.
        """
        counts = scored.sum(1)
        every = [parameter for parameter in self.model.parameters() if parameter.requires_grad]  # LoRA's too
        gradients = {parameter: torch.zeros_like(parameter) for parameter in every}

        def learn(layer: int, errors: Tensor) -> None:
            # here and now, so that no two layers' graphs are ever held
            parameters = self._fitted[layer]
            found = torch.autograd.grad((errors * counts).sum() / len(self.layers), parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, found, strict=True):
                if gradient is not None:
                    gradients[parameter] += gradient

        value = (self.errors(student, tokens, scored, learn).mean(0) * counts).sum()
        return _Known.apply(value, list(gradients.values()), *every)

    def errors(
        self, student: Any, tokens: Tokens, scored: Tensor, learn: Callable[[int, Tensor], None] | None = None
    ) -> Tensor:
        """Each layer's squared error over its scored positions, as a share of the window's own: ``(layers, B)``.

        Args:
            student, tokens, scored: as in :meth:`total`.
            learn: called with each layer's index and errors ``(B,)``, which have a graph for the time of the call.
        """
        model, memory, found = self.model, self.model.config.memory, dict[int, Tensor]()
        if [self._bare.config.memory[key] for key in ("window", "sinks")] != [memory["window"], memory["sinks"]]:
            self._bare.set_window(memory["window"], memory["sinks"])  # a step may have drawn its own
        plans = [one.model.plan(tokens["input_ids"], tokens.get("attention_mask")) for one in (model, self._bare)]

        def look(call: LayerCall) -> None:
            full, own, bare = call.output.detach(), call.attention, self._bare.model.layers[call.index].self_attn
            with torch.no_grad():
                missed = _squares(call.repeat(bare, plans[1]) - full, scored)
                missed = torch.maximum(missed, LEAST * _squares(full, scored)).clamp_min(torch.finfo().tiny)
            with torch.set_grad_enabled(learn is not None):
                errors = _squares(call.repeat(own, plans[0]) - full, scored) / missed
                if learn is not None:
                    learn(call.index, errors)
            found[call.index] = errors.detach()

        with ExitStack() as stack:
            for context in (evaluating(model), model.memory_off(), lora_off(model)):
                stack.enter_context(context)
            if plans[0].evicting:
                stack.enter_context(watch_layers(model.model, self.layers, look))
            hidden_states(student, tokens, model.get_decoder())
        if not found:  # nothing leaves a window in these rows
            return torch.zeros(len(self.layers), len(scored), device=scored.device)
        return torch.stack([found[layer] for layer in self.layers])


def _squares(x: Tensor, scored: Tensor) -> Tensor:
    """The squares of ``x`` (B, T, E) summed over the positions of ``scored`` (B, T), in float32 or wider: ``(B,)``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide.square().sum(-1) * scored).sum(-1)


class _Known(torch.autograd.Function):
    """A number whose gradients are known already; autograd hands them to the parameters, and so to their hooks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *parameters: nn.Parameter) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, *(gradient * known for known in ctx.gradients)

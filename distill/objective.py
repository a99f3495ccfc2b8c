"""What a run minimises: teacher and student on the same rows, and a loss at every position past the window.

The MSE loss compares each layer's attention output before the output projection. It is AHN's ablation "distill" (arXiv
2510.07318; its code adds it to the KL): teacher and student run side by side, each on its own hidden states, and every
layer with a memory is to give what full attention gives.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.lora import lora_off
from distill.loss import chunked_ce, chunked_kl, scored_positions
from patches.errors import RetrofitError
from retrofit.evaluation.scores import evaluating, hidden_states
from retrofit.head import gathered

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Objective:
    """One loss, as :class:`distill.arguments.DistillArguments` describes its settings."""

    loss: str = "kl"
    mse_weight: float = 0.0
    temperature: float = 1.0
    label_shift: str = "next"

    @property
    def mse(self) -> float:
        """What the attention outputs' MSE counts."""
        return 1.0 if self.loss == "mse" else self.mse_weight

    def check(self, model: Any) -> None:
        """Refuse a model whose memory the loss would not see.

        Raises:
            RetrofitError: the memory joins behind the output projection, where the MSE does not look.
        """
        if self.mse and model.config.memory["kind"] == "tensor-cache":
            raise RetrofitError(
                "loss 'mse' compares what goes into each layer's output projection, and memory 'tensor-cache' joins "
                "behind it: set loss to 'kl' or 'ce'"
            )

    def scored(self, labels: Tensor, lossless: int) -> Tensor:
        """(B, T) bool: the positions that count among ``labels`` (B, T), past the lossless budget S + W."""
        scored = scored_positions(labels, lossless, self.label_shift)
        if self.loss == "ce":  # it needs the next label itself, whatever the shift
            scored &= scored_positions(labels, lossless)
        return scored

    def losses(self, student: Any, model: Any, batch: Batch, scored: Tensor) -> Tensor:
        """(P,) the loss at each position of ``scored`` (B, T), with a gradient at the memory.

        Args:
            student: the model as it is trained, wrapped or not.
            model: the same, unwrapped.
            batch: ``input_ids``, ``labels`` and, for padded rows, ``attention_mask``.
        """
        tokens = tokens_of(batch)
        with attention_outputs(model, self.mse > 0) as of_teacher:
            teacher = None if self.loss == "ce" and not self.mse else teacher_states(model, tokens)
        with attention_outputs(model, self.mse > 0) as of_student:
            states = hidden_states(student, tokens, model.get_decoder())[scored]  # (P, E)
        head = model.get_output_embeddings()
        with gathered(head.parameters()):
            if self.loss == "ce":
                targets = batch["labels"].roll(-1, 1)[scored]  # what each position predicts
                losses = chunked_ce(states, targets, head.weight, head.bias, temperature=self.temperature)
            elif self.loss == "kl":
                assert teacher is not None
                losses = chunked_kl(states, teacher[scored], head.weight, head.bias, temperature=self.temperature)
            else:
                losses = states.new_zeros(())
        return losses + self.mse * squared_errors(of_student, of_teacher, scored) if self.mse else losses


def tokens_of(batch: Batch) -> Batch:
    """What of a batch the model is given."""
    tokens = {"input_ids": batch["input_ids"]}
    if "attention_mask" in batch and not padded_right(batch["attention_mask"]):
        tokens["attention_mask"] = batch["attention_mask"]
    return tokens


def padded_right(mask: Tensor) -> bool:
    """Whether padding (B, T; 0 where it is) comes after all tokens, where a causal model needs no mask for it.

    The teacher's attention would build a T x T mask from it: 600 MB a row at AHN's 24,576 tokens.
    """
    return bool((mask[:, 1:] <= mask[:, :-1]).all())


@torch.no_grad()
def teacher_states(model: Any, tokens: Batch) -> Tensor:
    """(B, T, E) hidden states of the base with full attention, through the unwrapped module: nothing to reduce."""
    with evaluating(model), model.memory_off(), lora_off(model):
        return hidden_states(model, tokens)


@contextmanager
def attention_outputs(model: Any, wanted: bool = True) -> Iterator[list[Tensor]]:
    """A list that fills with the heads' outputs ``(B, T, H * D)`` of each layer with a memory, as forward passes run.

    Args:
        model: a retrofitted model, unwrapped.
        wanted: False leaves the list empty, and the model alone.
    """
    outputs: list[Tensor] = []
    handles = []
    if wanted:
        for index in model.model.memories():
            projection = model.model.layers[int(index)].self_attn.o_proj
            handles.append(projection.register_forward_pre_hook(lambda _module, args: outputs.append(args[0])))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def squared_errors(student: list[Tensor], teacher: list[Tensor], scored: Tensor) -> Tensor:
    """Squared differences, averaged over layers and width.

    Args:
        student, teacher: one ``(B, T, H * D)`` per layer.
        scored: (B, T) bool, where to look.

    Returns:
        (P,) in fp32 (fp64).

    Raises:
        RetrofitError: the student's outputs carry no gradient though one is wanted: checkpointing is reentrant.
    """
    if torch.is_grad_enabled() and not all(output.requires_grad for output in student):
        raise RetrofitError(
            "loss 'mse' needs gradients through the attention's outputs, which reentrant checkpointing cuts off: "
            "set use_reentrant to false"
        )
    wide = torch.promote_types(student[0].dtype, torch.float32)
    errors = [
        (ours[scored].to(wide) - theirs[scored].to(wide)).square().mean(-1)
        for ours, theirs in zip(student, teacher, strict=True)
    ]
    return torch.stack(errors).mean(0)

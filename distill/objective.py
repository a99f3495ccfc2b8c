"""What a run minimises: teacher and student on the same rows, and a loss at every position past the window."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.attention_outputs import attention_outputs, check_comparable, squared_errors
from distill.lora import lora_off
from distill.loss import chunked_ce, chunked_kl, scored_positions
from retrofit.evaluation.scores import hidden_states
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
            RetrofitError: as :func:`distill.attention_outputs.check_comparable`.
        """
        if self.mse:
            check_comparable(model)

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
        tokens = {"input_ids": batch["input_ids"]}
        if "attention_mask" in batch and not padded_right(batch["attention_mask"]):
            tokens["attention_mask"] = batch["attention_mask"]
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


def padded_right(mask: Tensor) -> bool:
    """Whether padding (B, T; 0 where it is) comes after all tokens, where a causal model needs no mask for it.

    The teacher's attention would build a T x T mask from it: 600 MB a row at AHN's 24,576 tokens.
    """
    return bool((mask[:, 1:] <= mask[:, :-1]).all())


@torch.no_grad()
def teacher_states(model: Any, tokens: Batch) -> Tensor:
    """(B, T, E) hidden states of the base with full attention, through the unwrapped module: nothing to reduce."""
    with _evaluating(model), model.memory_off(), lora_off(model):
        return hidden_states(model, tokens)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)

"""A gradient that is NaN or infinite ends the run before it can reach a checkpoint."""

import math
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from patches.errors import RetrofitError


class FiniteGradient(TrainerCallback):
    """Looks at the memory's gradients before each step of ``trainer``, a :class:`distill.trainer.DistillTrainer`."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The step is not applied, except under DeepSpeed, which applies it in its backward pass.

        Raises:
            RetrofitError: with the step named.
        """
        if self.trainer.is_deepspeed_enabled:
            norm = self.trainer.deepspeed.get_global_grad_norm()
            finite = norm is None or 0 <= float(norm) < math.inf  # DeepSpeed says -1 where there is none
        else:
            model = self.trainer.accelerator.unwrap_model(self.trainer.model)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]  # LoRA's too
            finite = bool(torch.stack([gradient.isfinite().all() for gradient in gradients]).all())
        if not finite:
            raise RetrofitError(
                f"the gradient is not finite at step {state.global_step + 1}: the run stopped and nothing of this step "
                "was saved; start again with a smaller learning rate, or look at the data it had reached"
            )

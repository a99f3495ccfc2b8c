"""The trainer's arguments: transformers' own, with defaults that suit a memory, and the few that distillation adds."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import TrainingArguments

from distill.recipe import Recipe
from retrofit.settings import settings

# transformers renames the switch: the old name warns where the new one exists
_NEW = "activation_checkpointing" in {argument.name for argument in fields(TrainingArguments)}
CHECKPOINTING = "activation_checkpointing" if _NEW else "gradient_checkpointing"


def as_in_recipes(name: str) -> Any:
    """A field with the default, the help and the choices of the recipe's key ``name``."""
    key = settings(Recipe)[name]
    return field(default=key.default, metadata={"help": key.help} | ({"choices": key.choices} if key.choices else {}))


@dataclass
class DistillArguments(TrainingArguments):
    """Arguments of :class:`distill.trainer.DistillTrainer`.

    Raises:
        RetrofitError: one of ours is out of range or none of the choices.
    """

    # small bases want 1e-2 to 3e-2; AHN fits its 3B to 14B bases at 1e-4
    learning_rate: float = as_in_recipes("lr")
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule after the warm-up."})
    warmup_steps: float = as_in_recipes("warmup")
    adam_beta2: float = as_in_recipes("adam_beta2")
    data_seed: int | None = field(default=None, metadata={"help": "Seed of the rows' order; the run's own by default."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Hide NaN and Inf losses in the log."})
    # our loss gives every parameter a gradient at every step: no search through the graph for those it left out
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "As in transformers."})
    # none of a model's buffers changes, and a process that waits for them cannot be told from one that hangs
    ddp_broadcast_buffers: bool | None = field(default=False, metadata={"help": "As in transformers."})
    metric_for_best_model: str | None = field(default=None, metadata={"help": "As in transformers; kl by default."})
    greater_is_better: bool | None = field(default=None, metadata={"help": "As in transformers; by the metric's name."})

    loss: str = as_in_recipes("loss")
    mse_weight: float = as_in_recipes("mse_weight")
    window_sampling: str = as_in_recipes("window_sampling")
    label_shift: str = as_in_recipes("label_shift")
    temperature: float = as_in_recipes("temperature")
    activation_offload: bool = as_in_recipes("activation_offload")
    segment: int | None = as_in_recipes("segment")
    segments_back: int | None = as_in_recipes("segments_back")
    offload_teacher: bool = as_in_recipes("offload_teacher")
    group_by_length: bool = as_in_recipes("group_by_length")  # transformers 5.0 has it, later ones under another name
    local_steps: int = as_in_recipes("local_steps")
    local_lr: float | None = as_in_recipes("local_lr")

    def __post_init__(self) -> None:
        for name, key in settings(Recipe).items():
            if key.argument == name and name in DistillArguments.__annotations__:
                setattr(self, name, key.check(getattr(self, name)))
        if self.data_seed is None:
            # the order of the rows would otherwise depend on the process's random state, which a resumed run has not
            self.data_seed = self.seed
        # transformers would look for eval_loss, which we do not log, and take the largest KL for the best
        chooses = self.load_best_model_at_end or self.save_strategy == "best"
        if chooses or self.lr_scheduler_type == "reduce_lr_on_plateau":
            self.metric_for_best_model = self.metric_for_best_model or "kl"
        if self.metric_for_best_model and self.greater_is_better is None:
            self.greater_is_better = self.metric_for_best_model.endswith("gap_closed")
        precision = torch.get_float32_matmul_precision()
        super().__post_init__()
        if self.torch_compile and self.tf32 is None:  # transformers has just switched it on
            torch.set_float32_matmul_precision(precision)

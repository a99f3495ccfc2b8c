"""The trainer's arguments: transformers' own, with defaults that suit a memory, and the few that distillation adds."""

from dataclasses import dataclass, field, fields

from transformers import TrainingArguments

from patches.errors import RetrofitError, nearest

WINDOW_SAMPLING = ("fixed", "ahn")
LABEL_SHIFT = ("next", "ahn")
LOSS = ("kl", "ce", "mse")
# transformers renames the switch: the old name warns where the new one exists
_NEW = "activation_checkpointing" in {argument.name for argument in fields(TrainingArguments)}
CHECKPOINTING = "activation_checkpointing" if _NEW else "gradient_checkpointing"


@dataclass
class DistillArguments(TrainingArguments):
    """Arguments of :class:`distill.trainer.DistillTrainer`.

    Raises:
        RetrofitError: one of ours is out of range or none of the choices.
    """

    # small bases want 1e-2 to 3e-2; AHN fits its 3B to 14B bases at 1e-4
    learning_rate: float = field(default=1e-2, metadata={"help": "Peak learning rate of the memory's parameters."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule after the warm-up."})
    warmup_steps: float = field(default=0.1, metadata={"help": "Warm-up steps, or below 1 their share of all steps."})
    adam_beta2: float = field(default=0.98, metadata={"help": "AdamW's second beta."})
    data_seed: int | None = field(default=None, metadata={"help": "Seed of the rows' order; the run's own by default."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Hide NaN and Inf losses in the log."})
    # our loss gives every parameter a gradient at every step: no search through the graph for those it left out
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "As in transformers."})

    loss: str = field(
        default="kl",
        metadata={
            "help": "'kl': to the model's own full attention. 'ce': cross-entropy with the text. 'mse': between the "
            "attention's outputs, layer by layer. The last two are AHN's ablations."
        },
    )
    mse_weight: float = field(default=0.0, metadata={"help": "What the MSE counts beside 'kl' or 'ce'."})
    window_sampling: str = field(
        default="fixed",
        metadata={
            "help": "'fixed': the model's window and sinks. 'ahn': drawn anew for each step as AHN's recipe does."
        },
    )
    label_shift: str = field(
        default="next",
        metadata={"help": "'next': position t counts if label t + 1 does. 'ahn': if label t does (AHN's code)."},
    )
    temperature: float = field(default=1.0, metadata={"help": "Softmax temperature of teacher and student."})

    def __post_init__(self) -> None:
        for name, choices in (("loss", LOSS), ("window_sampling", WINDOW_SAMPLING), ("label_shift", LABEL_SHIFT)):
            value = getattr(self, name)
            if value not in choices:
                raise RetrofitError(f"{name} is {value!r}, not one of {', '.join(choices)}{nearest(value, choices)}")
        if not self.temperature > 0:
            raise RetrofitError(f"temperature is {self.temperature}: it must be above 0")
        if not self.mse_weight >= 0:
            raise RetrofitError(f"mse_weight is {self.mse_weight}: it must be 0 or more")
        if self.data_seed is None:
            # the order of the rows would otherwise hang on the process's random state, which a resumed run has not
            self.data_seed = self.seed
        super().__post_init__()

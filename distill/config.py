"""The settings of a run: transformers' ``TrainingArguments`` and what distillation adds, as TRL's ``SFTConfig`` is."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from distill.parallel.processes import met_before
from distill.parallel.zero import find_config
from distill.recipe import DistillKeys, read_recipe, refuse_renamed
from patches.errors import RetrofitError, first_line, nearest, one_of
from retrofit.settings import setting, settings

STEPS = 600  # of a run whose recipe says nothing of its length
FSDP2 = {"version": 2, "state_dict_type": "FULL_STATE_DICT"}
# transformers renames the switch: the old name warns where the new one exists
CHECKPOINTING = "activation_checkpointing"


@dataclass
class DistillConfig(DistillKeys, TrainingArguments):
    """One run, or the arguments of a :class:`distill.trainer.DistillTrainer`.

    Values are checked when one is made. What ``TrainingArguments`` do on the machine (choose a device, meet other
    processes, start DeepSpeed) waits for :meth:`start`, so that ``--dry-run`` can plan a run for other machines.

    Raises:
        RetrofitError: a value is of the wrong type or out of range, or values do not go together.
    """

    per_device_eval_batch_size: int | None = setting(
        None, "Rows per process and forward pass of an evaluation; as in training by default.", least=1
    )
    eval_strategy: str = setting("steps", "When to evaluate.", choices=("no", "steps", "epoch"))
    data_seed: int | None = setting(None, "Seed of the rows' order; the run's own by default.", least=0)
    disable_tqdm: bool = setting(True, "Leave transformers' own progress bars out.")
    logging_nan_inf_filter: bool = setting(False, "Hide NaN and Inf losses in the log.")
    # our loss gives every parameter a gradient at every step: no search through the graph for those it left out
    ddp_find_unused_parameters: bool | None = setting(False, "As in transformers.")
    # none of a model's buffers changes, and a process that waits for them cannot be told from one that hangs
    ddp_broadcast_buffers: bool | None = setting(False, "As in transformers.")
    metric_for_best_model: str | None = setting(None, "As in transformers; kl by default.")
    greater_is_better: bool | None = setting(None, "As in transformers; by the metric's name.")

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("lr_scheduler_type", self.lr_scheduler_type, *(one.value for one in SchedulerType))
        one_of("optim", self.optim, *(one.value for one in OptimizerNames))
        for name in _named(self.report_to):
            one_of("report_to", name, "none", "all", *INTEGRATION_TO_CALLBACK)
        # two names of one switch each, of which transformers has either or both
        self.gradient_checkpointing |= bool(getattr(self, CHECKPOINTING, False))
        self.group_by_length |= getattr(self, "train_sampling_strategy", "") == "group_by_length"
        if self.max_steps < 1:
            self.max_steps = STEPS if self.num_train_epochs is None else -1
        self.check_together()
        self._recipe = {name: getattr(self, name) for name in settings(DistillKeys)}
        for name, key in settings(type(self)).items():
            if getattr(self, name) != key.default and not name.endswith("_token"):
                self._recipe[name] = getattr(self, name)
        self._started = False

    def check_together(self) -> None:
        """Refuse values that do not go together, as far as that can be known without the base.

        Raises:
            RetrofitError: some do not.
        """
        if taken := set(self.options) & (settings(type(self)).keys() | {"model_kwargs"}):
            raise RetrofitError(f"options: {min(taken)!r} is not an option of a memory: make it a key of the recipe")
        if self.data_format != "text" and self.min_length >= self.max_length:
            raise RetrofitError(
                f"min_length: {self.min_length} would leave out every conversation, because max_length cuts them to "
                f"{self.max_length} tokens"
            )
        for source, weight in self.mix.items():
            if type(weight) not in (int, float) or not 0 < weight <= 1000:
                raise RetrofitError(
                    f"mix: {source}: {weight!r} is not how often its rows are read: give a number above 0, at most 1000"
                )
        if self.streaming and (self.mix or self.max_steps < 1 or self.dataloader_num_workers or self.group_by_length):
            raise RetrofitError(
                "streaming: a stream has no known length and one reader: leave out mix, num_train_epochs, "
                "dataloader_num_workers and group_by_length, or leave out streaming"
            )
        if self.patience and self.save_steps != self.eval_steps:
            raise RetrofitError(
                f"patience: the best evaluation's checkpoint must be there, so save_steps ({self.save_steps}) must be "
                f"equal to eval_steps ({self.eval_steps})"
            )
        if self.segment is None and (self.segments_back or self.offload_teacher):
            raise RetrofitError("segments_back and offload_teacher go with segment: set segment, or leave them out")
        if self.local_steps > self.max_steps > 0:
            raise RetrofitError(
                f"local_steps: {self.local_steps} is more than the {self.max_steps} steps of the run, which include "
                "them: set more steps, or fewer local ones"
            )
        named = [other.get("window") for other in self.by_layer.values() if isinstance(other, dict)]
        self.check_length(min([self.window, *(window for window in named if type(window) is int)]))

    def check_length(self, window: int) -> None:
        """Refuse rows that never leave ``window``, that of a layer with the memory.

        With ``window_sampling`` too: held-out rows are scored at the window that is saved.
        """
        least = window + self.sinks + 2
        if self.max_length < least:
            raise RetrofitError(
                f"max_length: {self.max_length} tokens never leave a window of {window} and {self.sinks} sinks, so a "
                f"layer with it has nothing to learn: set {least} or more, or set a smaller window"
            )

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "") -> "DistillConfig":
        """Build one from the mapping a YAML file holds; ``where`` names the file in errors, if there is one.

        Raises:
            RetrofitError: an unknown key (with the nearest one), or as the class itself.
        """
        known, begin = list(settings(cls)), f"{where}: " if where else ""
        refuse_renamed(data, begin)
        for key in data:
            if key not in known:
                meant = (
                    nearest(str(key), known) or ": `retrofit distill --help` and `retrofit recipes show` name the keys"
                )
                raise RetrofitError(f"{begin}unknown key {key!r}{meant}")
        try:
            return cls(**data)
        except RetrofitError as error:
            raise RetrofitError(f"{begin}{error}") from None

    def to_recipe(self) -> dict[str, Any]:
        """The recipe as it was given: all keys of distillation, and transformers' where they are not its defaults."""
        return dict(self._recipe)

    def places(self) -> tuple[str, str, Path]:
        """``base``, ``data`` and ``output_dir``, once all three are known.

        Raises:
            RetrofitError: one is not.
        """
        for name in ("base", "data", "output_dir"):
            if getattr(self, name) is None:
                flag = name.replace("_", "-")
                raise RetrofitError(f"the recipe has no {name!r}: set it in the recipe or with --{flag}")
        return str(self.base), str(self.data), Path(str(self.output_dir))

    @property
    def sources(self) -> list[str]:
        """Everything that is read as data."""
        return [source for source in (self.data, *self.mix, self.eval_data) if source is not None]

    def start(self) -> None:
        """Do what ``TrainingArguments`` do when they are made, once; a trainer that gets the arguments calls this.

        Raises:
            RetrofitError: transformers refuses a value, a reporter is not installed, or DeepSpeed is missing.
        """
        if self._started:
            return
        self._started = True
        have = {one.name: getattr(self, one.name) for one in fields(self)}
        found: dict[str, Any] = {
            "deepspeed": find_config(self.deepspeed),
            "report_to": reporters(self.report_to),
            "per_device_eval_batch_size": self.per_device_eval_batch_size or self.per_device_train_batch_size,
            "num_train_epochs": self.num_train_epochs or 3.0,  # transformers' own default
            "load_best_model_at_end": have["load_best_model_at_end"] or self.patience is not None,
            "tf32": None,
            # with DeepSpeed, it would have its configuration ignored without a word
            "use_cpu": have["use_cpu"] or not (self.deepspeed or torch.accelerator.is_available()),
        }
        if CHECKPOINTING in have:
            found[CHECKPOINTING] = self.gradient_checkpointing
        if self.fsdp:
            found["fsdp_config"] = FSDP2 | (have["fsdp_config"] or {})
        if met_before():
            found["accelerator_config"] = (have["accelerator_config"] or {}) | {"use_configured_state": True}
        for name, value in found.items():
            setattr(self, name, value)
        if self.data_seed is None:
            # the order of the rows would otherwise depend on the process's random state, which a resumed run has not
            self.data_seed = self.seed
        # transformers would look for eval_loss, which we do not log, and take the largest KL for the best
        chooses = self.load_best_model_at_end or self.save_strategy == "best"
        if chooses or self.lr_scheduler_type == "reduce_lr_on_plateau":
            self.metric_for_best_model = self.metric_for_best_model or "kl"
        if self.metric_for_best_model and self.greater_is_better is None:
            self.greater_is_better = self.metric_for_best_model.endswith("gap_closed")
        # both keys of transformers set the precision of all products; the run does that for its own
        precision = torch.get_float32_matmul_precision()
        try:
            TrainingArguments.__post_init__(self)
        except ValueError as error:
            raise error if isinstance(error, RetrofitError) else RetrofitError(first_line(error)) from None
        self.tf32 = have["tf32"]
        torch.set_float32_matmul_precision(precision)


def reporters(report_to: Any) -> list[str]:
    """``"wandb,tensorboard"`` or a list of them for ``TrainingArguments``: ``"none"`` is empty, ``"all"`` every one.

    Raises:
        RetrofitError: one whose package is not installed.
    """
    names = [name for name in _named(report_to) if name != "none"]
    installed = get_available_reporting_integrations()
    if names == ["all"]:
        return list(installed)
    for name in names:
        if name not in installed:
            raise RetrofitError(f"report_to: {name!r} is not installed: pip install {name}, or remove it")
    return names


def _named(report_to: Any) -> list[str]:
    names = report_to.split(",") if isinstance(report_to, str) else report_to or []
    return [name for name in (str(each).strip() for each in names) if name]


def load_recipe(path_or_name: str | Path) -> DistillConfig:
    """Read a recipe file, or a shipped recipe by its name.

    Raises:
        RetrofitError: neither a file nor a shipped name; not valid YAML; not a valid recipe.
    """
    return DistillConfig.from_dict(read_recipe(path_or_name), where=str(path_or_name))

"""Recipes: the keys that a YAML file of one run may have, and where the files are. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from patches.errors import RetrofitError
from patches.options import LARGEST
from retrofit import recipes
from retrofit.settings import Checked, setting

# what a key may be called elsewhere, and what it is called here, in transformers and in TRL
RENAMED = {
    "output": "output_dir",
    "seq_len": "max_length",
    "steps": "max_steps",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "lr": "learning_rate",
    "local_lr": "local_learning_rate",
    "warmup": "warmup_steps",
    "scheduler": "lr_scheduler_type",
    "scheduler_options": "lr_scheduler_kwargs",
    "optimizer": "optim",
    "workers": "dataloader_num_workers",
    "activation_offload": "activation_offloading",
    "push_to": "push_to_hub: true and hub_model_id",
    "warmup_ratio": "warmup_steps",
    "evaluation_strategy": "eval_strategy",
    "max_seq_length": "max_length",
    "model_name_or_path": "base",
    "dataset_name": "data",
}


@dataclass
class DistillKeys(Checked):
    """What distillation adds to transformers' ``TrainingArguments``, and where its defaults differ."""

    groups: ClassVar[dict[str, str]] = {
        "base": "The run",
        "memory": "The memory",
        "data": "The data",
        "max_steps": "Training (every other field of transformers' TrainingArguments is a flag, too)",
        "loss": "Distillation",
        "gradient_checkpointing": "Memory and speed",
        "eval_steps": "How often",
    }

    base: str | None = setting(None, "Checkpoint of the base: a folder or a Hub id.")
    output_dir: str | None = setting(None, "Folder that the run writes.", short=("-o", "--output"), metavar="DIR")
    dtype: str = setting(
        "auto", "Dtype of the base; auto takes the checkpoint's own.", choices=("auto", "float32", "bfloat16")
    )
    init_adapter: str | None = setting(None, "Adapter or published AHN weights to continue from: a folder or a Hub id.")
    report_to: str | list[str] | None = setting(
        "none", "Where to report besides log.jsonl: wandb, trackio, tensorboard and the like, separated by commas."
    )

    memory: str = setting("ahn-gdn", "Kind of memory.")
    window: int = setting(32, "W: how many of the last tokens are kept exactly.", least=1)
    sinks: int = setting(4, "S: how many of the first tokens are kept exactly.", least=0)
    window_sampling: str = setting(
        "fixed",
        "fixed trains at W and S; ahn draws others for each step, as AHN's recipe does.",
        choices=("fixed", "ahn"),
    )
    layers: list[int] | None = setting(None, "Numbers of the layers that get the memory; all layers by default.")
    others: str = setting("full", "Attention of the layers without a memory.", choices=("full", "window"))
    options: dict[str, Any] = setting(dict, "Options of the memory.")
    by_layer: dict[str, Any] = setting(dict, "Settings of single layers: {0: {window: 64}, 4-7: {rows: 9}}.")
    lora: dict[str, Any] = setting(dict, "Train LoRA beside the memory, with these fields of peft.LoraConfig.")

    data: str | None = setting(
        None,
        "What to learn from: a text, JSONL or Parquet file, a folder saved by datasets, or a dataset id of the Hub.",
    )
    data_name: str | None = setting(None, "Configuration of a dataset that has several.")
    data_revision: str | None = setting(None, "Branch, tag or commit of a dataset of the Hub.")
    data_split: str = setting("train", "Split of a dataset.")
    data_format: str = setting(
        "auto",
        "text packs documents into rows, chat makes a row of each conversation, auto decides by the columns.",
        choices=("auto", "text", "chat"),
    )
    max_length: int = setting(512, "Tokens of a packed row, and the most that are kept of a conversation.", least=2)
    min_length: int = setting(0, "Leave out documents and conversations of at most this many tokens.", least=0)
    max_samples: int | None = setting(None, "Read only the first so many documents or conversations.", least=1)
    mix: dict[str, Any] = setting(
        dict, "Further sources, and how often a pass reads the rows of each: {code.jsonl: 2, speeches.txt: 0.5}."
    )
    eval_data: str | None = setting(None, "A source to score; nothing is then held out of the data.")
    packing: bool = setting(
        True,
        "Join documents and cut them into rows; false gives each document rows of its own, so that no memory goes from "
        "one to the next.",
    )
    streaming: bool = setting(False, "Read the data while training, for data that fits neither in memory nor on disk.")
    holdout: float = setting(
        0.1, "Share of the data, from its end, that is held out of training and scored.", least=1e-9, below=1
    )
    eval_rows: int = setting(48, "Held-out rows that are scored; of a stream, its first rows are held out.", least=1)

    max_steps: int = setting(-1, "Optimizer steps; if -1, as num_train_epochs says, or 600.", least=-1)
    num_train_epochs: float | None = setting(
        None, "Passes over the data, which decide the number of steps if max_steps does not.", above=0, most=1_000_000
    )
    per_device_train_batch_size: int = setting(4, "Rows per process and forward pass.", least=1)
    gradient_accumulation_steps: int = setting(1, "Forward passes per optimizer step.", least=1)
    # small bases want 1e-2 to 3e-2; AHN trains its memories on 3B to 14B bases at 1e-4
    learning_rate: float = setting(1e-2, "Peak learning rate of the memory.", above=0, most=1)
    warmup_steps: float = setting(0.1, "Warm-up steps; below 1, their share of all steps.", least=0, most=LARGEST)
    lr_scheduler_type: str = setting("cosine", "Schedule of the learning rate after the warm-up.")
    lr_scheduler_kwargs: dict[str, Any] = setting(dict, "Options of the schedule, such as {min_lr: 0.001}.")
    optim: str = setting("adamw_torch_fused", "Optimizer.")
    weight_decay: float = setting(0.0, "AdamW's weight decay.", least=0, most=1)
    adam_beta2: float = setting(0.98, "AdamW's second beta.", least=0, below=1)
    max_grad_norm: float = setting(
        1.0, "Largest norm of a gradient; larger ones are scaled down to it.", above=0, most=1_000_000_000
    )
    seed: int = setting(0, "Seed of the memory's initial values and of the order of the rows.", least=0, most=2**32 - 1)

    loss: str = setting(
        "kl",
        "kl compares with the base's own full attention, ce with the text, mse compares the attention's outputs layer "
        "by layer.",
        choices=("kl", "ce", "mse"),
    )
    mse_weight: float = setting(0.0, "Weight of the mse loss beside kl or ce.", least=0, most=1_000_000)
    temperature: float = setting(1.0, "Softmax temperature of teacher and student.", least=0.01, most=1000)
    label_shift: str = setting(
        "next",
        "next scores position t if token t + 1 is labelled, ahn if token t is, as AHN's code does.",
        choices=("next", "ahn"),
    )
    local_steps: int = setting(
        0, "Initial steps that train each layer separately, towards what the base's own attention gives there.", least=0
    )
    local_learning_rate: float | None = setting(
        None, "Peak learning rate of the local steps; learning_rate by default.", above=0, most=1
    )

    gradient_checkpointing: bool = setting(
        False, "Compute activations again in the backward pass instead of keeping them."
    )
    activation_offloading: bool = setting(False, "Keep activations in main memory until the backward pass needs them.")
    torch_compile: bool = setting(False, "Compile the student's forward and backward pass with torch.compile.")
    segment: int | None = setting(
        None,
        "Compute so many tokens of a row at a time, so that activations do not grow with max_length; the gradient is "
        "that of the whole row.",
        least=2,
    )
    segments_back: int | None = setting(
        None,
        "Cut the gradient before every so many segments, which is an approximation; by default it is never cut.",
        least=1,
    )
    offload_teacher: bool = setting(False, "With segment, keep the teacher's cache in main memory.")
    deepspeed: str | None = setting(
        None, "DeepSpeed's ZeRO instead of plain data parallelism: zero2, zero3 or a DeepSpeed JSON file."
    )
    fsdp: bool = setting(
        False, "Divide the base's weights among the processes with torch's FSDP2, for a base too large for one GPU."
    )
    tf32: bool = setting(
        False, "Multiply float32 numbers in TF32 on a GPU, which is faster and keeps 10 bits of the fraction."
    )
    group_by_length: bool = setting(False, "Put rows of like length into one batch, which saves padding.")
    dataloader_num_workers: int = setting(
        0, "Processes that read rows ahead for each training process.", least=0, most=64
    )

    eval_steps: float = setting(
        100, "Steps between two evaluations; below 1, their share of all steps.", above=0, most=LARGEST
    )
    save_steps: float = setting(
        100, "Steps between two checkpoints; below 1, their share of all steps.", above=0, most=LARGEST
    )
    save_total_limit: int | None = setting(2, "Maximum number of checkpoints to keep.", least=1)
    logging_steps: float = setting(1, "Steps between two entries of the log.", above=0, most=LARGEST)
    patience: int | None = setting(
        None, "Stop after so many evaluations without a smaller held-out KL, and take the best checkpoint.", least=1
    )
    push_to_hub: bool = setting(False, "Send the adapter of every checkpoint to the Hub.")
    hub_model_id: str | None = setting(None, "Repository for push_to_hub: user/name; the folder's name by default.")

    @property
    def of_memory(self) -> dict[str, Any]:
        """Where the memory is and what stays beside it, as arguments for :func:`retrofit.patch`."""
        return {key: getattr(self, key) for key in recipes.OF_MEMORY}


def refuse_renamed(keys: Any, begin: str = "") -> None:
    """Refuse names among ``keys`` that have another one here, mostly that of transformers and TRL.

    Raises:
        RetrofitError: with the right names.
    """
    found = [f"{key!r} is called {RENAMED[key]!r}" for key in keys if key in RENAMED]
    if found:
        raise RetrofitError(f"{begin}{', '.join(found)}: rename it (training has the keys of TRL's SFTConfig)")


def read_recipe(path_or_name: str | Path) -> dict[str, Any]:
    """As :func:`retrofit.recipes.read_recipe`; names that are other ones in transformers are refused."""
    found = recipes.read_recipe(path_or_name)
    refuse_renamed(found, f"{path_or_name}: ")
    return found

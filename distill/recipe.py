"""A recipe: everything one run needs, in one flat YAML file. Imports no torch: the command line reads recipes."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patches.errors import RetrofitError, nearest
from patches.options import LARGEST
from retrofit.import_guard import HERE
from retrofit.plain_yaml import parse_yaml
from retrofit.settings import Checked, setting, settings


@dataclass(frozen=True)
class Recipe(Checked):
    """One run. ``base``, ``data`` and ``output`` may be left to the command line.

    Raises:
        RetrofitError: a value is of the wrong type or out of range, or values do not go together.
    """

    # what
    base: str | None = setting(None, "Checkpoint of the base: a folder or a Hub id.")
    data: str | None = setting(
        None,
        "What to learn from: a text, JSONL or Parquet file, a folder saved by datasets, or a dataset id of the Hub.",
    )
    output: str | None = setting(None, "Folder that the run writes.", short=("-o",), metavar="DIR")
    dtype: str = setting(
        "auto", "Dtype of the base; auto takes the checkpoint's own.", choices=("auto", "float32", "bfloat16")
    )
    init_adapter: str | None = setting(None, "Adapter or published AHN weights to continue from: a folder or a Hub id.")
    report_to: str = setting(
        "none", "Where to report besides log.jsonl: wandb, trackio, tensorboard and the like, separated by commas."
    )

    # the memory
    memory: str = setting("ahn-gdn", "Kind of memory.")
    window: int = setting(32, "W: how many of the last tokens are kept exactly.", least=1)
    sinks: int = setting(4, "S: how many of the first tokens are kept exactly.", least=0)
    window_sampling: str = setting(
        "fixed",
        "fixed trains at W and S; ahn draws others for each step, as AHN's recipe does.",
        choices=("fixed", "ahn"),
        argument="window_sampling",
    )
    layers: list[int] | None = setting(None, "Numbers of the layers that get the memory; all layers by default.")
    others: str = setting("full", "Attention of the layers without a memory.", choices=("full", "window"))
    options: dict[str, Any] = setting(dict, "Options of the memory.")
    by_layer: dict[str, Any] = setting(
        dict, "Settings of single layers, as `retrofit allocate` writes them: {0: {window: 64}, 4-7: {rows: 9}}."
    )
    lora: dict[str, Any] = setting(dict, "Train LoRA beside the memory, with these fields of peft.LoraConfig.")

    # the data (docs/data.md)
    data_name: str | None = setting(None, "Configuration of a dataset that has several.")
    data_revision: str | None = setting(None, "Branch, tag or commit of a dataset of the Hub.")
    data_split: str = setting("train", "Split of a dataset.")
    data_format: str = setting(
        "auto",
        "text packs documents into rows, chat makes a row of each conversation, auto decides by the columns.",
        choices=("auto", "text", "chat"),
    )
    seq_len: int = setting(512, "Tokens of a packed row, and the most that are kept of a conversation.", least=2)
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

    # the fit
    steps: int = setting(600, "Optimizer steps.", least=1, argument="max_steps")
    epochs: float | None = setting(
        None, "Passes over the data, which then decide the number of steps.", above=0, most=1_000_000
    )
    batch_size: int = setting(4, "Rows per process and forward pass.", least=1, argument="per_device_train_batch_size")
    gradient_accumulation_steps: int = setting(
        1, "Forward passes per optimizer step.", least=1, argument="gradient_accumulation_steps"
    )
    lr: float = setting(1e-2, "Peak learning rate of the memory.", above=0, most=1, argument="learning_rate")
    local_steps: int = setting(
        0,
        "So many steps, the first ones, fit each layer by itself to what the base's own attention gives there.",
        least=0,
        argument="local_steps",
    )
    local_lr: float | None = setting(
        None,
        "Peak learning rate of the local steps; lr by default.",
        above=0,
        most=1,
        argument="local_lr",
    )
    warmup: float = setting(
        0.1, "Warm-up steps; below 1, their share of all steps.", least=0, most=LARGEST, argument="warmup_steps"
    )
    scheduler: str = setting(
        "cosine",
        "Schedule of the learning rate after the warm-up.",
        choices=(
            "linear",
            "cosine",
            "cosine_with_restarts",
            "cosine_with_min_lr",
            "polynomial",
            "constant",
            "constant_with_warmup",
            "inverse_sqrt",
            "warmup_stable_decay",
        ),
        argument="lr_scheduler_type",
    )
    scheduler_options: dict[str, Any] = setting(
        dict, "Options of the schedule, by transformers' names: {min_lr: 0.001}.", argument="lr_scheduler_kwargs"
    )
    optimizer: str = setting(
        "adamw_torch_fused",
        "Optimizer, by transformers' name.",
        choices=("adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "rmsprop", "adagrad"),
        argument="optim",
    )
    weight_decay: float = setting(0.0, "AdamW's weight decay.", least=0, most=1, argument="weight_decay")
    adam_beta2: float = setting(0.98, "AdamW's second beta.", least=0, below=1, argument="adam_beta2")
    max_grad_norm: float = setting(
        1.0,
        "Largest norm of a gradient; larger ones are scaled down to it.",
        above=0,
        most=1_000_000_000,
        argument="max_grad_norm",
    )
    loss: str = setting(
        "kl",
        "kl compares with the base's own full attention, ce with the text, mse compares the attention's outputs layer "
        "by layer.",
        choices=("kl", "ce", "mse"),
        argument="loss",
    )
    mse_weight: float = setting(
        0.0, "Weight of the mse loss beside kl or ce.", least=0, most=1_000_000, argument="mse_weight"
    )
    temperature: float = setting(
        1.0, "Softmax temperature of teacher and student.", least=0.01, most=1000, argument="temperature"
    )
    label_shift: str = setting(
        "next",
        "next scores position t if token t + 1 is labelled, ahn if token t is, as AHN's code does.",
        choices=("next", "ahn"),
        argument="label_shift",
    )
    group_by_length: bool = setting(
        False, "Put rows of like length into one batch, which saves padding.", argument="group_by_length"
    )
    workers: int = setting(
        0,
        "Processes that read rows ahead for each training process.",
        least=0,
        most=64,
        argument="dataloader_num_workers",
    )
    gradient_checkpointing: bool = setting(
        False, "Compute activations again in the backward pass instead of keeping them."
    )
    activation_offload: bool = setting(
        False, "Keep activations in main memory until the backward pass needs them.", argument="activation_offload"
    )
    torch_compile: bool = setting(
        False, "Compile the student's forward and backward pass with torch.compile.", argument="torch_compile"
    )
    segment: int | None = setting(
        None,
        "Compute so many tokens of a row at a time, so that activations do not grow with seq_len; the gradient is that "
        "of the whole row.",
        least=2,
        argument="segment",
    )
    segments_back: int | None = setting(
        None,
        "Cut the gradient before every so many segments, which is an approximation; by default it is never cut.",
        least=1,
        argument="segments_back",
    )
    offload_teacher: bool = setting(
        False, "With segment, keep the teacher's cache in main memory.", argument="offload_teacher"
    )
    deepspeed: str | None = setting(
        None, "DeepSpeed's ZeRO instead of plain data parallelism: zero2, zero3 or a DeepSpeed JSON file."
    )
    fsdp: bool = setting(
        False, "Divide the base's weights among the processes with torch's FSDP2, for a base too large for one GPU."
    )
    tf32: bool = setting(
        False, "Multiply float32 numbers in TF32 on a GPU, which is faster and keeps 10 bits of the fraction."
    )
    seed: int = setting(
        0, "Seed of the memory's initial values and of the order of the rows.", least=0, most=2**32 - 1, argument="seed"
    )

    # how often
    eval_steps: int = setting(100, "Steps between two evaluations.", least=1, argument="eval_steps")
    save_steps: int = setting(100, "Steps between two checkpoints.", least=1, argument="save_steps")
    save_total_limit: int = setting(2, "Keep the last so many checkpoints.", least=1, argument="save_total_limit")
    patience: int | None = setting(
        None,
        "Stop after so many evaluations without a new smallest held-out KL, and take the best checkpoint.",
        least=1,
    )
    push_to: str | None = setting(None, "Repository of the Hub that gets the adapter with every checkpoint: user/name.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if taken := set(self.options) & (settings(Recipe).keys() | {"model_kwargs"}):
            raise RetrofitError(f"options: {min(taken)!r} is not an option of a memory: make it a key of the recipe")
        if self.data_format != "text" and self.min_length >= self.seq_len:
            raise RetrofitError(
                f"min_length: {self.min_length} would leave out every conversation, because seq_len cuts them to "
                f"{self.seq_len} tokens"
            )
        for source, weight in self.mix.items():
            if type(weight) not in (int, float) or not 0 < weight <= 1000:
                raise RetrofitError(
                    f"mix: {source}: {weight!r} is not how often its rows are read: give a number above 0, at most 1000"
                )
        if self.streaming and (self.mix or self.epochs or self.workers or self.group_by_length):
            raise RetrofitError(
                "streaming: a stream has no known length and one reader: leave out mix, epochs, workers and "
                "group_by_length, or leave out streaming"
            )
        if self.patience and self.save_steps != self.eval_steps:
            raise RetrofitError(
                f"patience: the best evaluation's checkpoint must be there, so save_steps ({self.save_steps}) must be "
                f"equal to eval_steps ({self.eval_steps})"
            )
        if self.segment is None and (self.segments_back or self.offload_teacher):
            raise RetrofitError("segments_back and offload_teacher go with segment: set segment, or leave them out")
        if self.local_steps > self.steps and self.epochs is None:
            raise RetrofitError(
                f"local_steps: {self.local_steps} is more than the {self.steps} steps of the run, which include them: "
                "set more steps, or fewer local ones"
            )
        named = [other.get("window") for other in self.by_layer.values() if isinstance(other, dict)]
        self.check_length(min([self.window, *(window for window in named if type(window) is int)]))

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "recipe") -> "Recipe":
        """Build a recipe from the mapping a YAML file holds; ``where`` names the file in errors, if there is one.

        Raises:
            RetrofitError: an unknown key (with the nearest one), or as the class itself.
        """
        known, begin = list(settings(cls)), f"{where}: " if where else ""
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

    def check_length(self, window: int) -> None:
        """Refuse rows that never leave ``window``, that of a layer with the memory.

        With ``window_sampling`` too: held-out rows are scored at the window that is saved.
        """
        least = window + self.sinks + 2
        if self.seq_len < least:
            raise RetrofitError(
                f"seq_len: {self.seq_len} tokens never leave a window of {window} and {self.sinks} sinks, so a layer "
                f"with it has nothing to learn: set {least} or more, or set a smaller window"
            )

    def places(self) -> tuple[str, str, Path]:
        """``base``, ``data`` and ``output``, once all three are known.

        Raises:
            RetrofitError: one is not.
        """
        for name in ("base", "data", "output"):
            if getattr(self, name) is None:
                raise RetrofitError(f"the recipe has no {name!r}: set it in the recipe or with --{name}")
        return str(self.base), str(self.data), Path(str(self.output))

    @property
    def sources(self) -> list[str]:
        """Everything that is read as data."""
        return [source for source in (self.data, *self.mix, self.eval_data) if source is not None]

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary, every key in it."""
        return asdict(self)


def load_recipe(path_or_name: str | Path) -> Recipe:
    """Read a recipe file, or a shipped recipe by its name.

    Raises:
        RetrofitError: neither a file nor a shipped name; not valid YAML; not a valid recipe.
    """
    return Recipe.from_dict(read_recipe(path_or_name), where=str(path_or_name))


def read_recipe(path_or_name: str | Path) -> dict[str, Any]:
    """What a recipe's YAML holds, unchecked: the command line lays its flags over it before :meth:`Recipe.from_dict`.

    Raises:
        RetrofitError: neither a file nor a shipped name, not valid YAML, or not a mapping.
    """
    path = Path(path_or_name)
    if not path.is_file():
        shipped = shipped_recipes()
        if str(path_or_name) not in shipped:
            hint = nearest(str(path_or_name), shipped)
            raise RetrofitError(
                f"there is no recipe file or shipped recipe {path_or_name}{hint}: see `retrofit recipes ls`"
            )
        path = shipped[str(path_or_name)]
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise RetrofitError(f"{path_or_name}: not a YAML file: {error}") from error
    found = parse_yaml(text, str(path_or_name))
    if found is not None and not isinstance(found, dict):
        raise RetrofitError(
            f"{path_or_name}: a recipe is a mapping of keys to values, this is a {type(found).__name__}: write each "
            "setting as key: value"
        )
    return found or {}


def shipped_recipes() -> dict[str, Path]:
    """``{name: path}`` of the recipes that come with the package."""
    return {path.stem: path for path in sorted((HERE / "recipes").glob("*.yaml"))}

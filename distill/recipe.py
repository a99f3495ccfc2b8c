"""A recipe: everything one run needs, in one flat YAML file. Imports no torch: the command line reads recipes."""

import math
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_type_hints

from distill.plain_yaml import parse_yaml
from patches.errors import RetrofitError, nearest

CHOICES = {
    "others": ("full", "window"),
    "window_sampling": ("fixed", "ahn"),
    "label_shift": ("next", "ahn"),
    "loss": ("kl", "ce", "mse"),
    "dtype": ("auto", "float32", "bfloat16"),
    "data_format": ("auto", "text", "chat"),
}
# key: (smallest value, is it itself allowed)
BOUNDS = {
    "window": (1, True),
    "sinks": (0, True),
    "seq_len": (2, True),
    "eval_rows": (1, True),
    "steps": (1, True),
    "batch_size": (1, True),
    "gradient_accumulation_steps": (1, True),
    "eval_steps": (1, True),
    "save_steps": (1, True),
    "save_total_limit": (1, True),
    "seed": (0, True),
    "lr": (0, False),
    "temperature": (0, False),
    "mse_weight": (0, True),
    "adam_beta2": (0, True),
    "max_grad_norm": (0, False),
    "weight_decay": (0, True),
    "warmup": (0, True),
    "holdout": (0, False),
    "min_length": (0, True),
    "max_samples": (1, True),
}


@dataclass(frozen=True)
class Recipe:
    """One run. ``base``, ``data`` and ``output`` may be left to the command line.

    Raises:
        RetrofitError: a value is of the wrong type or out of range, or values do not go together.
    """

    # what
    base: str | None = None  # checkpoint: a folder or a Hub id
    data: str | None = None  # text, JSONL or Parquet file, a folder saved by datasets, a dataset id
    output: str | None = None  # folder for adapter/, model/, metrics.json, log.jsonl, checkpoint-*/
    dtype: str = "auto"  # of the base, by default the checkpoint's own; the memory is always fp32

    init_adapter: str | None = None  # continue from an adapter or from published AHN weights: a folder or a Hub id
    report_to: str = "none"  # wandb, trackio, tensorboard, ..., several with commas; log.jsonl is written anyway

    # the memory
    memory: str = "ahn-gdn"
    window: int = 32  # W, the last tokens kept exactly
    sinks: int = 4  # S, the first tokens kept exactly
    window_sampling: str = "fixed"  # "ahn": draw W and S anew for each step
    layers: list[int] | None = None  # layers that get the memory; all by default
    others: str = "full"  # attention of the remaining layers: "full" or "window"
    options: dict[str, Any] = field(default_factory=dict)  # the memory's own
    lora: dict[str, Any] = field(default_factory=dict)  # fields of peft.LoraConfig: LoRA trained beside the memory

    # the data (docs/data.md)
    data_name: str | None = None  # configuration of a dataset that has several
    data_revision: str | None = None  # branch, tag or commit of a dataset of the Hub
    data_split: str = "train"
    data_format: str = "auto"  # "text": packed into rows; "chat": a row per conversation; "auto": by its columns
    seq_len: int = 512  # tokens per packed row, the most that are kept of a conversation
    min_length: int = 0  # documents and conversations of at most so many tokens are left out
    max_samples: int | None = None  # only the first so many are read
    streaming: bool = False  # read while training: for what does not fit
    holdout: float = 0.1  # share of the tokens or conversations, from the end, that is never trained on
    eval_rows: int = 48  # held-out rows that are scored; of a stream, all that are held out, its first ones

    # the fit
    steps: int = 600
    batch_size: int = 4  # rows per process and micro-batch
    gradient_accumulation_steps: int = 1
    lr: float = 1e-2
    warmup: float = 0.1  # steps, or below 1 their share of all steps
    weight_decay: float = 0.0
    adam_beta2: float = 0.98
    max_grad_norm: float = 1.0
    loss: str = "kl"  # to the teacher; "ce": with the text; "mse": of the attention's outputs
    mse_weight: float = 0.0  # what the attention outputs' MSE counts beside kl or ce
    temperature: float = 1.0
    label_shift: str = "next"  # position t counts if token t + 1 is labelled; "ahn": if token t is
    gradient_checkpointing: bool = False
    deepspeed: str | None = None  # "zero2", "zero3" or a DeepSpeed JSON file; plain data parallelism by default
    seed: int = 0

    # how often
    eval_steps: int = 100
    save_steps: int = 100
    save_total_limit: int = 2

    def __post_init__(self) -> None:
        hints = get_type_hints(Recipe)
        for name in (f.name for f in fields(self)):
            object.__setattr__(self, name, _typed(name, getattr(self, name), hints[name]))
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise RetrofitError(f"{name}: {value!r} is not one of {', '.join(choices)}{nearest(value, choices)}")
        for name, (least, allowed) in BOUNDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not math.isfinite(value) or value < least or (value == least and not allowed):
                rule = f"{least} or more" if allowed else f"more than {least}"
                raise RetrofitError(f"{name}: {value} is out of range, it must be {rule}")
        if taken := set(self.options) & ({f.name for f in fields(self)} | {"model_kwargs"}):
            raise RetrofitError(f"options: {min(taken)!r} is not an option of a memory: give it as a key of its own")
        if self.seed >= 2**32:
            raise RetrofitError(f"seed: {self.seed} is out of range, it must be below 2**32")
        if self.adam_beta2 >= 1:
            raise RetrofitError(f"adam_beta2: {self.adam_beta2} is out of range, it must be below 1")
        if self.holdout >= 1:
            raise RetrofitError(f"holdout: {self.holdout} is out of range, it is a share of the tokens below 1")
        if self.data_format != "text" and self.min_length >= self.seq_len:
            raise RetrofitError(
                f"min_length: {self.min_length} leaves nothing of conversations cut to seq_len {self.seq_len}"
            )
        # with window_sampling too: held-out rows are scored at the window that is saved
        if self.seq_len < self.window + self.sinks + 2:
            raise RetrofitError(
                f"seq_len: {self.seq_len} tokens never leave a window of {self.window} and {self.sinks} sinks, so "
                f"there is nothing to learn: take {self.window + self.sinks + 2} or more, or a smaller window"
            )

    @classmethod
    def from_dict(cls, data: Any, where: str = "recipe") -> "Recipe":
        """Build a recipe from the mapping a YAML file holds; ``where`` names the file in errors.

        Raises:
            RetrofitError: not a mapping, an unknown key (with the nearest one), or as the class itself.
        """
        if not isinstance(data, dict):
            raise RetrofitError(f"{where}: a recipe is a mapping of keys to values, this is a {type(data).__name__}")
        known = [f.name for f in fields(cls)]
        for key in data:
            if key not in known:
                raise RetrofitError(
                    f"{where}: unknown key {key!r}{nearest(str(key), known)}; the keys are {', '.join(known)}"
                )
        try:
            return cls(**data)
        except RetrofitError as error:
            raise RetrofitError(f"{where}: {error}") from None

    def places(self) -> tuple[str, str, Path]:
        """``base``, ``data`` and ``output``, once all three are known.

        Raises:
            RetrofitError: one is not.
        """
        for name in ("base", "data", "output"):
            if getattr(self, name) is None:
                raise RetrofitError(f"the recipe leaves {name!r} open: give it there, or with a flag")
        return str(self.base), str(self.data), Path(str(self.output))

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary, every key in it."""
        return asdict(self)


def load_recipe(path_or_name: str | Path) -> Recipe:
    """Read a recipe file, or a shipped recipe by its name.

    Raises:
        RetrofitError: neither a file nor a shipped name; not valid YAML; not a valid recipe.
    """
    return Recipe.from_dict(read_recipe(path_or_name), where=str(path_or_name))


def read_recipe(path_or_name: str | Path) -> Any:
    """What a recipe's YAML holds, unchecked: the command line lays its flags over it before :meth:`Recipe.from_dict`.

    Raises:
        RetrofitError: neither a file nor a shipped name, or not valid YAML.
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
    return parse_yaml(text, str(path_or_name)) or {}


def shipped_recipes() -> dict[str, Path]:
    """``{name: path}`` of the recipes that come with the package."""
    return {path.stem: path for path in sorted(Path(str(files("recipes"))).glob("*.yaml"))}


def _typed(name: str, value: Any, hint: Any) -> Any:
    """``value`` as ``hint`` has it: whole numbers are floats too, true and false are no numbers."""
    allowed = get_args(hint) or (hint,)
    if bool not in allowed and isinstance(value, bool):
        pass
    elif hint is float and isinstance(value, int | float):
        return float(value)
    elif name == "layers":
        if value is None or (isinstance(value, list) and all(type(index) is int for index in value)):
            return value
    elif name in ("options", "lora"):
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return value
    elif isinstance(value, allowed):
        return value
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    wanted = {"layers": "a list of layer numbers", "options": "a mapping", "lora": "a mapping"}.get(name) or words[
        allowed[0]
    ]
    raise RetrofitError(f"{name}: {value!r} is not {wanted}")

"""DeepSpeed: which configuration, whether it can run here, and what ZeRO-3's partitioned weights need."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from patches.config import MemoryConfig
from patches.errors import RetrofitError, first_line, nearest
from patches.kinds import build_memory
from retrofit.adapter import load_adapter
from retrofit.evaluation import baselines
from retrofit.files import at_home
from retrofit.import_guard import HERE, installed_version
from retrofit.lm_head import is_shared
from retrofit.untrusted import read_json

OLDEST = "0.19.8"  # before it ZeRO-3 fails on frozen weights under gradient checkpointing (DeepSpeed pull request 8148)
SHIPPED = ("zero2", "zero3")
UNSUPPORTED = {
    "elasticity": "a run has one batch size",
    "tensor_parallel": "a memory is not split by heads",
    "sequence_parallel_size": "a memory reads a row from its beginning (set segment for long rows)",
    "pipeline": "teacher and student are one model in every process",
    "compression_training": "the base has to stay as it is",
    "autotuning": "it starts runs of its own",
}
FROM_THE_RECIPE = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}


def read_config(name: str | None) -> dict[str, Any] | None:
    """A DeepSpeed configuration: ``zero2`` or ``zero3`` for those that come with the package, or a file's.

    What the file leaves open and the recipe knows (batch sizes, the gradient's norm) is left to the recipe.

    Raises:
        RetrofitError: there is no such file, or it is not a DeepSpeed configuration.
    """
    if name is None:
        return None
    path = at_home(name)
    if name in SHIPPED:
        path = HERE / "recipes" / f"deepspeed-{name}.json"
    elif not path.is_file():
        hint = nearest(name, SHIPPED)
        raise RetrofitError(f"deepspeed: there is no file {name}{hint}: give zero2, zero3 or a DeepSpeed JSON file")
    config = read_json(path)
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if stage not in (1, 2, 3):
        raise RetrofitError(
            f"deepspeed: {path} sets zero_optimization.stage to {stage!r}, not to 1, 2 or 3: remove deepspeed from "
            "the recipe for plain data parallelism"
        )
    return FROM_THE_RECIPE | config


def find_config(name: str | None) -> dict[str, Any] | None:
    """As :func:`read_config`, checked by DeepSpeed itself, which has to be installed.

    Raises:
        RetrofitError: DeepSpeed is missing or too old, or refuses a value.
    """
    config = read_config(name)
    if config is None:
        return None
    found = installed_version("deepspeed")
    if found is None:
        raise RetrofitError("deepspeed is not installed: pip install 'retrofit-lm[deepspeed]'")
    if Version(found) < Version(OLDEST):
        raise RetrofitError(f"deepspeed {found} is too old, {OLDEST} or newer is needed: pip install -U deepspeed")
    zero = {key: value for key, value in config["zero_optimization"].items() if value != "auto"}
    for key in ("offload_param", "offload_optimizer"):
        if isinstance(zero.get(key), dict) and zero[key].get("device") == "nvme":
            raise RetrofitError(f"deepspeed: {name}: {key} to nvme is not supported: offload to cpu")
    for key, why in UNSUPPORTED.items():
        if config.get(key):
            raise RetrofitError(f"deepspeed: {name}: {key} is not supported, because {why}: remove it")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError  # which DeepSpeed needs

    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("zero_optimization", *first["loc"])))
        raise RetrofitError(
            f"deepspeed: {name}: {key} cannot be {first['input']!r} ({first['msg']}): correct or remove it"
        ) from None
    except Exception as error:  # what DeepSpeed's own checks raise
        raise RetrofitError(
            f"deepspeed: {name}: DeepSpeed refuses this zero_optimization ({first_line(error)}): correct or remove it"
        ) from None
    return config


@contextmanager
def agreeing(name: str | None) -> Iterator[None]:
    """Turn transformers' list of values that differ from the recipe's into one sentence.

    Raises:
        RetrofitError: the DeepSpeed configuration called ``name`` holds some.
    """
    try:
        yield
    except ValueError as error:
        values = [line.removeprefix("- ds ") for line in str(error).splitlines() if line.startswith("- ds ")]
        if not values:
            raise
        raise RetrofitError(
            f"deepspeed: {name} does not agree with the recipe ({'; '.join(values)}): write auto there, and remove "
            "bf16 and fp16"
        ) from None


@contextmanager
def starting() -> Iterator[None]:
    """Turn whatever DeepSpeed raises while it makes its engine into one sentence.

    Raises:
        RetrofitError: it raised something.
    """
    try:
        yield
    except Exception as error:  # assertions, wrong keyword arguments, missing keys: whatever a wrong value runs into
        if "RANK" not in os.environ:  # a script of the user's own
            raise RetrofitError("deepspeed: start the script with torchrun or accelerate launch") from error
        raise RetrofitError(
            f"deepspeed: DeepSpeed does not start with this configuration ({type(error).__name__}: "
            f"{first_line(error)}): correct or remove the key that it names"
        ) from error


def prepare_for_cpu() -> None:
    """Have DeepSpeed talk by gloo alone: its own shared memory wants a compiler, and waits for ever on a process that
    has failed."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def partition(model: nn.Module, config: dict[str, Any], device: torch.device) -> None:
    """Spread the weights over the processes, one after the other: the engine would put all of them on ``device`` first.

    Args:
        config: DeepSpeed's, its batch sizes filled in.
    """
    from deepspeed import zero

    with starting():
        zero.Init(module=model, config_dict_or_path=config)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def keep_base_out(accelerator: Any) -> None:
    """Have engine checkpoints hold the memory and not the base, which DeepSpeed saves and expects otherwise."""
    prepare = accelerator.prepare

    def prepare_engine(*objects: Any, **settings: Any) -> Any:
        with starting():
            prepared = prepare(*objects, **settings)
        wrapper = accelerator.deepspeed_engine_wrapped
        if wrapper is not None and not hasattr(wrapper.engine, "saves_memory_only"):
            engine = wrapper.engine
            save, load = engine.save_checkpoint, engine.load_checkpoint
            engine.save_checkpoint = lambda *args, **kwargs: save(*args, **kwargs | {"exclude_frozen_parameters": True})
            engine.load_checkpoint = lambda *args, **kwargs: load(*args, **kwargs | {"load_module_strict": False})
            engine.saves_memory_only = True
        return prepared

    accelerator.prepare = prepare_engine


def whole(base: str, adapter: Path, dtype: str) -> Any:
    """The fitted model put together from ``base`` and ``adapter`` on disk: no process has all of its weights."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # from_pretrained would partition them again
    return load_adapter(base, adapter, model_kwargs={"dtype": dtype})


def window_only(model: Any, window: int | None = None) -> Any:
    """As :func:`retrofit.evaluation.baselines.window_only`, of a model that may be partitioned.

    ZeRO-3 gathers a weight when the module that holds it runs, so there the modules themselves are shared: all but the
    attention of each layer and what is around it.
    """
    if not is_shared(model):
        return baselines.window_only(model, window)
    bare = MemoryConfig.from_dict(model.config.memory).window_only(window)
    twin, decoder = _shallow(model), _shallow(model.model)
    config = copy.copy(model.config)
    config.memory = bare.to_dict()
    twin.config = decoder.config = config
    layers = [_shallow(layer) for layer in decoder.layers]
    for layer, settings in zip(layers, bare.of_layers(config), strict=True):
        if settings is not None:
            layer.self_attn = _shallow(layer.self_attn)
            layer.self_attn.memory = build_memory(config, settings)
    decoder.layers = nn.ModuleList(layers)
    twin.model = decoder
    return twin


def _shallow(module: Any) -> Any:
    """A module that shares weights, hooks and children with ``module``, and whose children can be replaced."""
    twin = object.__new__(type(module))  # copy.copy would have FSDP's classes initialise it
    twin.__dict__.update(vars(module), _modules=dict(module._modules))
    return twin

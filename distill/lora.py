"""LoRA beside the memory: peft's own layers around the base's projections, trained together with it; off by default.

Two adapters come out: the memory's, as always, and one of peft's for the patched model. The teacher never has
the second: it stays the base as it was published. With LoRA the student no longer equals its base below the window.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from patches.errors import RetrofitError, first_line, nearest
from retrofit.adapter import PREFIX, WEIGHTS

FOLDER = "lora"
# the other fields of peft.LoraConfig that a recipe may set; peft has their defaults, and checks their values
FIELDS = ["r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"]
FIELDS += ["target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]  # of the attention: where the memory joins
# fields that train or change what the teacher shares, and what they may say
UNTOUCHED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "modules_to_save": (None,),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "inference_mode": (False,),
    "init_lora_weights": (True, False, "gaussian"),  # PiSSA and its like take a part of the base's weights away
}


def check_settings(given: dict[str, Any]) -> None:
    """Refuse what is no field of ``peft.LoraConfig`` that can be set here, or would change the teacher.

    Raises:
        RetrofitError: either, or peft is not installed.
    """
    if find_spec("peft") is None:
        raise RetrofitError("lora needs peft: pip install 'retrofit-lm[peft]'")
    for name, value in given.items():
        if name in UNTOUCHED:
            if value not in UNTOUCHED[name]:
                choices = " or ".join(map(repr, UNTOUCHED[name]))
                raise RetrofitError(f"lora: {name} {value!r} would change the teacher too: set it to {choices}")
        elif name not in FIELDS:
            known = [*FIELDS, *UNTOUCHED]
            raise RetrofitError(
                f"lora: {name!r} is not a field of peft.LoraConfig that a run can set{nearest(str(name), known)}: "
                f"those are {', '.join(known)}"
            )


def add_lora(model: Any, given: dict[str, Any]) -> None:
    """Wrap projections of ``model``, in place, and leave them and the memory as what is trained.

    Args:
        model: a retrofitted model.
        given: fields of ``peft.LoraConfig``; ``target_modules`` are the attention's projections by default.

    Raises:
        RetrofitError: peft is not installed, the settings name no layer that it can wrap, or would change the teacher.
    """
    check_settings(given)
    from peft import LoraConfig, LoraModel

    trained = [parameter for _, parameter in model.memory_parameters() if parameter.requires_grad]
    settings = {"target_modules": PROJECTIONS, "task_type": "CAUSAL_LM", **given, "exclude_modules": _excluded(given)}
    try:
        LoraModel(model, {"default": LoraConfig(**settings)}, "default")
        if not lora_layers(model):
            raise ValueError("they stand for no layers")
    except Exception as error:  # of any type: what peft's use of a wrong value happens to raise
        raise RetrofitError(
            f"lora: peft cannot use these fields ({first_line(error)}): correct them, and name linear layers of the "
            f"base as target_modules, such as {', '.join(PROJECTIONS)}"
        ) from None
    if {model.get_input_embeddings(), model.get_output_embeddings()} & set(lora_layers(model)):
        raise RetrofitError("lora: the teacher shares the embedding and the head: remove them from target_modules")
    for parameter in trained:  # peft freezes all but its own
        parameter.requires_grad_(True)
    for layer in lora_layers(model):
        for name, parameter in layer.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def _excluded(given: dict[str, Any]) -> str:
    """The memory, and what ``given`` excludes, as one regular expression for names."""
    named = given.get("exclude_modules", [])
    also = named if isinstance(named, str) else "|".join(rf"(.*\.)?{re.escape(name)}" for name in named)
    return r".*\.memory(\..*)?" + (f"|{also}" if also else "")


def lora_layers(model: Any) -> list[Any]:
    """The layers that peft has put around projections of ``model``; none without LoRA."""
    return [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "enable_adapters")]


@contextmanager
def lora_off(model: Any) -> Iterator[None]:
    """The base's own projections inside the block."""
    layers = lora_layers(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def save_lora(model: Any, folder: Path) -> None:
    """Write the LoRA weights to ``folder``, as peft does: ``PeftModel.from_pretrained(patched, folder)`` loads them."""
    from peft import get_peft_model_state_dict

    config = model.peft_config["default"]
    config.base_model_name_or_path = model.config.memory.get("base")
    config.save_pretrained(str(folder))
    weights = {PREFIX + name: tensor.contiguous() for name, tensor in get_peft_model_state_dict(model).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def load_lora(model: Any, folder: Path) -> None:
    """Load what :func:`save_lora` wrote into a model that has the same LoRA layers.

    Raises:
        RetrofitError: the file is missing, damaged, or of other layers.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    file = folder / WEIGHTS
    try:
        weights = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(file).items()}
        if weights.keys() != get_peft_model_state_dict(model).keys():
            raise RetrofitError(f"{file} does not hold the LoRA weights of this model")
        set_peft_model_state_dict(model, weights)
    except (SafetensorError, OSError, RuntimeError) as error:  # the last for shapes
        raise RetrofitError(f"{file} is missing, damaged or of another shape: {first_line(error)}") from None


def merge_lora(model: Any) -> None:
    """Add the LoRA weights to the base's, in place, and take peft's layers away."""
    layers = set(lora_layers(model))
    for name, module in list(model.named_modules()):
        if module in layers:
            parent, _, child = name.rpartition(".")
            module.merge(safe_merge=True)
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    del model.peft_config

"""LoRA beside the memory: peft's own layers around the base's projections, trained together with it; off by default.

Two adapters come out: the memory's, as always, and one of peft's for the patched model. The teacher never has
the second: it stays the base as it was published. With LoRA the student no longer equals its base below the window.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from patches.errors import RetrofitError, nearest
from retrofit.adapter import PREFIX, WEIGHTS
from retrofit.hub_errors import first_line

FOLDER = "lora"
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


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse what is no field of ``peft.LoraConfig``, or would change the teacher.

    Raises:
        RetrofitError: either, or peft is not installed.
    """
    try:
        from peft import LoraConfig
    except ImportError:
        raise RetrofitError("lora needs peft: pip install 'retrofit-lm[peft]'") from None
    if unknown := settings.keys() - LoraConfig.__dataclass_fields__.keys():
        name = min(unknown)
        hint = nearest(name, list(LoraConfig.__dataclass_fields__))
        raise RetrofitError(f"lora: {name!r} is not a field of peft.LoraConfig{hint}")
    for name, allowed in UNTOUCHED.items():
        if name in settings and settings[name] not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise RetrofitError(f"lora: {name} {settings[name]!r} would change the teacher too: set it to {choices}")


def add_lora(model: Any, settings: dict[str, Any]) -> None:
    """Wrap projections of ``model``, in place, and leave them and the memory as what is trained.

    Args:
        model: a retrofitted model.
        settings: fields of ``peft.LoraConfig``; ``target_modules`` are the attention's projections by default.

    Raises:
        RetrofitError: peft is not installed, does not take the settings, or would change the teacher with them.
    """
    check_settings(settings)
    from peft import LoraConfig, LoraModel

    trained = [parameter for _, parameter in model.memory_parameters() if parameter.requires_grad]
    own = {"target_modules": PROJECTIONS, "task_type": "CAUSAL_LM", "exclude_modules": r".*\.memory(\..*)?"}
    try:
        LoraModel(model, {"default": LoraConfig(**{**own, **settings})}, "default")
    except Exception as error:  # peft raises what its use of a wrong value happens to raise
        raise RetrofitError(f"lora: peft refuses these settings: {first_line(error)}") from None
    if {model.get_input_embeddings(), model.get_output_embeddings()} & set(lora_layers(model)):
        raise RetrofitError("lora: the teacher shares the embedding and the head: remove them from target_modules")
    for parameter in trained:  # peft freezes all but its own
        parameter.requires_grad_(True)
    for layer in lora_layers(model):
        for name, parameter in layer.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


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

"""Adapters: the memory's weights and configuration without the base, in PEFT's file layout but without needing PEFT."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from patches.config import MemoryConfig
from patches.errors import RetrofitError
from patches.kinds import find_kind

from .card import adapter_card
from .families import is_retrofit
from .files import write_folder, write_json, write_text
from .fingerprint import difference, fingerprint
from .hub_folder import fetch_folder
from .patching import patch
from .untrusted import read_json, read_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_TYPE = "RETROFIT"
OF_THE_BASE = ("base", "base_revision", "rotary_dtype")  # of a patched model's configuration, this is not the adapter's
PREFIX = "base_model.model."  # PEFT's name for the wrapped model, so that it finds our keys


def save_adapter(
    model: Any,
    path: str | Path,
    overwrite: bool = False,
    details: str = "",
    *,
    of_base: dict[str, Any] | None = None,
) -> None:
    """Write ``adapter_config.json``, ``adapter_model.safetensors`` (float32) and a model card to the folder ``path``.

    Args:
        model: a retrofitted model.
        path: folder to write; must be empty or new unless ``overwrite``.
        overwrite: replace what is there.
        details: Markdown for the card: the data, the command and the figures of the run that made it.
        of_base: the base's :func:`fingerprint`, where it was taken before the weights were spread over processes.

    Raises:
        RetrofitError: the model has no memory to save or one with weights that are not finite, or the folder holds
            something else.
    """
    if not is_retrofit(model):
        raise RetrofitError(f"{type(model).__name__} has no memory: patch it first with retrofit.patch")
    # float32 again where the model was cast as a whole, its memory with it
    weights = {
        PREFIX + name: parameter.detach().to("cpu", torch.float32, copy=True).contiguous()
        for name, parameter in model.memory_parameters()
    }
    check_finite(model)
    memory = model.config.memory
    config = {
        "peft_type": PEFT_TYPE,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": memory.get("base"),
        "revision": memory.get("base_revision"),
        "inference_mode": True,
        "memory": {key: value for key, value in memory.items() if key not in OF_THE_BASE},
        "fingerprint": of_base or fingerprint(model),
    }
    with write_folder(path, overwrite) as draft:
        write_json(draft / CONFIG, config)
        save_file(weights, draft / WEIGHTS, metadata={"format": "pt"})
        write_text(draft / "README.md", adapter_card(memory, details))


def load_adapter(
    base: PreTrainedModel | str,
    path: str | Path,
    revision: str | None = None,
    *,
    check_base: bool = True,
    token: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Patch ``base`` with the memory saved at ``path`` (folder or Hub id), its window and sinks included.

    Args:
        base: the model the adapter was made for, loaded or by path or id; its storage is shared, as in
            :func:`retrofit.patch`.
        path: folder written by :func:`save_adapter`, or the Hub id of one.
        revision: branch, tag or commit on the Hub.
        check_base: refuse a base other than the adapter's own (a fine-tune of it included).
        token: Hub token for a private adapter.
        model_kwargs: for loading ``base`` when it is a path or id.

    Returns:
        The patched model with the saved weights.

    Raises:
        RetrofitError: no adapter there, a damaged file, weights that do not fit, or another base.
    """
    folder = fetch_folder(path, [CONFIG, WEIGHTS, "README.md"], "adapter", revision, token)
    config = read_adapter_config(folder)
    model = patch_as(base, config["memory"], model_kwargs)
    if check_base:
        refuse_other_base(config["fingerprint"], model, f"the adapter {path}", config.get("base_model_name_or_path"))
    load_memory_weights(model, folder / WEIGHTS)
    return model


def patch_as(
    base: PreTrainedModel | str, memory: dict[str, Any], model_kwargs: dict[str, Any] | None = None, saved: bool = True
) -> Any:
    """``base`` patched as an adapter's configuration says; the memory's weights are fresh.

    Args:
        saved: whether there are weights for it: it may then be from before an option that new ones have.

    Raises:
        RetrofitError: as :func:`retrofit.patch`, or the configuration is damaged.
    """
    config = MemoryConfig.from_dict(memory)
    kind = find_kind(config.kind)
    options = asdict(kind.read_options(config.options, saved))
    return patch(
        base,
        config.kind,
        config.window,
        config.sinks,
        layers=config.layers,
        others=config.others,
        by_layer=config.by_layer,
        model_kwargs=model_kwargs,
        **options,
    )


def refuse_other_base(expected: dict[str, Any], model: Any, adapter: str, base: str | None) -> None:
    """Refuse a patched model whose base is not the one with the fingerprint ``expected``.

    Args:
        adapter: what the message calls the adapter.
        base: name of the base it was made for, if known.

    Raises:
        RetrofitError: it is another base, or the fingerprint is damaged.
    """
    found = difference(expected, model)
    if found:
        raise RetrofitError(
            f"{adapter} was made for {base or 'another model'}, and this base is a different one: {found}: "
            "give that base, or pass check_base=False to load_adapter to use this one anyway"
        )


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The parsed ``adapter_config.json`` of an adapter folder.

    Raises:
        RetrofitError: it is missing, not JSON, or of another kind of adapter.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise RetrofitError(f"{folder} has no {CONFIG}: give the folder of an adapter")
    config = read_json(file)
    if not isinstance(config, dict) or config.get("peft_type") != PEFT_TYPE:
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise RetrofitError(
            f"{folder} is an adapter of type {kind!r}: give one of type {PEFT_TYPE}, which retrofit.save_adapter writes"
        )
    for key in ("memory", "fingerprint"):
        if not isinstance(config.get(key), dict):
            raise RetrofitError(f"{file} has no {key!r}: the adapter is damaged, fetch it again")
    for key in ("base_model_name_or_path", "revision"):
        if not isinstance(config.get(key), str | None):
            raise RetrofitError(f"{file}: {key!r} is not a name: the adapter is damaged, fetch it again")
    return config


def check_finite(model: Any) -> None:
    """Refuse to save a memory that a run has spoilt.

    Raises:
        RetrofitError: a weight of it is not finite.
    """
    for name, parameter in model.memory_parameters():
        if not parameter.is_meta and not parameter.isfinite().all():
            raise RetrofitError(
                f"{name} holds values that are not finite: nothing was saved; train again with a smaller learning rate"
            )


def load_memory_weights(model: Any, file: str | Path) -> None:
    """Copy a safetensors file's tensors into the memory of ``model``.

    Raises:
        RetrofitError: the file is missing or damaged, its names or shapes are not exactly the memory's, or a value is
            not finite.
    """
    parameters = dict(model.memory_parameters())
    with torch.no_grad():
        for name, tensor in read_memory_weights(model, file).items():
            parameters[name].copy_(tensor)


def read_memory_weights(model: Any, file: str | Path) -> dict[str, Tensor]:
    """A safetensors file's tensors, by the names of the memory of ``model``.

    Raises:
        RetrofitError: as :func:`load_memory_weights`.
    """
    shapes = {name: parameter.shape for name, parameter in model.memory_parameters()}
    return read_tensors(file, shapes, lambda name: name.removeprefix(PREFIX))

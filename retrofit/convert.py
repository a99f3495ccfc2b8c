"""Published AHN weights (arXiv 2510.07318): their layout checked, then renamed into a patched model."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from patches.errors import RetrofitError, one_of
from patches.kinds import find_kind

from .families import base_type
from .fingerprint import SHAPE
from .hub_folder import fetch_folder
from .loading import load_config
from .patching import patch
from .untrusted import read_json, read_tensors

CONFIG, WEIGHTS = "config.json", "model.safetensors"
KINDS = {"GatedDeltaNet": "ahn-gdn", "DeltaNet": "ahn-dn", "Mamba2": "ahn-mamba2"}  # by `_ahn_implementation`
NORMS = {"ahn-gdn": "o_norm", "ahn-dn": "o_norm", "ahn-mamba2": "norm"}  # what our read_norm is called there
UNUSED = {"ahn-gdn": "D"}  # one number per head that is published but that nothing reads
# what our memories do not do; no published checkpoint asks for it
UNSUPPORTED = ("use_ahn_router", "use_q_proj", "fa_layer_ids")
OF_THE_BASE = ("model_type", *SHAPE, "rope_theta")
WINDOW, SINKS = 32640, 128  # of the paper's evaluations beyond 32k tokens


def convert_ahn(
    base: PreTrainedModel | str,
    path: str | Path,
    window: int = WINDOW,
    sinks: int = SINKS,
    *,
    revision: str | None = None,
    token: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Patch ``base`` with the AHN weights published at ``path``.

    Args:
        base: the model they were trained on, such as Qwen2.5-3B-Instruct; loaded, or by path or id. Its storage is
            shared, as in :func:`retrofit.patch`. A fine-tune of the same shape cannot be told from it.
        path: folder or Hub id that holds ``config.json`` and ``model.safetensors`` with
            ``model.layers.{i}.ahn.fn.*``, the memory's weights alone.
        window, sinks: W and S. The published configurations hold left-overs of training; these are the settings of the
            paper's evaluations on InfiniteBench and LV-Eval (on LongBench: 8064 and 128).
        revision: branch, tag or commit of ``path`` on the Hub.
        token: Hub token, for a private repository.
        model_kwargs: for loading ``base`` when it is a path or id.

    Returns:
        The patched model; :func:`retrofit.save_adapter` keeps it.

    Raises:
        RetrofitError: nothing there, another layout, an unknown or unsupported variant, weights for another base, or
            missing, additional or misshapen tensors, which it names.
    """
    folder = fetch_folder(path, [CONFIG, WEIGHTS], "AHN weights", revision, token)
    published = _read_config(folder)
    if isinstance(base, PreTrainedModel):
        config = base.config
    else:
        loading = {
            key: value for key, value in (model_kwargs or {}).items() if key in ("revision", "token", "cache_dir")
        }
        config = load_config(str(base), **loading)
    _check_base(published, config, path)
    kind = KINDS[published["_ahn_implementation"]]
    tensors = read_tensors(folder / WEIGHTS, _layout(kind, config))
    model = patch(base, kind, window, sinks, model_kwargs=model_kwargs)
    with torch.no_grad():
        for name, parameter in model.memory_parameters():
            parameter.copy_(tensors[published_name(kind, name)])
    return model


def published_name(kind: str, name: str) -> str:
    """What a parameter of our ``kind`` is called in published AHN weights."""
    for ours, theirs in (
        (".self_attn.memory.", ".ahn.fn."),
        ("read_norm.", f"{NORMS[kind]}."),
        ("read_proj.", "o_proj."),
    ):
        name = name.replace(ours, theirs)
    return name


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if not file.is_file():
        raise RetrofitError(f"{folder} has no {CONFIG}: give the folder of published AHN weights")
    config = read_json(file)
    variant = config.get("_ahn_implementation") if isinstance(config, dict) else None
    if variant is None:
        raise RetrofitError(f"{file} has no '_ahn_implementation': give the folder of published AHN weights")
    one_of(f"{file}: _ahn_implementation", variant, *KINDS)
    for name in UNSUPPORTED:
        if config.get(name):
            raise RetrofitError(
                f"{file} sets {name}={config[name]!r}, which Retrofit cannot convert: give other weights"
            )
    return config


def _check_base(published: dict[str, Any], config: Any, path: str | Path) -> None:
    """Compare what both configurations say of the base; a value that one of them leaves out is not compared."""
    rope = getattr(config, "rope_parameters", None) or {}
    ours = {name: getattr(config, name, None) for name in OF_THE_BASE}
    ours |= {"model_type": base_type(config), "rope_theta": rope.get("rope_theta", ours["rope_theta"])}
    theirs_of_rope = published.get("rope_parameters")
    theirs = {**(theirs_of_rope if isinstance(theirs_of_rope, dict) else {}), **published}
    for name, value in ours.items():
        if value is not None and theirs.get(name) is not None and theirs[name] != value:
            raise RetrofitError(
                f"the AHN weights {path} are for a base with {name}={theirs[name]}, this base has {value}: give the "
                "base they were trained on"
            )


def _layout(kind: str, config: Any) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of all layers of a base with this configuration."""
    cls = find_kind(kind)
    with torch.device("meta"):
        memory = cls(config, WINDOW, SINKS, cls.read_options({}))
    shapes = {published_name(kind, name): tuple(parameter.shape) for name, parameter in memory.named_parameters()}
    if kind in UNUSED:
        shapes[UNUSED[kind]] = (memory.heads,)
    layers = range(config.num_hidden_layers)
    return {f"model.layers.{i}.ahn.fn.{name}": shape for i in layers for name, shape in shapes.items()}

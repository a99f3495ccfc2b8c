"""Checkpoints in GGUF: which file a name means, and the model it becomes once transformers has dequantised it."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from patches.errors import RetrofitError

SUFFIX = ".gguf"
# what transformers notes of the file in the configuration it reads: none of it belongs to the model
OF_THE_FILE = ("quantization_config", "_model_name_or_path")


def locate(path: str) -> tuple[str, dict[str, str]]:
    """What ``from_pretrained`` must be called with to load ``path``.

    Args:
        path: a checkpoint's folder or Hub id; or, in GGUF, a file, a folder that holds one such file and no
            ``config.json``, or a Hub id and the file's name in it (``user/name/file.gguf``).

    Returns:
        The folder or Hub id, and ``{"gguf_file": name}`` for a checkpoint in GGUF.

    Raises:
        RetrofitError: the folder holds several GGUF files, the file is not there, or the ``gguf`` package is missing.
    """
    where = Path(path)
    if where.is_dir():
        found = [] if (where / "config.json").is_file() else sorted(where.glob(f"*{SUFFIX}"))
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise RetrofitError(f"{path} holds several GGUF files ({names}): give the path of the one to load")
        where = found[0] if found else where
    if where.suffix.lower() != SUFFIX:
        return path, {}
    if importlib.util.find_spec("gguf") is None:
        raise RetrofitError(f"{path} is a GGUF checkpoint: install the reader with `pip install 'retrofit-lm[gguf]'`")
    if where.is_file():
        return str(where.parent), {"gguf_file": where.name}
    repository, name = path.split("/")[:2], "/".join(path.split("/")[2:])
    if not name or path.startswith(("/", ".")):
        raise RetrofitError(f"there is no file {path!r}: a GGUF file on the Hub is named as user/name/file.gguf")
    return "/".join(repository), {"gguf_file": name}


def name_source(config: Any, path: str) -> None:
    """Let a configuration read from GGUF be that of an ordinary checkpoint whose name is ``path``."""
    for name in OF_THE_FILE:
        if hasattr(config, name):
            delattr(config, name)
    config._name_or_path = path


def unquantised(model: Any, path: str) -> PreTrainedModel:
    """The ordinary model behind one that transformers read from GGUF, on the same storage.

    What it reads is dequantised, yet still counts as quantised: it cannot be saved. A fresh model takes the weights.
    """
    name_source(model.config, path)
    with torch.device("meta"):
        fresh = type(model)(model.config)
    fresh.load_state_dict(model.state_dict(), assign=True)
    for name, buffer in model.named_buffers():  # rotary tables are in no state dict
        owner, _, leaf = name.rpartition(".")
        fresh.get_submodule(owner).register_buffer(leaf, buffer, persistent=False)
    fresh.tie_weights()
    fresh.generation_config = model.generation_config
    return fresh.train(model.training)

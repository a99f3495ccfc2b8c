"""What a run leaves on disk while it trains: ``checkpoint-N`` folders, without the base's weights."""

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from patches.errors import RetrofitError

MEMORY_FILE = "memory.safetensors"


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest step first."""
    found = (path for path in run.glob("checkpoint-*") if path.is_dir() and path.name.split("-")[-1].isdecimal())
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which ``checkpoint`` was written."""
    return int(checkpoint.name.split("-")[-1])


def drop_oldest(run: Path, keep: int) -> None:
    """Delete all but the last ``keep`` checkpoints of a run."""
    for path in checkpoints(run)[:-keep]:
        shutil.rmtree(path)


def save_memory(model: nn.Module, folder: Path) -> None:
    """Write the memory's parameters to ``folder``, each in its own dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in model.memory_parameters()}
    save_file(tensors, folder / MEMORY_FILE)


def load_memory(model: nn.Module, folder: Path) -> None:
    """Read what :func:`save_memory` wrote into ``model``, in place.

    Raises:
        RetrofitError: the file is missing or damaged, or belongs to another memory.
    """
    path = folder / MEMORY_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RetrofitError(f"{folder} is not a usable checkpoint ({error}): remove it to resume from an earlier one") from error
    parameters = dict(model.memory_parameters())
    if {name: tensor.shape for name, tensor in tensors.items()} != {name: p.shape for name, p in parameters.items()}:
        raise RetrofitError(f"{path} holds another memory than this run's: resume with the recipe it was made with")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])

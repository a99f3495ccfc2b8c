"""FSDP2: each process holds a share of every weight. torch does it for accelerate and the Trainer; here is the rest."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import SCHEDULER_NAME

from retrofit.adapter import read_memory_weights


def allow_on_cpu() -> None:
    """Have accelerate use FSDP without a GPU, which it does not look for there; gloo can do all that it needs.

    Call it once the processes have met, before an ``Accelerator`` is made.
    """
    from accelerate.state import DistributedType, PartialState

    if PartialState._shared_state["num_processes"] > 1:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def name_units(model: Any) -> None:
    """Have FSDP gather each memory by itself, in float32, beside its layer, which may be in 16 bits.

    accelerate makes a unit of every module whose class the model does not want split.
    """
    # a memory's output may be a view; nothing writes into it
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
    kinds = {type(memory).__name__ for memory in model.model.memories().values()}
    model._no_split_modules = [*(model._no_split_modules or ()), *sorted(kinds)]


def save_optimizer(trainer: Any, folder: str) -> None:
    """What ``Trainer._save_optimizer_and_scheduler`` writes, without the base. Every process must come here."""
    from accelerate.utils import save_fsdp_optimizer

    save_fsdp_optimizer(
        trainer.accelerator.state.fsdp_plugin, trainer.accelerator, trainer.optimizer, trainer.model, folder
    )
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), os.path.join(folder, SCHEDULER_NAME))


def load_memory(model: Any, file: Path) -> None:
    """:func:`retrofit.adapter.load_memory_weights` for a model in parts; each process takes its own."""
    from torch.distributed.tensor import distribute_tensor

    for memory in model.model.memories().values():
        memory.reshard()
    parts: dict[str, Any] = dict(model.memory_parameters())
    with torch.no_grad():
        for name, whole in read_memory_weights(model, file).items():
            mesh, placements = parts[name].device_mesh, parts[name].placements
            parts[name].copy_(distribute_tensor(whole.to(mesh.device_type), mesh, placements))

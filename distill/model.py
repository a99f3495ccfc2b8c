"""The model that a run starts from: the patched base with a fresh memory, an adapter's or published AHN weights."""

from pathlib import Path
from typing import Any

from transformers import set_seed

import retrofit
from distill.config import DistillConfig
from distill.data.rows import Rows
from distill.lora import add_lora
from patches.config import MemoryConfig
from patches.errors import RetrofitError
from patches.kinds import find_kind
from retrofit import adapter, convert
from retrofit.calibration import TOKENS, calibrate, row_length, spread
from retrofit.hub_folder import fetch_folder


def build_model(recipe: DistillConfig, *, fresh: bool = False) -> Any:
    """Load the recipe's base, patch it, and put LoRA beside the memory if the recipe wants that.

    Args:
        fresh: ignore ``init_adapter``, because the weights come from a checkpoint.

    Raises:
        RetrofitError: the base cannot be loaded, or ``init_adapter`` is for another base or another memory.
    """
    model = _patched(recipe, fresh)
    if recipe.lora:
        add_lora(model, recipe.lora)
    return model


def calibrate_on(model: Any, rows: Any, device: str | None = None) -> None:
    """Calibrate a fresh memory on training ``rows``: on :data:`retrofit.calibration.TOKENS`, spread evenly over them.

    Rows are cut to :func:`retrofit.calibration.row_length`. Of a stream, its first rows are taken. Memories
    that have nothing to calibrate are left as they are.

    Args:
        device: where to do it and to leave the model; by default where it is.
    """
    if not any(memory.calibrates for memory in model.model.memories().values()):
        return
    long = row_length(model)
    chosen = rows
    if isinstance(rows, Rows):
        chosen = [rows[index] for index in spread([min(long, length) for length in rows.lengths()])]
    taken, read = [], 0
    for row in chosen:
        taken.append(row["input_ids"][None, :long])
        read += taken[-1].shape[1]
        if chosen is rows and read >= TOKENS:  # a stream does not end
            break
    calibrate(model if device is None else model.to(device), taken)


def _patched(recipe: DistillConfig, fresh: bool) -> Any:
    base, _, _ = recipe.places()
    loading = {"dtype": recipe.dtype}
    set_seed(recipe.seed)
    if recipe.init_adapter is None or fresh:
        return retrofit.patch(
            base,
            memory=recipe.memory,
            model_kwargs=loading,
            **recipe.of_memory,
            **recipe.options,
        )
    files = [adapter.CONFIG, adapter.WEIGHTS, convert.CONFIG, convert.WEIGHTS]
    folder = fetch_folder(recipe.init_adapter, files, "adapter or AHN weights", None, None)
    if (folder / adapter.CONFIG).is_file():
        model = retrofit.load_adapter(base, folder, model_kwargs=loading)
    else:
        model = retrofit.convert_ahn(base, folder, recipe.window, recipe.sinks, model_kwargs=loading)
    _check_same_memory(recipe, MemoryConfig.from_dict(model.config.memory), folder)
    model.set_window(window=recipe.window, sinks=recipe.sinks)
    return model


def _check_same_memory(recipe: DistillConfig, saved: MemoryConfig, folder: Path) -> None:
    """Refuse weights of another memory than the recipe's; W and S may differ."""
    kind = find_kind(saved.kind)
    pairs = {"memory": (recipe.memory, saved.kind)}
    pairs |= {key: (getattr(recipe, key), getattr(saved, key)) for key in ("layers", "others", "by_layer")}
    if recipe.memory == saved.kind:
        pairs["options"] = (kind.read_options(recipe.options), kind.read_options(saved.options, saved=True))
    for key, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise RetrofitError(
                f"init_adapter: {folder} holds {key} {theirs!r}, the recipe asks for {ours!r}: make them alike"
            )

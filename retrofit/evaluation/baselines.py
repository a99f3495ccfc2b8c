"""What a memory is measured against: the same base with sinks and window only, at the same W or at the same bytes."""

import math
from typing import Any

from patches.config import MemoryConfig
from retrofit.costs.held import row_bytes, state_bytes
from retrofit.patching import patch


def window_only(model: Any, window: int | None = None) -> Any:
    """The same base and sinks without a memory, at ``window`` tokens (default: the model's own). Shares the weights."""
    memory = MemoryConfig.from_dict(model.config.memory)
    return patch(
        model,
        memory="none",
        window=memory.window if window is None else window,
        sinks=memory.sinks,
        layers=memory.layers,
        others=memory.others,
    )


def equal_memory_window(model: Any) -> int:
    """The window that costs a patched layer as many bytes as the model's window and memory together, rounded up."""
    rows = math.ceil(state_bytes(model) / row_bytes(model.config, model.dtype))
    return model.config.memory["window"] + rows

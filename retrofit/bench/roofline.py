"""What a machine would need at its best: nothing but the products, or nothing but moving weights and cache once."""

from typing import Any

import torch

from patches.config import MemoryConfig
from retrofit.bench.machine import Where
from retrofit.bench.timing import interleaved
from retrofit.costs.estimate import Device, costs, layer_memories
from retrofit.families import is_retrofit

# dense bfloat16 or float16, by what ends torch.cuda.get_device_name(); as the maker gives them
KNOWN = {"H100 80GB HBM3": Device(989, 3350), "H200": Device(989, 4800)}
PRODUCT = {"cpu": 1024, "cuda": 8192}  # side of the square matrices that measure the rest
COPIED = {"cpu": 2**27, "cuda": 2**31}  # bytes: beyond any cache
TRIES = 10


def peaks(where: Where) -> Device:
    """The maker's figures where they are known, else the best of a few products and copies now, ``TRIES`` of each.

    On a shared machine what is measured is what was left of it just then.
    """
    device, dtype = where.place(), where.torch_dtype()
    if device.type == "cuda" and dtype.itemsize == 2:
        for ending, known in KNOWN.items():
            if torch.cuda.get_device_name(device).endswith(ending):
                return known
    side, size = PRODUCT[device.type], COPIED[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = interleaved({"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, TRIES)
    product, copy = (min(values) for values in seconds.values())
    return Device(tflops=2 * side**3 / product / 1e12, bandwidth=2 * size / copy / 1e9)


def roofline(model: Any, length: int, best: Device) -> dict[str, float]:
    """Seconds that reading ``length`` tokens takes at least, tokens per second that can be decoded behind them at most.

    Reading: its operations at the peak, or the weights and the final cache moved once, whichever takes longer. Decoding
    one sequence: weights and cache moved once per token, a matrix state written back.
    """
    memories: list[Any] = [None] * model.config.num_hidden_layers
    extra = 0
    if active_memories(model):
        memories = layer_memories(model.config, MemoryConfig.from_dict(model.config.memory))
        extra = sum(parameter.numel() for _, parameter in model.memory_parameters())
    cost = costs(model.config, memories, length, 1, model.dtype, extra)
    moving = cost["decode_bytes"] / (best.bandwidth * 1e9)
    return {
        "prefill_roofline": max(cost["prefill_flops"] / (best.tflops * 1e12), moving),
        "decode_roofline": 1 / moving,
        "machine_tflops": best.tflops,
        "machine_bandwidth": best.bandwidth,
    }


def active_memories(model: Any) -> list[Any]:
    """The memories of a model's layers, where they are on."""
    on = is_retrofit(model) and model.model.memory_enabled
    return list(model.model.memories().values()) if on else []

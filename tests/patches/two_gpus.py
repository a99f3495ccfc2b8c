"""Trace a model over two GPUs that are not there.

Fake tensors have a device and no numbers, and an operation on tensors of two devices raises as it would on real ones.
"""

import ctypes
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, Qwen2Config

import patches.modeling
import patches.window
from patches.kinds import new_memory
from patches.sequence import Starts
from retrofit import calibration
from retrofit.needs import Needs
from retrofit.patching import skeleton

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
ON_SECOND = ("model.layers.1.", "model.norm.", "lm_head.")
W, S = 4, 1


def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **how: Any) -> Tensor:
    """Stands for ``scaled_dot_product_attention``, which asks a CUDA build for its kernel."""
    if how.get("enable_gqa"):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = q @ k.transpose(-1, -2)
    if attn_mask is not None:
        logits = logits + torch.where(attn_mask, 0.0, -1.0) if attn_mask.dtype == torch.bool else logits + attn_mask
    return logits.softmax(-1).to(v.dtype) @ v


def place(model: Any) -> None:
    """Make every weight fake, those of layer 1 and of what follows on the second device, hooked as accelerate does."""
    for name, module in model.named_modules():
        device = SECOND if f"{name}.".startswith(ON_SECOND) else FIRST
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    table[key] = torch.nn.Parameter(fake, False) if table is module._parameters else fake
    body = model.model
    for module, device in (
        (body.layers[0], FIRST),
        (body.layers[1], SECOND),
        (body.norm, SECOND),
        (model.lm_head, SECOND),
    ):
        add_hook_to_module(module, AlignDevicesHook(execution_device=device, skip_keys="past_key_values"))


def run(kind: str, pads: tuple[int, ...]) -> None:
    """Prefill, some tokens more and decoding past the window."""
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = skeleton(config, new_memory(kind, W, S))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        place(model)
        cache, seen, padded = DynamicCache(), 0, any(pads)
        for new in (10, 2, 1) if padded else (10, 1):
            ids = torch.zeros(2, new, dtype=torch.long, device=FIRST)
            mask = torch.ones(2, seen + new, dtype=torch.long, device=FIRST) if padded else None
            # where rows start is a question of numbers, asked at prefill alone
            known = mock.patch.object(patches.modeling, "find_starts", return_value=Starts(pads))
            with known if new > 1 else nullcontext():
                model(ids, attention_mask=mask, past_key_values=cache)
            seen += new
        devices = [{tensor.device for tensor in layer.tensors()} for layer in cache.layers]
        assert devices == [{FIRST}, {SECOND}], devices


def measure() -> None:
    """Calibration by need: what a layer is given stands beside what it makes of it."""
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = Qwen2Config(vocab_size=32, num_attention_heads=4, num_key_value_heads=2, **small)
    model = skeleton(config, new_memory("expected", W, S, options={"rows": 3, "shares": "need"}))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        place(model)
        texts = [torch.zeros(1, 40, dtype=torch.long, device=FIRST)]
        calibration.measure([Needs(model, calibration.weigh_layers(model), texts)], texts)


def main(guard: str, kinds: list[str]) -> None:
    """Print a line for each kind that fails, with the device guard built at ``guard``."""
    ctypes.CDLL(guard)
    os.environ["RETROFIT_KERNELS"] = "torch"  # its own forms; the others' kernels are tested where they are
    torch.nn.functional.scaled_dot_product_attention = attention
    patches.window.scaled_dot_product_attention = attention
    passes: dict[str, Callable[[], None]] = {
        f"{kind}, padded {pads}": partial(run, kind, pads) for kind in kinds for pads in ((0,), (0, 5))
    }
    for name, trace in {**passes, "rows by need": measure}.items():
        try:
            trace()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)

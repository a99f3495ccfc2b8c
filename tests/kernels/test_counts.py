"""What reading a long prompt and decoding launch on CUDA, counted on fake tensors: launches bound what a GPU can do.

And what a decoded token asks of torch, which bounds what a host can do: every operation counts, views and casts that
change nothing included.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

import retrofit
from patches.kinds import KINDS
from tests.conftest import tiny_base
from tests.helpers import S, W, awake, tokens
from tests.kernels import fake_cuda

# kernels of a layer that reads 131,072 tokens, W = 8,192; an op of flash-linear-attention counts as one
PREFILL = {
    "none": 75,
    "ahn-gdn": 110,
    "ahn-dn": 105,
    "ahn-mamba2": 115,
    "joint": 170,
    "infini": 110,
    "tensor-cache": 110,
    "compressive": 305,
    # two for each of 480 blocks, one after the other: who joins which row hangs on what the block before has written
    "kvm": 1610,
}
# and of one that then decodes a token, with what the model does once for all layers
DECODE = {
    "none": 63,
    "ahn-gdn": 103,
    "ahn-dn": 94,
    "ahn-mamba2": 97,
    "joint": 142,
    "infini": 91,
    "tensor-cache": 90,
    "compressive": 98,
    "kvm": 136,
}


def test_launches_of_a_layer(guard: Path) -> None:
    found = fake_cuda.run(guard, "count", ",".join(PREFILL), 131072, 8192)
    for kind, layer in found.items():
        for phase, most in (("prefill", PREFILL[kind]), ("decode", DECODE[kind])):
            assert layer[phase]["kernels"] <= most, (kind, phase, layer[phase])
            # from the host to the device; kvm's number of rows in each block while they grow, once for all layers
            assert layer[phase]["copied"] <= (kind == "kvm" and phase == "prefill"), (kind, phase)
            assert layer[phase]["waited"] == 0, (kind, phase)  # of the host for the device


# dispatched operations of a layer and token; the model's own share is spread over four layers
DISPATCHED = {"none": 60, "ahn-gdn": 95, "ahn-dn": 90, "ahn-mamba2": 95, "joint": 140, "kvm": 160}


class Dispatched(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return op(*args, **(kwargs or {}))


def dispatched(model: PreTrainedModel) -> float:
    """Operations of a layer for a token behind a full window."""
    cache, length = DynamicCache(config=model.config), 3 * W
    ids, mask = tokens(1, length + 2), torch.ones(1, length + 2, dtype=torch.long)
    with torch.inference_mode():
        for first, last in ((0, length), (length, length + 1)):
            model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache)
        with Dispatched() as counted:
            model(ids[:, length + 1 :], attention_mask=mask, past_key_values=cache)
    return counted.count / 4


@pytest.fixture(scope="module")
def four_layers() -> PreTrainedModel:
    return tiny_base("Qwen2", num_hidden_layers=4)


def test_dispatches_of_the_base(four_layers: PreTrainedModel) -> None:
    assert 60 <= dispatched(four_layers) <= 65  # what the others stand beside


@pytest.mark.parametrize("kind", DISPATCHED)
def test_dispatches_of_a_token(four_layers: PreTrainedModel, kind: str) -> None:
    assert dispatched(retrofit.patch(four_layers, kind, W, S)) <= DISPATCHED[kind]


class Widened(TorchDispatchMode):
    """The largest number of elements that were copied to another dtype at once."""

    most = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op is torch.ops.aten._to_copy.default and out.dtype != args[0].dtype:
            self.most = max(self.most, out.numel())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_copies_no_large_weight(kind: str) -> None:
    """A projection from all heads to the width, as large as the base's own, is read as it is kept."""
    model = awake(tiny_base("Qwen2", num_hidden_layers=1), kind, 2 * W).bfloat16()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model.model(tokens(1, 5 * W), past_key_values=cache)
        with Widened() as counted:
            model.model(tokens(1, 1), past_key_values=cache)
    assert counted.most < model.config.hidden_size**2

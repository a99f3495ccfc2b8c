"""Whole models through fla's kernels in Triton's interpreter, beside the torch forms: `make test-kernels`.

Every kind that calls a recurrence: a left-padded batch, its gradients, and generation.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import retrofit
from tests.conftest import tiny_base
from tests.helpers import S, W, awaken
from tests.kernels.arguments import forced

pytestmark = pytest.mark.usefixtures("interpreter")
LENGTH, PADDING = 2 * W + 5, 3
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ahn-gdn": ("ahn-gdn", {}),
    "ahn-dn": ("ahn-dn", {}),
    "ahn-mamba2": ("ahn-mamba2", {}),
    "shared-gdn": ("shared-gdn", {}),
    "shared-mamba2": ("shared-mamba2", {}),
    "joint": ("joint", {}),
    "joint, linear branch alone": ("joint", {"branches": "linear"}),
    "tensor-cache outer, two time scales": ("tensor-cache", {"two_timescale": True, "z_norm": True}),
    "tensor-cache delta, slots": ("tensor-cache", {"rule": "delta", "slots": 2}),
    "tensor-cache wedge": ("tensor-cache", {"rule": "wedge"}),
    "infini linear": ("infini", {}),
    "infini delta": ("infini", {"write": "delta"}),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_the_same_model(name: str) -> None:
    kind, options = KINDS[name]
    base = tiny_base("Qwen2", num_hidden_layers=1)
    model = awaken(retrofit.patch(base, kind, W, S, **options))
    with forced("fla"):
        ours = everything(model)
    with forced("torch"):
        theirs = everything(model)
    assert ours.keys() == theirs.keys()
    for what, expected in theirs.items():
        distance = (ours[what] - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
        assert distance < (1e-3 if what.startswith("d ") else 1e-4), what


def everything(model: Any) -> dict[str, Tensor]:
    """Logits of a left-padded batch, the memory's gradients, and the logits behind each token that is generated."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 101, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    model.zero_grad()
    logits = model(ids, attention_mask=mask).logits[mask.bool()]
    logits.square().mean().backward()
    found = {"logits": logits.detach()}
    found |= {f"d {n}": p.grad.clone() for n, p in model.memory_parameters() if p.grad is not None}
    with torch.no_grad():
        told = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=3,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return {**found, "generated": torch.stack(told.logits)}

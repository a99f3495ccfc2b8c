"""What reading a long prompt and decoding launch on CUDA, counted on fake tensors: launches bound what a GPU can do."""

from pathlib import Path

from tests.kernels import fake_cuda

# kernels of a layer that reads 131,072 tokens, W = 8,192; an op of flash-linear-attention counts as one
PREFILL = {
    "none": 90,
    "ahn-gdn": 140,
    "ahn-dn": 140,
    "ahn-mamba2": 140,
    "joint": 220,
    "infini": 165,
    "tensor-cache": 120,
}
# and of one that then decodes a token
DECODE = {"none": 64, "ahn-gdn": 97, "ahn-dn": 90, "ahn-mamba2": 106, "joint": 180, "infini": 140, "tensor-cache": 95}


def test_launches_of_a_layer(guard: Path) -> None:
    found = fake_cuda.run(guard, "count", ",".join(PREFILL), 131072, 8192)
    for kind, layer in found.items():
        for phase, most in (("prefill", PREFILL[kind]), ("decode", DECODE[kind])):
            assert layer[phase]["kernels"] <= most, (kind, phase, layer[phase])
            assert layer[phase]["copied"] == 0, (kind, phase)  # from the host to the device
            assert layer[phase]["waited"] == 0, (kind, phase)  # of the host for the device

"""KVM's merge in Triton, by its interpreter, beside torch's form: `make test-kernels`."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from patches import kernels
from retrofit.doctor import examine
from tests.conftest import tiny_base
from tests.helpers import ROOT, awake, feed, left_mask, logits, positions, tokens
from tests.kernels.arguments import forced

pytestmark = pytest.mark.usefixtures("interpreter")


def arguments(rows: int, tokens: int, dim: int, heads: int = 2) -> list[Tensor]:
    """Random rows, probes and what is written, for a batch of two."""
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, heads, *shape, generator=generator)

    head = torch.arange(2 * heads).view(2, heads, 1)
    return [normal(rows, 2 * dim + 4), normalize(normal(tokens, dim), dim=-1), normal(tokens, 2 * dim + 4), head]


def merged(backend: str, given: list[Tensor]) -> list[Tensor]:
    """The new rows, and the gradients of a weighted sum of them."""
    rows, probe, written, head = (x.clone() for x in given)
    rows.requires_grad_()
    written.requires_grad_()
    with forced(backend):
        assert kernels.find("merge", "cpu", rows.dtype, True)[0].backend == backend
        out = kernels.choose("merge", rows, written)(rows, probe, written, head)
    weighted = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
    return [out.detach(), *torch.autograd.grad(weighted, (rows, written))]


@pytest.mark.parametrize("shape", [(5, 3, 4), (16, 16, 16), (70, 33, 20), (130, 40, 128)], ids=str)
def test_the_same_rows_and_gradients(shape: tuple[int, int, int]) -> None:
    given = arguments(*shape)
    for ours, theirs in zip(merged("triton", given), merged("torch", given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_ties_go_to_the_first_row() -> None:
    """Rows of one direction, of any length and a rounding apart; far and near, in one tile and in two."""
    rows, probe, written, head = arguments(100, 20, 8)
    for first, second, length in ((0, 1, 3.0), (7, 90, 0.01), (30, 64, 1.0)):
        rows[:, :, second, :8] = rows[:, :, first, :8] * length * (1 + 2e-7)
    probe = normalize(rows[:, :, [1, 90, 64, 7, 0] * 4, :8], dim=-1)
    written[..., -1] = torch.arange(20.0)
    for ours, theirs in zip(
        *(merged(backend, [rows, probe, written, head]) for backend in ("triton", "torch")), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    changed = (merged("triton", [rows, probe, written, head])[0] != rows).any(-1)
    assert changed.nonzero()[:, 2].unique().tolist() == [0, 7, 30]


def test_a_row_that_is_zero_and_a_run_that_repeats() -> None:
    given = arguments(20, 40, 8)
    given[0][:, :, 3] = 0
    once, again, theirs = (merged(backend, given)[0] for backend in ("triton", "triton", "torch"))
    assert torch.equal(once, again)
    torch.testing.assert_close(once, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"rows": 6, "chunk": 4}, {"rows": 4, "chunk": 2, "positions": "edge"}], ids=str)
def test_a_model(options: dict[str, Any]) -> None:
    """A padded batch in one call, in pieces and decoded, and its gradients."""
    model = awake(tiny_base("Qwen2", num_hidden_layers=1), "kvm", 8, 2, **options)
    ids, mask = tokens(2, 34), left_mask([34, 21], 34)
    found = []
    for backend in ("triton", "torch"):
        with forced(backend):
            pieces, _ = feed(model, ids, [14, 9, *[1] * 11], mask, where=positions(mask))
            model.zero_grad()
            out = model(ids, attention_mask=mask, position_ids=positions(mask)).logits[mask.bool()]
            out.square().mean().backward()
            gradients = [parameter.grad.clone() for _, parameter in model.memory_parameters()]
            torch.testing.assert_close(pieces[mask.bool()], out.detach(), rtol=0, atol=1e-4)
            found.append([out.detach(), *gradients])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert logits(model, ids).isfinite().all()


def test_doctor_says_what_ran() -> None:
    with forced("triton"):
        found = {finding.name: finding.found for finding in examine()}
    assert found["memory kvm"] == "triton: merge"
    assert found["merge"] == "triton (forced: RETROFIT_KERNELS)"


COMPILED = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from patches import kvm_merge

pointers = {"probe": "*fp32", "rows": "*fp32", "written": "*fp32", "out": "*fp32", "target": "*i64", "tie": "fp32"}
tiles = {"WIDTH": int(sys.argv[2]), "TOKENS": kvm_merge.TOKENS, "ROWS": kvm_merge.ROWS, "COLUMNS": kvm_merge.COLUMNS}
for kernel in (kvm_merge.find, kvm_merge.add):
    fixed = {name: tiles[name] for name in kernel.arg_names if name in tiles}
    signature = {name: "constexpr" if name in fixed else pointers.get(name, "i32") for name in kernel.arg_names}
    found = compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", int(sys.argv[1]), 32))
    print(found.metadata.shared, "atom." in found.asm["ptx"])
"""


@pytest.mark.parametrize(("capability", "width"), [(80, 256), (90, 128)])
def test_the_kernels_compile(capability: int, width: int) -> None:
    """For a GPU that need not be there: what they ask of its shared memory, and that nothing is added atomically."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILED, str(capability), str(width)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for line in done.stdout.splitlines():
        shared, atomic = line.split()
        assert int(shared) <= 99 * 1024  # what the smallest of these cards have
        assert atomic == "False"

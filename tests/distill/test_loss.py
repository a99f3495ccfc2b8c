"""The chunked losses against their naive forms, against autograd, and against AHN's own numbers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from distill import loss
from distill.loss import chunked_ce, chunked_kl, naive_ce, naive_kl, scored_positions

ORACLE = Path(__file__).parents[3] / "shared" / "oracles" / "ahn_gdn.safetensors"


def states(
    positions: int = 7, width: int = 5, vocabulary: int = 11, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Student (with gradient), teacher, head weight, head bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((positions, width), (positions, width), (vocabulary, width), (vocabulary,))
    student, *rest = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return [student.requires_grad_(), *rest]


def targets(student: Tensor) -> Tensor:
    """A token per position; the first two share one."""
    return torch.arange(len(student)).sub(1).clamp(min=0)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_equals_the_naive_form_and_its_gradient(
    kind: str, chunk: int, with_bias: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher, weight, bias = states()
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", chunk * len(weight))
    naive, chunked = {"kl": (naive_kl, chunked_kl), "ce": (naive_ce, chunked_ce)}[kind]
    arguments = (student, teacher if kind == "kl" else targets(student), weight, bias if with_bias else None)
    share = torch.linspace(-1, 2, len(student), dtype=torch.float64)  # each position's loss has a gradient of its own
    expected = naive(*arguments, temperature=temperature)
    (expected_grad,) = torch.autograd.grad(expected @ share, student)
    losses = chunked(*arguments, temperature=temperature)
    (grad,) = torch.autograd.grad(losses @ share, student)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(chunked(*arguments, temperature=temperature), losses)


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher, weight, bias = states()
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 2 * len(weight))
    for run, other in ((chunked_kl, teacher), (chunked_ce, targets(student))):
        assert torch.autograd.gradcheck(
            lambda x, run=run, other=other: run(x, other, weight, bias, temperature=1.7),
            student,
            raise_exception=True,
        )


def test_cross_entropy_is_torchs() -> None:
    student, _, weight, bias = states()
    expected = torch.nn.functional.cross_entropy(student @ weight.T + bias, targets(student), reduction="none")
    torch.testing.assert_close(chunked_ce(student, targets(student), weight, bias), expected)


def test_only_the_student_gets_a_gradient() -> None:
    student, teacher, weight, _ = states()
    for frozen in (teacher, weight):
        frozen.requires_grad_()
    chunked_kl(student, teacher, weight).sum().backward()
    assert student.grad is not None
    assert teacher.grad is None
    assert weight.grad is None


def test_no_position_gives_zero_and_a_zero_gradient() -> None:
    student, teacher, weight, _ = states()
    nowhere = torch.zeros(len(student), dtype=torch.bool)
    loss = chunked_kl(student[nowhere], teacher[nowhere], weight).sum()
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(student.grad, torch.zeros_like(student))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_sixteen_bit_states_are_compared_as_exactly_as_float32_can(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher, weight, bias = of_real_scale(dtype)
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 10 * len(weight))
    wide = [tensor.double() for tensor in (student, teacher, weight, bias)]
    wide[0].requires_grad_()
    student.requires_grad_()
    naive, chunked = {"kl": (naive_kl, chunked_kl), "ce": (naive_ce, chunked_ce)}[kind]
    first, other = (wide[1], teacher) if kind == "kl" else (targets(student), targets(student))
    expected = naive(wide[0], first, *wide[2:])
    losses = chunked(student, other, weight, bias)
    expected.sum().backward()
    losses.sum().backward()
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double().mean(), expected.mean(), rtol=1e-4, atol=0)
    assert student.grad.dtype == dtype
    error = (student.grad.double() - wide[0].grad).norm() / wide[0].grad.norm()
    assert error < {torch.bfloat16: 2.5e-3, torch.float16: 3e-4}[dtype]  # its own rounding, and no more


def test_autocast_does_not_round_the_products() -> None:
    student, teacher, weight, bias = of_real_scale(torch.float32)
    plain = chunked_kl(student, teacher, weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(chunked_kl(student, teacher, weight, bias), plain)


def of_real_scale(dtype: torch.dtype) -> list[Tensor]:
    """Student, teacher, head and bias: logits as large as a language model's, KL of one thousandth."""
    generator = torch.Generator().manual_seed(0)
    teacher, weight, noise = (torch.randn(n, 64, generator=generator, dtype=torch.float64) for n in (48, 1024, 48))
    bias = torch.randn(1024, generator=generator, dtype=torch.float64)
    found = [tensor.to(dtype) for tensor in (teacher + 0.01 * noise, teacher, weight, bias)]
    _, teacher, weight, bias = (tensor.double() for tensor in found)
    assert 30 < (teacher @ weight.T + bias).abs().max() < 40
    return found


def test_scored_positions_look_at_the_next_label_or_at_their_own() -> None:
    labels = torch.tensor([[1, 2, -100, -100, 5, 6, 7], [-100] * 7])
    assert scored_positions(labels, 2)[0].tolist() == [False, False, False, True, True, True, False]
    assert scored_positions(labels, 2, "ahn")[0].tolist() == [False, False, False, False, True, True, True]
    assert not scored_positions(labels, 0)[1].any()


@pytest.mark.skipif(not ORACLE.exists(), reason=f"the reference tensors are not there: {ORACLE}")
def test_matches_the_reference_implementation() -> None:
    oracle = load_file(ORACLE)
    settings = json.loads(ORACLE.with_suffix(".json").read_text())["settings"]
    scored = scored_positions(oracle["train.labels"], 10, "ahn")
    assert scored[0].nonzero().flatten().tolist() == settings["valid_positions"]
    # logits as hidden states of an identity head
    reference, memory = (oracle[f"train.logits_{name}"] for name in ("ref", "mem"))
    identity = torch.eye(reference.shape[-1])
    for form in (naive_kl, chunked_kl):
        kl = form(memory[scored], reference[scored], identity).sum() / scored.sum()
        torch.testing.assert_close(kl, oracle["train.kl_loss"].squeeze(), rtol=0, atol=4e-7)

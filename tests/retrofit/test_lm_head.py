"""The head's products: evaluation in 16 bits against float64, and what a GPU would be asked for."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from retrofit import lm_head as module
from retrofit.evaluation.scores import score_hidden
from retrofit.lm_head import kl, log_probs, through_head
from tests.distill.test_loss import of_real_scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tile", [64 * 100, 2**24])
def test_scores_of_16_bit_models_are_those_of_float64(
    dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TILE_ELEMENTS", tile)
    student, teacher, weight, bias = of_real_scale(dtype)
    head = nn.Linear(64, 1024, dtype=dtype)
    head.weight.data, head.bias.data = weight, bias
    targets = torch.arange(len(student))
    with torch.no_grad():
        nll, divergence, _ = score_hidden({"teacher": teacher, "memory": student}, head, targets)["memory"]
    exact = [(states.double() @ weight.double().T + bias.double()).log_softmax(-1) for states in (teacher, student)]
    expected = (exact[0].exp() * (exact[0] - exact[1])).sum(-1)
    assert 5e-4 < expected.mean() < 2e-3
    torch.testing.assert_close(divergence.double().mean(), expected.mean(), rtol=1e-4, atol=0)
    torch.testing.assert_close(nll.double(), -exact[1].gather(-1, targets[:, None]).squeeze(-1), rtol=1e-6, atol=1e-5)


def test_a_gpu_multiplies_16_bits_into_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WIDE_GEMM", True)
    with FakeTensorMode():
        hidden, weight = (torch.empty(n, 64, dtype=torch.bfloat16, device="cuda") for n in (5, 100))
        found = log_probs(hidden, weight, temperature=2.0)
        back = through_head(found, weight)
    assert (found.dtype, found.shape, found.device.type) == (torch.float32, (5, 100), "cuda")
    assert (back.dtype, back.shape) == (torch.float32, (5, 64))


def test_kl_is_torchs() -> None:
    log_p, log_q = torch.randn(2, 5, 11, dtype=torch.float64).log_softmax(-1)
    expected = nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(kl(log_p, log_p.exp(), log_q), expected)

"""The start of ``joint`` that is calculated: exact where keys are few, nearer to full attention than no memory is."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

import retrofit
from distill.local_fit import LocalFit
from patches import joint_start
from patches.joint import JointMemory
from patches.rotary import rotate
from patches.step import Pass
from tests.helpers import S, W, tokens
from tests.patches.steps import make_step, rotary
from tests.patches.test_joint import FORMS

DIM, FEATURES, LONG = 8, 3, 90
TEXTS = [tokens(1, 120, seed) for seed in range(4)]


def still(positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rotary(positions)
    return torch.ones_like(cos), torch.zeros_like(sin)


def observed(config: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> JointMemory:
    """A memory that has looked twice at one text without positions and forgets nothing."""
    memory = JointMemory(config, W, S, JointMemory.read_options({"features": FEATURES}))
    memory.reset_parameters()
    memory.double()
    for branch in (memory.linear, memory.delta):
        branch.forget.bias.data.fill_(-60.0)
        branch.forget.weight.data.zero_()
    for again in (False, True):
        memory.observe(make_step(q, k, v, turns=still, x=x), again)
        memory.settle()
    return memory


@pytest.fixture
def of_few_keys(make_base: Any) -> dict[str, Any]:
    """Keys that lie on three points, and sinks that lie far off."""
    config = make_base("Llama", head_dim=DIM).config
    generator = torch.Generator().manual_seed(1)
    q, v, x = (torch.randn(1, n, LONG, d, generator=generator).double() for n, d in ((4, DIM), (2, DIM), (1, 64)))
    points = 2 * torch.randn(1, 2, FEATURES, DIM, generator=generator).double()
    which = torch.randint(FEATURES, (LONG,), generator=generator)
    k = points[:, :, which]
    k[:, :, :S] = 9.0
    return {"config": config, "q": q, "k": k, "v": v, "x": x[:, 0]}


def test_keys_on_as_many_points_as_features_are_read_exactly(of_few_keys: dict[str, Any]) -> None:
    memory = observed(**of_few_keys)
    q, k, v, x = (of_few_keys[name] for name in ("q", "k", "v", "x"))
    first, count = W + S, LONG - W - S
    memory.linear.write.weight.data.zero_()
    gates = memory.write_gates(x)[:, S : S + count].split(memory.states, -1)[::2]
    far, mass, _ = memory.linear(
        q[:, :, first:], k[:, :, S : S + count], pad(v[:, :, S : S + count], (0, 1), value=1.0), gates, None
    )
    differences = []
    for t in range(first + 20, LONG):  # before that the mass may be small beside MASS_EPS
        gone = slice(S, t - W + 1)
        logits = q[0, :, t].unflatten(0, (2, 2)) @ k[0, :, gone].mT * DIM**-0.5  # (H_kv, G, j)
        full = logits.softmax(-1) @ v[0, :, gone]
        torch.testing.assert_close(far[0, t - first], full.flatten(0, 1), atol=2e-3, rtol=2e-3)
        differences.append(logits.logsumexp(-1).flatten() - mass[0, t - first])
    assert torch.stack(differences).std(0).max() > 0.05, "what is left is for the logits to learn"


def test_sinks_have_no_part_in_it(of_few_keys: dict[str, Any]) -> None:
    memory = observed(**of_few_keys)
    moved = of_few_keys["k"].clone()
    moved[:, :, :S] = -50.0
    other = observed(**{**of_few_keys, "k": moved})
    for name in ("q_map", "k_map"):
        assert torch.equal(getattr(memory.linear, name), getattr(other.linear, name))


def test_the_mean_turn_gives_the_mean_product() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, DIM, generator=generator).double() for _ in range(2))
    now = Pass(0, 1, None, True, rotary, torch.device("cpu"), torch.device("cpu"))  # type: ignore[arg-type]
    turn = joint_start.mean_turn(now, 5, 40, DIM, torch.float64)
    at = lambda x, t: rotate(x, *rotary(torch.tensor([[t]])))  # noqa: E731
    products = [(at(q, 7 + ahead) * at(k, 7)).sum() for ahead in range(5, 40)]
    torch.testing.assert_close((q @ (k @ turn).mT).squeeze(), torch.stack(products).mean())


def test_logits_give_back_a_mass_that_the_input_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_start, "RIDGE", 1e-6)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).double() for shape in ((400, 6), (3, 6), (3,)))
    missing = x @ weight.T + bias
    found = joint_start.logit_weights({"x": list(x.split(100)), "missing": list(missing.split(100))})
    torch.testing.assert_close(x @ found[0].T + found[1], missing, atol=1e-3, rtol=0)


def test_heads_open_as_far_as_it_helps() -> None:
    best = joint_start.openness(
        {"own": torch.tensor([2.0, 2.0, 2.0, 0.0]), "full": torch.tensor([1.0, -1.0, 9.0, 0.0])}
    )
    assert best.tolist() == pytest.approx([0.5, joint_start.LEAST_OPEN, joint_start.MOST_OPEN, joint_start.LEAST_OPEN])


@pytest.mark.parametrize("family", ["Qwen2", "SmolLM3", "Mistral"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_nearer_to_full_attention_than_no_memory(
    make_base: Any, family: str, form: dict[str, Any], dtype: torch.dtype
) -> None:
    base: PreTrainedModel = make_base(family).to(dtype)
    model = retrofit.patch(base, "joint", W, S, **form)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items() if "memory" not in name}
    retrofit.calibrate(model, TEXTS)
    ids = tokens(2, 120, 9)
    scored = torch.zeros(2, 120, dtype=torch.bool)
    scored[:, W + S + 1 :] = True
    with torch.no_grad():
        errors = LocalFit(model).errors(model, {"input_ids": ids}, scored)
    assert errors.mean() < 0.9
    again = retrofit.patch(base, "joint", W, S, **form)
    again.load_state_dict(model.state_dict())
    retrofit.calibrate(again, TEXTS)
    first, second = ([p for _, p in one.memory_parameters()] for one in (model, again))
    assert all(a.isfinite().all() for a in first)
    known = [name for name, _ in model.memory_parameters() if "linear.k_map" in name or "logit" in name]
    assert known
    for name in known:
        assert torch.equal(model.get_parameter(name), again.get_parameter(name)), "the same texts, the same start"
    assert len(first) == len(second)
    assert all(torch.equal(base.state_dict()[name], tensor) for name, tensor in before.items())


def test_texts_within_the_window_leave_logits_and_openings(make_base: Any) -> None:
    model = retrofit.patch(make_base("Qwen3"), "joint", W, S)
    retrofit.calibrate(model, [tokens(1, W + S, 0)])
    for memory in model.model.memories().values():
        assert not memory.opening.any()
        assert not memory._known

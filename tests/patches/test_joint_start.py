"""The start of ``joint`` that is calculated: exact where keys are few, nearer to full attention than no memory is."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

import retrofit
from distill.local_fit import LocalFit
from patches import joint
from patches.errors import RetrofitError
from patches.joint import JointMemory
from patches.rotary import rotate
from patches.sequence import Pass, Starts
from tests.helpers import S, W, tokens
from tests.patches.steps import make_step, rotary
from tests.patches.test_joint import FORMS

DIM, FEATURES, LONG = 8, 3, 90
TEXTS = [tokens(1, 120, seed) for seed in range(4)]


def still(positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rotary(positions)
    return torch.ones_like(cos), torch.zeros_like(sin)


def observed(config: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **options: Any) -> JointMemory:
    """A memory that has looked twice at texts without positions and forgets nothing."""
    memory = JointMemory(config, W, S, JointMemory.read_options({"features": FEATURES, **options}))
    memory.reset_parameters()
    memory.double()
    for name, parameter in memory.named_parameters():
        if "forget" in name or "write" in name:
            parameter.data.fill_(-60.0 if name.endswith("forget.bias") else 0.0)
    for again in (False, True):
        memory.observe(make_step(memory, q, k, v, turns=still, x=x), again)
        memory.settle(torch.empty(0))
    return memory


@pytest.fixture
def of_few_keys(make_base: Any) -> dict[str, Any]:
    """Two texts whose keys lie on three points, and sinks that lie far off."""
    config = make_base("Llama", head_dim=DIM).config
    generator = torch.Generator().manual_seed(1)
    q, v = (torch.randn(2, heads, LONG, DIM, generator=generator).double() for heads in (4, 2))
    x = torch.randn(2, LONG, 64, generator=generator).double()
    points = 2 * torch.randn(1, 2, FEATURES, DIM, generator=generator).double()
    which = torch.randint(FEATURES, (LONG,), generator=generator)
    k = points[:, :, which].repeat(2, 1, 1, 1)
    k[:, :, :S] = 9.0
    return {"config": config, "q": q, "k": k, "v": v, "x": x}


@pytest.mark.parametrize("form", [form for form in FORMS.values() if "features" not in form], ids=str)
def test_keys_on_as_many_points_as_features_are_read_exactly(of_few_keys: dict[str, Any], form: dict[str, Any]) -> None:
    memory = observed(**of_few_keys, **form)
    q, k, v, x = (of_few_keys[name] for name in ("q", "k", "v", "x"))
    first, count = W + S, LONG - W - S
    gates = memory.write_gates(x).mT[:, :, S : S + count].split(memory.states, 1)[:: 1 + memory.both]
    values = pad(v[:, :, S : S + count], (0, 1), value=1.0)
    far, _, _ = memory.linear(q[:, :, first:], k[:, :, S : S + count], values, gates, None)
    for t in range(first + 20, LONG):  # before that the mass may be small beside MASS_EPS
        gone = slice(S, t - W + 1)
        logits = q[:, :, t].unflatten(1, (2, 2)) @ k[:, :, gone].mT * DIM**-0.5  # (B, H_kv, G, j)
        full = logits.softmax(-1) @ v[:, :, gone]
        torch.testing.assert_close(far[:, :, t - first], full.flatten(1, 2), atol=2e-3, rtol=2e-3)


def test_sinks_have_no_part_in_the_maps(of_few_keys: dict[str, Any]) -> None:
    memory = observed(**of_few_keys)
    moved = of_few_keys["k"].clone()
    moved[:, :, :S] = -50.0
    other = observed(**{**of_few_keys, "k": moved})
    for name in ("q_map", "k_map"):
        assert torch.equal(getattr(memory.linear, name), getattr(other.linear, name))


@pytest.mark.parametrize("scale", [1.0, 1.3], ids=["plain", "scaled as yarn does"])
def test_the_mean_turn_gives_the_mean_product(scale: float) -> None:
    def turns(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(positions)
        return scale * cos, scale * sin

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, DIM, generator=generator).double() for _ in range(2))
    now = Pass(0, 1, Starts(), True, turns, torch.device("cpu"), torch.device("cpu"))
    turn = joint.mean_turn(now, 5, 40, DIM, torch.float64)
    at = lambda x, t: rotate(x, *turns(torch.tensor([[t]])))  # noqa: E731
    products = [(at(q, 7 + ahead) * at(k, 7)).sum() for ahead in range(5, 40)]
    torch.testing.assert_close((q @ (k @ turn).mT).squeeze(), torch.stack(products).mean())


def test_logits_give_back_a_mass_that_the_input_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "RIDGE", 1e-6)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).double() for shape in ((400, 6), (3, 6), (3,)))
    missing = x @ weight.T + bias
    # with the mass that is missing a head has half of the softmax, and what it reads is worth 1, -1 or 9 times itself
    known = {"missing": missing, "excess": -missing, "gain": missing * 0 + torch.tensor([0.5, -0.5, 9.0])}
    known = {"x": x, "size": torch.ones_like(missing), **known}
    found, lead, openness = joint.logits_and_openness({name: list(x.split(100)) for name, x in known.items()})
    torch.testing.assert_close(x @ found.T + lead, missing, atol=1e-3, rtol=0)
    assert openness.tolist() == pytest.approx([0.9, joint.LEAST_OPEN, joint.MOST_OPEN], abs=1e-3)


@pytest.mark.parametrize("long", [W + S + 1, S + 2])
def test_short_texts_and_heads_without_values_give_numbers(make_base: Any, long: int) -> None:
    base = make_base("Qwen2")
    base.model.layers[0].self_attn.v_proj.weight.data.zero_()
    base.model.layers[0].self_attn.v_proj.bias.data.zero_()
    model = retrofit.patch(base, "joint", W, S)
    retrofit.calibrate(model, [tokens(1, long), tokens(3, long + 1)])
    assert all(parameter.isfinite().all() for _, parameter in model.memory_parameters())
    with pytest.raises(RetrofitError, match="longer than"):
        retrofit.calibrate(model, [tokens(1, S)])


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
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "the same texts, the same start"
    assert all(torch.equal(base.state_dict()[name], tensor) for name, tensor in before.items())

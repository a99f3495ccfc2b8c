"""Tensor Cache: the reference's numbers, the equations written out, streaming in float64, options and refusals."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import PreTrainedModel

import retrofit
from patches.errors import RetrofitError
from patches.memory import Pairs
from patches.tensor_cache import TensorCache, write_and_read
from tests.conftest import tiny_base
from tests.helpers import awake, close, feed, logits, tokens
from tests.patches import readable
from tests.patches.steps import make_step

CONFIG = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=16, head_dim=8)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"rule": "delta"},
    {"rule": "wedge"},
    {"population": "all"},
    {"rule": "delta", "population": "all", "two_timescale": True, "z_norm": True},
    {"slots": 3, "top_k": 2, "z_norm": True, "normalize_keys": False, "value_scale": 0.5},
    {"rule": "wedge", "slots": 2, "two_timescale": True, "normalize_queries": True, "temperature": 0.1},
]


def make(window: int, sinks: int = 0, **options: Any) -> TensorCache:
    """A float64 memory whose parameters are anything but their initial values."""
    memory = TensorCache(CONFIG, window, sinks, TensorCache.read_options(options)).double()
    torch.manual_seed(1)
    for parameter in memory.parameters():
        torch.nn.init.normal_(parameter)
    return memory


@pytest.fixture(scope="module")
def oracle(shared: Path) -> dict[str, Tensor]:
    return load_file(shared / "oracles" / "tensor_cache.safetensors")


@pytest.mark.parametrize("rule", ["outer", "delta"])
@pytest.mark.parametrize("unit", [False, True])
def test_reads_and_states_are_the_references(rule: str, unit: bool, oracle: dict[str, Tensor]) -> None:
    window = 6
    q, k, v = oracle["q"].unflatten(0, (2, 2)), oracle["k"], oracle["v"]
    k = k / (k.norm(dim=-1, keepdim=True) + 1e-5) if unit else k
    q, k, v = q[:, :, window:], k[:, None, :-window], v[:, None, :-window]
    eta, lam = (oracle[name][:, None, None].expand(k.shape[:3]) for name in ("eta", "lam"))
    for form in (partial(write_and_read, rule), lambda *rest: readable.tensor_cache(rule, *rest)):
        read, state = form(q, k, v, eta, lam.log(), None)
        suffix = f"{rule}_write_read{'_normk' if unit else ''}"
        close(read.flatten(0, 1), oracle[f"r_{suffix}"][:, window:])
        close(state[:, 0], oracle[f"A_{suffix}"])
    assert not oracle[f"r_{suffix}"][:, :window].any()


@pytest.mark.parametrize("rule", ["outer", "delta"])
def test_unit_keys_are_the_references(rule: str, oracle: dict[str, Tensor]) -> None:
    memory = make(window=6, rule=rule, normalize_keys=True)
    memory.load_state_dict({f"fast.{name}": oracle[name] for name in ("theta_lambda", "theta_eta")}, strict=False)
    q, k, v = (oracle[name][None] for name in ("q", "k", "v"))
    pairs = Pairs(q[:, :, 6:], k[:, :, :-6], v[:, :, :-6], start=0, lag=6, lead=0)
    read, state = memory.exchange(make_step(memory, q, k, v), pairs, {})
    close(read[0], oracle[f"r_{rule}_write_read_normk"][:, 6:])
    close(state["fast.matrix"][0], oracle[f"A_{rule}_write_read_normk"])


def test_what_is_added_is_the_references(oracle: dict[str, Tensor]) -> None:
    memory = make(window=6, normalize_keys=False)
    weights = {
        "fast.theta_lambda": oracle["theta_lambda"],
        "fast.theta_eta": oracle["theta_eta"],
        "gate": oracle["gate"],
        "W_tc.weight": oracle["W_tc"],
    }
    memory.load_state_dict(weights)
    heads, added = memory.attend(make_step(memory, *(oracle[name][None] for name in ("q", "k", "v"))))
    close(heads[0], oracle["local"])
    close(added[0], oracle["mem_out"])  # the reference's is behind the gate


@pytest.mark.parametrize("rule", ["outer", "delta", "wedge"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 75, 200])
@pytest.mark.usefixtures("poisoned_empty")
def test_fast_forms_are_the_equations(rule: str, length: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, length, 8, dtype=torch.float64) for heads in (2, 1, 1))
    k = k / k.norm(dim=-1, keepdim=True)
    strength = 0.5 * torch.rand(3, 1, length, dtype=torch.float64)
    log_decay = -0.1 * torch.rand(3, 1, length, dtype=torch.float64)
    # what the wedge rule keeps is not its A but the A of the outer rule, whose transpose is subtracted
    state = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    A = state - state.transpose(-1, -2) if rule == "wedge" else state
    expected, last = readable.tensor_cache(rule, q, k, v, strength, log_decay, A)
    read, state = write_and_read(rule, q, k, v, strength, log_decay, state)
    close(read, expected)
    close(state - state.transpose(-1, -2) if rule == "wedge" else state, last)


def by_hand(memory: TensorCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is added ``(n, E)`` for one row of ``q`` (4, n, 8), ``k``, ``v`` (2, n, 8), token by token."""
    o, n, W, S = memory.options, q.shape[1], memory.window, memory.sinks
    unit = lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-5)  # noqa: E731
    names = ("fast", "slow")[: 1 + o.two_timescale]
    A = {name: torch.zeros(2, o.slots, 8, 8, dtype=q.dtype) for name in names}
    z = {name: torch.zeros(2, o.slots, 8, dtype=q.dtype) for name in names}
    added = []
    for t in range(n):
        lags = [0] if o.population == "all" else [W]
        for j in (t - lag for lag in lags):
            for h in range(2):
                if j < S:
                    continue
                key, value = unit(k[h, j]) if o.normalize_keys else k[h, j], o.value_scale * v[h, j]
                s = int((unit(key) @ unit(memory.slot_keys[h]).T).argmax()) if o.slots > 1 else 0
                for name in names:
                    scale = getattr(memory, name)
                    lam, eta = scale.theta_lambda[h].sigmoid(), scale.theta_eta[h].sigmoid()
                    error = value - key @ A[name][h, s] if o.rule == "delta" else value
                    write = torch.outer(key, error)
                    write = write - write.T if o.rule == "wedge" else write
                    A[name][h, s] = lam * A[name][h, s] + eta * write
                    z[name][h, s] = lam * z[name][h, s] + eta * key
        reads = []
        for head in range(4):
            h, query = head // 2, unit(q[head, t]) if o.normalize_queries else q[head, t]
            weights = torch.ones(1, dtype=q.dtype)
            if o.slots > 1:
                scores = unit(query) @ unit(memory.slot_keys[h]).T / (8**0.5 * o.temperature)
                top = scores.topk(o.top_k)
                weights = torch.zeros(o.slots, dtype=q.dtype).scatter(0, top.indices, top.values.softmax(0))
            total = torch.zeros(8, dtype=q.dtype)
            for name in names:
                for s in range(o.slots):
                    found = query @ A[name][h, s]
                    found = found / (query @ z[name][h, s]).abs().clamp_min(1) if o.z_norm else found
                    total += weights[s] * found * (1 if name == "fast" else memory.alpha[h].sigmoid())
            reads.append(total if t >= W + S else torch.zeros_like(total))
        added.append(memory.gate.sigmoid() * memory.W_tc(torch.cat(reads)))
    return torch.stack(added)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_every_option_is_its_equation(options: dict[str, Any]) -> None:
    memory = make(window=5, sinks=2, **options)
    q, k, v = (3 * torch.randn(heads, 40, 8, dtype=torch.float64) for heads in (4, 2, 2))
    _, added = memory.attend(make_step(memory, q[None], k[None], v[None]))
    close(added[0], by_hand(memory, q, k, v))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_is_streaming(options: dict[str, Any]) -> None:
    model = awake(tiny_base("Qwen2").double(), "tensor-cache", **options)
    ids = tokens(2, 60)
    trained = model.train()(ids, use_cache=False).logits.detach()
    streamed, cache = feed(model.eval(), ids, [1] * 60)
    close(streamed, trained)
    close(feed(model, ids, [13, 20, 27])[0], trained)
    held = sum(tensor.untyped_storage().nbytes() for tensor in cache.layers[0].state.values())
    assert held == 2 * retrofit.kept_bytes(model)  # two rows


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_all_parameters_learn(options: dict[str, Any]) -> None:
    model = awake(tiny_base("Llama"), "tensor-cache", **options)
    model(tokens(2, 40), labels=tokens(2, 40)).loss.backward()
    for name, parameter in model.memory_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_a_token_goes_to_one_slot_and_the_others_stay() -> None:
    memory = make(window=4, slots=3, two_timescale=True)
    q, k, v = (torch.randn(1, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2))
    before = {f"{name}.matrix": torch.randn(1, 6, 8, 8, dtype=torch.float64) for name in ("fast", "slow")}
    pairs = Pairs(q[:, :, 4:], k[:, :, :1], v[:, :, :1], start=0, lag=4, lead=0)
    _, after = memory.exchange(make_step(memory, q, k, v), pairs, before)
    keys = k[0, :, 0] / k[0, :, 0].norm(dim=-1, keepdim=True)
    slot_keys = memory.slot_keys / memory.slot_keys.norm(dim=-1, keepdim=True)
    nearest = (slot_keys @ keys[:, :, None]).squeeze(-1).argmax(1)  # (H_kv,)
    expected = one_hot(nearest, 3).bool().flatten()
    for name, matrix in after.items():
        changed = (matrix != before[name]).flatten(2).any(2)[0]
        assert torch.equal(changed, expected), name


def test_long_keys_never_make_it_diverge() -> None:
    model = retrofit.patch(tiny_base("Qwen2"), "tensor-cache", window=8, sinks=2, rule="delta")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= 100
            layer.self_attn.memory.fast.theta_eta.fill_(200.0)  # eta of 1, the most there is
            layer.self_attn.memory.fast.theta_lambda.fill_(-200.0)
            layer.self_attn.memory.W_tc.weight.normal_()
        assert model(tokens(1, 400)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "outre"}, "did you mean 'outer'"),
        ({"population": "some"}, "one of evicted, all"),
        ({"rule": "delta", "normalize_keys": False}, "diverges"),
        ({"slots": 0}, "slots=0"),
        ({"slots": 2, "top_k": 3}, "top_k=3"),
        ({"top_k": True}, "top_k=True"),
        ({"temperature": 0}, "temperature=0"),
        ({"value_scale": float("nan")}, "value_scale=nan"),
        ({"z_norm": "yes"}, "z_norm='yes'"),
        ({"eta": 0.1}, "no option 'eta'"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], message: str, base_once: PreTrainedModel) -> None:
    with pytest.raises(RetrofitError, match=message):
        retrofit.patch(base_once, "tensor-cache", window=8, **options)


@pytest.fixture(scope="module")
def base_once() -> PreTrainedModel:
    return tiny_base("Qwen2")


def test_layers_can_be_chosen(base_once: PreTrainedModel) -> None:
    model = retrofit.patch(base_once, "tensor-cache", window=8, layers=[1], others="window")
    assert {name.split(".")[2] for name, _ in model.memory_parameters()} == {"1"}
    close(logits(model, tokens(1, 40)), logits(retrofit.patch(base_once, "none", window=8), tokens(1, 40)))

"""Infini-attention: the equations written out, streaming in float64, both positions, options and refusals."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import elu

import retrofit
from patches.errors import RetrofitError
from patches.infini import InfiniAttention, write_and_read
from patches.memory import WindowOnly
from patches.rotary import rotate
from tests.conftest import tiny_base
from tests.helpers import awake, close, feed, tokens
from tests.patches import readable
from tests.patches.steps import make_step, rotary

CONFIG = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=16, head_dim=8)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"write": "delta"},
    {"positions": "none"},
    {"population": "all"},
    {"write": "delta", "positions": "none", "population": "all"},
]


def make(window: int, sinks: int = 0, **options: Any) -> InfiniAttention:
    memory = InfiniAttention(CONFIG, window, sinks, InfiniAttention.read_options(options)).double()
    torch.manual_seed(1)
    for parameter in memory.parameters():
        torch.nn.init.normal_(parameter)
    return memory


@pytest.mark.parametrize("write", ["linear", "delta"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 75, 200])
@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.usefixtures("poisoned_empty")
def test_fast_forms_are_the_equations(write: str, length: int, continued: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, length + 9, 8, dtype=torch.float64) for heads in (2, 1, 1))
    q, k = elu(q - 2) + 1, elu(k - 2) + 1  # a key finds less than 1 of the first ones
    k[:, :, :2] = 0  # nothing to write yet
    k[0, :, :5] = 0
    before: Any = (None, None)
    if continued:
        *_, state, mass = readable.infini(write, q[:, :, :9], k[:, :, :9], v[:, :, :9])
        q, k, v, before = q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], (state, mass)
    expected = readable.infini(write, q, k, v, *before)
    for ours, theirs in zip(write_and_read(write, q, k, v, *before), expected, strict=True):
        close(ours, theirs)


def by_hand(memory: InfiniAttention, q: Tensor, k: Tensor, v: Tensor, local: Tensor) -> Tensor:
    """The heads ``(4, n, 8)`` for one row: unrotated ``q`` (4, n, 8), ``k``, ``v`` (2, n, 8), token by token."""
    n, W, S = q.shape[1], memory.window, memory.sinks
    if memory.options.positions == "rotated":
        q, k = (rotate(x[None], *rotary(torch.arange(n)[None]))[0] for x in (q, k))
    q, k = elu(q) + 1, elu(k) + 1
    M, z = torch.zeros(2, 8, 8, dtype=q.dtype), torch.zeros(2, 8, dtype=q.dtype)
    out = local.clone()
    for t in range(n):
        j = t if memory.options.population == "all" else t - W
        for h in range(2):
            if j >= S:
                value = v[h, j]
                if memory.options.write == "delta" and z[h].any():
                    value = value - k[h, j] @ M[h] / (k[h, j] @ z[h])
                M[h] += torch.outer(k[h, j], value)
                z[h] += k[h, j]
        for head in range(4):
            if t >= W + S:
                h, gate = head // 2, memory.factor[head] * memory.beta[head].sigmoid()
                read = q[head, t] @ M[h] / (q[head, t] @ z[h])
                out[head, t] = gate * read + (1 - gate) * local[head, t]
    return out


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_every_option_is_its_equation(options: dict[str, Any]) -> None:
    memory = make(window=5, sinks=2, **options)
    q, k, v = (2 * torch.randn(heads, 40, 8, dtype=torch.float64) for heads in (4, 2, 2))
    turned = (rotate(x[None], *rotary(torch.arange(40)[None])) for x in (q, k))
    step = make_step(memory, *turned, v[None])
    local, _ = WindowOnly(CONFIG, 5, 2, None).attend(step)
    heads, added = memory.attend(step)
    assert added is None
    close(heads[0], by_hand(memory, q, k, v, local[0]))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_is_streaming(options: dict[str, Any]) -> None:
    model = awake(tiny_base("Qwen2").double(), "infini", push=1.0, **options)
    ids = tokens(2, 60)
    trained = model.train()(ids, use_cache=False).logits.detach()
    streamed, cache = feed(model.eval(), ids, [1] * 60)
    close(streamed, trained)
    close(feed(model, ids, [13, 20, 27])[0], trained)
    held = sum(tensor.untyped_storage().nbytes() for tensor in cache.layers[0].state.values())
    assert held == 2 * retrofit.kept_bytes(model)  # two rows


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_closed_gate_leaves_the_window_alone(options: dict[str, Any]) -> None:
    base, ids = tiny_base("Llama"), tokens(2, 40)
    fresh, window = retrofit.patch(base, "infini", 8, 2, **options), retrofit.patch(base, "none", 8, 2)
    assert torch.equal(fresh(ids).logits, window(ids).logits)
    fresh(ids, labels=ids).loss.backward()
    learning = {name.rpartition(".")[2] for name, p in fresh.memory_parameters() if p.grad.any()}
    assert learning == {"factor"}  # and the gate once this has moved
    model = awake(base, "infini", **options)
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad.any() for _, parameter in model.memory_parameters())


@pytest.mark.parametrize("write", ["linear", "delta"])
def test_long_keys_stay_finite(write: str) -> None:
    memory = make(window=5, write=write)
    q, k, v = (torch.randn(1, heads, 2000, 8, dtype=torch.float64) for heads in (4, 2, 2))
    heads, _ = memory.attend(make_step(memory, 100 * q, 100 * k, v))  # some features are zero in every channel
    assert heads.isfinite().all()
    assert heads.abs().max() < 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"write": "linaer"}, "did you mean 'linear'"),
        ({"positions": "rope"}, "one of rotated, none"),
        ({"population": 3}, "one of evicted, all"),
        ({"rule": "delta"}, "no option 'rule'"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RetrofitError, match=message):
        retrofit.patch(tiny_base("Qwen2"), "infini", window=8, **options)

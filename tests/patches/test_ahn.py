"""AHN-GDN and AHN-DN: one attention layer written out token by token, and where the parameters start."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import retrofit
from tests.helpers import S, W, awake, close, feed, tokens

LENGTH = 26


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def written_out(attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The layer's output for one text ``x`` (T, E), loops over tokens and heads."""
    memory, heads, dim = attention.memory, attention.memory.heads, attention.head_dim
    group = heads // attention.memory.kv_heads

    def rotated(h: Tensor) -> Tensor:
        half = dim // 2
        return h * cos + torch.cat([-h[:, half:], h[:, :half]], -1) * sin

    out = torch.zeros(LENGTH, heads, dim, dtype=x.dtype)
    for head in range(heads):
        own, shared = slice(head * dim, (head + 1) * dim), slice(head // group * dim, (head // group + 1) * dim)
        q, k, v = attention.q_proj(x)[:, own], attention.k_proj(x)[:, shared], attention.v_proj(x)[:, shared]
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = rotated(q), rotated(k)
        state = torch.zeros(dim, dim, dtype=x.dtype)
        for t in range(LENGTH):
            seen = [j for j in range(t + 1) if t - j < W or j < S]
            out[t, head] = ((k[seen] @ q[t]) / math.sqrt(dim)).softmax(-1) @ v[seen]
            j = t - W
            if j < S:
                continue
            beta = (memory.b_proj.weight[head] @ x[j]).sigmoid()
            if hasattr(memory, "A_log"):
                step = torch.nn.functional.softplus(memory.a_proj.weight[head] @ x[j] + memory.dt_bias[head])
                state = state * (-memory.A_log[head].exp() * step).exp()
            state = state + beta * torch.outer(unit(k[j]), v[j] - unit(k[j]) @ state)
            read = unit(q[t]) @ state / math.sqrt(dim)
            read = read / (read.square().mean() + 1e-5).sqrt() * memory.read_norm.weight
            gate = memory.g_proj.weight[head] @ x[t]
            out[t, head] += (read * gate * gate.sigmoid()) @ memory.read_proj.weight[head]
    return attention.o_proj(out.flatten(1))


@pytest.mark.parametrize("kind", ["ahn-gdn", "ahn-dn"])
@torch.no_grad()
def test_one_layer_written_out(base: PreTrainedModel, kind: str) -> None:
    model = awake(base.double(), kind)
    seen: dict[str, Any] = {}

    def look(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.update(kwargs, output=output[0])

    model.model.layers[1].self_attn.register_forward_hook(look, with_kwargs=True)
    model(tokens(2, LENGTH), use_cache=False)
    cos, sin = seen["position_embeddings"]
    for row in range(2):
        x = seen["hidden_states"][row]
        close(seen["output"][row], written_out(model.model.layers[1].self_attn, x, cos[0], sin[0]))


@pytest.mark.parametrize(("kind", "tensors"), [("ahn-gdn", 7), ("ahn-dn", 4)])
def test_it_starts_where_the_published_models_do(
    kind: str, tensors: int, make_base: Callable[..., PreTrainedModel]
) -> None:
    torch.manual_seed(0)
    model = retrofit.patch(make_base("Qwen2", hidden_size=256, num_hidden_layers=8), kind, W, S)
    found: dict[str, list[Tensor]] = {}
    for name, parameter in model.memory_parameters():
        found.setdefault(name.rpartition(".memory.")[2], []).append(parameter.detach())
    assert len(found) == tensors
    whole = {name: torch.cat([p.flatten() for p in each]) for name, each in found.items()}
    assert not whole["read_proj.weight"].any()
    assert (whole["read_norm.weight"] == 1).all()
    for name in found:
        if name in ("a_proj.weight", "b_proj.weight", "g_proj.weight"):
            assert whole[name].std() == pytest.approx(0.02, rel=0.05)
            assert abs(whole[name].mean()) < 1e-3
            assert not torch.equal(found[name][0], found[name][1]), "layers share their first draw"
    if kind == "ahn-gdn":
        assert found["read_proj.weight"][0].shape == (4, 16, 16)
        assert whole["A_log"].exp().max() <= 16.001
        steps = torch.nn.functional.softplus(whole["dt_bias"])
        assert steps.min() >= 0.99e-3
        assert steps.max() <= 0.101


@pytest.mark.parametrize("rule", ["gdn", "dn", "mamba2"])
@pytest.mark.parametrize("key_heads", [4, 1])
@torch.no_grad()
def test_a_shared_state_is_a_published_one_whose_query_heads_write_alike(
    rule: str, key_heads: int, make_base: Callable[..., PreTrainedModel]
) -> None:
    base = make_base("Qwen2", num_key_value_heads=key_heads).double()
    shared, published = awake(base, f"shared-{rule}"), awake(base, f"ahn-{rule}")
    for theirs, ours in zip(published.model.memories().values(), shared.model.memories().values(), strict=True):
        for name, parameter in theirs.named_parameters():
            own = ours.get_parameter(name)
            parameter.copy_(own.repeat_interleave(len(parameter) // len(own), 0))
    pieces = [3, 20, 1, 1, 40]
    read, cache = feed(shared, tokens(2, sum(pieces)), pieces)
    expected, theirs = feed(published, tokens(2, sum(pieces)), pieces)
    torch.testing.assert_close(read, expected, rtol=0, atol=0 if key_heads == 4 else 1e-9)
    for ours, layer in zip(cache.layers, theirs.layers, strict=True):
        assert ours.state["matrix"].shape == (2, key_heads, 16, 16)
        close(ours.state["matrix"].repeat_interleave(4 // key_heads, 1), layer.state["matrix"])


def test_the_decay_is_computed_in_float32_whatever_it_is_kept_in(make_base: Callable[..., PreTrainedModel]) -> None:
    model = awake(make_base("Qwen2").to(torch.bfloat16), "ahn-gdn")
    model.to(torch.bfloat16)  # as DeepSpeed's bf16 cast does
    memory = model.model.memories()[0]
    x = torch.randn(1, 5, 64).to(torch.bfloat16)
    gates = memory.write_gates(x)
    assert gates.dtype == torch.float32
    rate = torch.nn.functional.softplus(x.float() @ memory.a_proj.weight.float().T + memory.dt_bias.float())
    close(gates[..., 4:], -memory.A_log.float().exp() * rate, 1e-6)

"""The joint memory: its equations written as a loop, its bytes, what it does not depend on, options and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, softplus
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import retrofit
from patches.errors import RetrofitError
from patches.joint import MASS_EPS, OPENING, JointMemory, JointOptions
from patches.rotary import rotate
from tests.helpers import S, W, awake, awaken, close, feed, left_mask, logits, positions, state_bytes, tokens
from tests.patches.steps import make_step

MakeBase = Callable[..., PreTrainedModel]
B, T, SCALE = 2, 27, 0.3


FORMS = {
    "both": {},
    "linear": {"branches": "linear"},
    "both, wide": {"features": 37},
    "both, by query head": {"shared_state": False},
    "linear, by query head": {"branches": "linear", "shared_state": False},
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FORMS[request.param]


def apply(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight.double(), layer.bias.double())


def written_out(
    memory: JointMemory,
    x: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: Any,
    rows: Callable[[int, int, int], list[int]] = lambda b, kv, t: [],
) -> Tensor:
    """docs/memories/joint.md, one head, one query and one token at a time; ``q``, ``k`` without positions.

    ``rows`` says which tokens besides sinks and window query t sees in row b and key head kv.
    """
    cos, sin = rotary(torch.arange(T)[None])
    turned_q, turned_k = rotate(q, cos, sin), rotate(k, cos, sin)
    out = torch.zeros(B, memory.heads, T, memory.head_dim, dtype=torch.float64)
    for b in range(B):
        for h in range(memory.heads):
            kv = h // (memory.heads // memory.kv_heads)
            s = h // (memory.heads // memory.states)
            states = {name: torch.zeros(memory.features, memory.head_dim + 1).double() for name in ("linear", "delta")}
            for t in range(T):
                seen = [j for j in range(t + 1) if t - j < W or j < S] + rows(b, kv, t)
                scores = turned_k[b, kv, seen] @ turned_q[b, h, t] * SCALE
                window = scores.softmax(0) @ v[b, kv, seen]
                j = t - W
                if j < S:
                    out[b, h, t] = window
                    continue
                value = torch.cat([v[b, kv, j], torch.ones(1).double()])
                weigh, candidates = [memory.window_weight[h] * scores.logsumexp(0)], [window]
                for name in ("linear", "delta")[: 1 + memory.both]:
                    branch = getattr(memory, name)
                    beta = apply(branch.write, x[b, j])[s].sigmoid()
                    decay = (-softplus(apply(branch.forget, x[b, j])[s])).exp()
                    key, query = k[b, kv, j] @ branch.k_map[s].double(), q[b, h, t] @ branch.q_map[h].double()
                    state = decay * states[name]
                    if name == "linear":
                        key, query = (u.softmax(0) for u in (key, query))
                        state = state + beta * key.outer(value)
                        mass = (query @ state)[-1]
                        read, known = (query @ state)[:-1] / (mass + MASS_EPS), 0.0
                    else:
                        key, query = key / key.norm(), query / query.norm()
                        state = state + beta * key.outer(value - key @ state)
                        read, known = (query @ state)[:-1], memory.familiarity[h] * (query @ state)[-1]
                    states[name] = state
                    weigh.append(mass.log() + apply(branch.logit, x[b, t])[h] + known)
                    candidates.append(read + read @ branch.read_proj.weight[h].double())
                share = torch.stack(weigh).softmax(0)[1:] * (OPENING * memory.opening[h]).tanh()
                out[b, h, t] = (1 - share.sum()) * window
                for z, candidate in zip(share, candidates[1:], strict=True):
                    out[b, h, t] += z * candidate
    return out


def test_it_is_the_equations(make_base: MakeBase, form: dict[str, Any]) -> None:
    model = awake(make_base("Qwen2"), "joint", **form)
    memory = model.model.layers[0].self_attn.memory
    generator = torch.Generator().manual_seed(1)
    shapes = [(B, T, 64), *((B, heads, T, 16) for heads in (4, 2, 2))]
    x, q, k, v = (torch.randn(shape, generator=generator).double().requires_grad_() for shape in shapes)

    def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
        return model.model.rotary_emb(x.new_empty(0), positions.expand(1, -1))

    cos, sin = rotary(torch.arange(T)[None])
    ours, _ = memory(make_step(memory, rotate(q, cos, sin), rotate(k, cos, sin), v, turns=rotary, x=x, scale=SCALE))
    theirs = written_out(memory, x, q, k, v, rotary)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)  # unit() adds 1e-6 inside its root
    weights = torch.randn(ours.shape, generator=generator).double()
    # with a detached log-sum-exp the outputs above would be the same and these not
    inputs = (x, q, k, v, *(p for p in memory.parameters()))
    for mine, reference in zip(
        torch.autograd.grad(ours, inputs, weights), torch.autograd.grad(theirs, inputs, weights), strict=True
    ):
        torch.testing.assert_close(mine, reference, atol=1e-4, rtol=1e-3)


def test_features_set_the_bytes(make_base: MakeBase) -> None:
    model = retrofit.patch(make_base("Qwen3"), "joint", W, S, **FORMS["both, wide"])
    assert state_bytes(model) == 2 * 2 * 37 * (16 + 1) * 4  # two branches, two key heads


@pytest.mark.parametrize("head_dim", [4, 8, 32, 64, 96, 128])
@pytest.mark.parametrize("form", [form for form in FORMS.values() if "features" not in form], ids=str)
def test_no_more_bytes_than_ahn(make_base: MakeBase, form: dict[str, Any], head_dim: int) -> None:
    base = make_base("Qwen3", head_dim=head_dim)
    ours = retrofit.patch(base, "joint", W, S, **form)
    cache = ours(tokens(1, 30), use_cache=True).past_key_values
    held = sum(tensor.nbytes for tensor in cache.layers[0].state.values())
    assert held == state_bytes(ours)
    group = 1 if form.get("shared_state") is False else 2
    whole = state_bytes(retrofit.patch(base, "ahn-gdn", W, S))
    assert 0.4 * 4 * 4 * head_dim**2 < group * held <= whole


@pytest.mark.parametrize("options", [FORMS["linear"], FORMS["both, by query head"]], ids=str)
def test_other_options_in_any_pieces_and_padding(base: PreTrainedModel, options: dict[str, Any]) -> None:
    """What tests/invariants asks of every kind with its usual options."""
    model = awake(base.double(), "joint", **options)
    lengths = (30, 19, 10, 3)
    ids, mask = tokens(len(lengths), 30), left_mask(lengths, 30)
    for sizes in ([30], [1] * 30, [11, 1, 18], [7, 6, 1, 1, 15]):
        batch = feed(model, ids, sizes, mask, where=positions(mask))[0]
        for row, length in enumerate(lengths):
            close(batch[row, -length:], logits(model, ids[row : row + 1, -length:])[0])


def test_an_empty_memory_weighs_nothing(make_base: MakeBase) -> None:
    """Not even beside a window that weighs nothing: row 1 evicts its first token at its place 10."""
    model = awake(make_base("Qwen3").double(), "joint")
    for memory in model.model.memories().values():
        torch.nn.init.constant_(memory.window_weight, -100.0)
    ids, mask = tokens(2, 30), left_mask([30, 12], 30)
    close(logits(model, ids, mask, positions(mask))[1, 18:28], logits(model, ids[1:, 18:28])[0])


def test_only_distances_matter(make_base: MakeBase, form: dict[str, Any]) -> None:
    model = awake(make_base("Llama").double(), "joint", **form)
    ids = tokens(2, 40)
    where = torch.arange(40).expand(2, -1)
    with torch.no_grad():
        here, there = (model(ids, position_ids=where + shift).logits for shift in (0, 300))
    close(here, there, 1e-5)  # the angles themselves are float32


def test_mixed_precision(make_base: MakeBase, form: dict[str, Any]) -> None:
    base = make_base("Qwen2")
    exact = awake(base, "joint", **form)
    half = awake(base.to(torch.bfloat16), "joint", **form)
    ids, cache = tokens(2, 40), DynamicCache()
    with torch.no_grad():
        out = half(ids, past_key_values=cache).logits
        assert (out.float() - logits(exact, ids)).abs().mean() < 0.05
    assert {tensor.dtype for layer in cache.layers for tensor in layer.state.values()} == {torch.float32}
    assert {p.dtype for _, p in half.memory_parameters()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        cache = exact(ids, use_cache=True).past_key_values
    assert {tensor.dtype for layer in cache.layers for tensor in layer.state.values()} == {torch.float32}


def test_closed_until_opened(make_base: MakeBase, form: dict[str, Any]) -> None:
    """All but the gates may be anything: the model is exactly the window's."""
    base = make_base("Qwen3")
    model = awaken(retrofit.patch(base, "joint", W, S, **form), push=1.0)
    opened = logits(model, tokens(2, 40))
    for memory in model.model.memories().values():
        torch.nn.init.zeros_(memory.opening)
    window = logits(retrofit.patch(base, "none", W, S), tokens(2, 40))
    assert torch.equal(logits(model, tokens(2, 40)), window)
    assert not torch.allclose(opened, window, atol=1e-2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"branches": "liner"}, "did you mean 'linear'"),
        ({"branches": 2}, "one of both, linear"),
        ({"branch": "linear"}, "did you mean 'branches'"),
        ({"shared_state": 1}, "shared_state=1: use true or false"),
        ({"features": 0}, "features=0: give a whole number, 1 or more"),
        ({"features": 257}, "at most 256"),
    ],
)
def test_options_out_of_range(make_base: MakeBase, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RetrofitError, match=says):
        retrofit.patch(make_base("Qwen2"), "joint", W, S, **options)


def test_heads_too_small(make_base: MakeBase) -> None:
    with pytest.raises(RetrofitError, match="head size of 4"):
        retrofit.patch(make_base("Qwen2", head_dim=2), "joint", W, S)


def test_usual_options() -> None:
    assert JointMemory.read_options({}) == JointOptions("both", shared_state=True)


@pytest.mark.parametrize("shared", [True, False])
def test_saved_before_there_was_a_choice(make_base: MakeBase, tmp_path: Path, shared: bool) -> None:
    """An adapter or a model without the key holds a state per query head; a new one names what it holds."""
    base, ids = make_base("Qwen2"), tokens(2, 40)
    model = awake(base, "joint", shared_state=shared)
    expected = logits(model, ids)
    assert model.config.memory["options"] == {"branches": "both", "shared_state": shared, "features": None}
    retrofit.save_adapter(model, tmp_path / "adapter")
    model.save_pretrained(tmp_path / "model")
    if not shared:
        for file in (tmp_path / "adapter" / "adapter_config.json", tmp_path / "model" / "config.json"):
            config = json.loads(file.read_text())
            config["memory"]["options"] = {}
            file.write_text(json.dumps(config))
    close(logits(retrofit.load_adapter(base, tmp_path / "adapter"), ids), expected)
    close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), ids), expected)

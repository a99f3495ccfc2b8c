"""KVM: the paper's numbers, the readable form, its exact limits, the schedule its bytes follow, and what it refuses."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache, Qwen2Config

import retrofit
from patches.errors import RetrofitError
from patches.kvm import KVM, KVMOptions, Rule, Schedule, no_rows
from patches.kvm_rows import absorb, prepare
from tests.helpers import awake, close, feed, left_mask, logits, state_bytes, tokens
from tests.helpers import positions as positions_of
from tests.patches.kvm_paper import LayerNormKeys, choose, kvm_attention
from tests.patches.readable_kvm import attention
from tests.patches.steps import make_step, rotary

UNLIMITED = {"budget": "power_law", "factor": 1, "exponent": 1}
BUDGETS = [
    {"rows": 5},
    {"budget": "power_law", "factor": 1.5, "exponent": 0.7},
    {"budget": "saturating", "saturation": 20, "multiple": 2},
]


# ---- the paper's form ----


@pytest.fixture(params=["kvm_fixed", "kvm_gqa_sqrt"])
def oracle(request, shared, monkeypatch):
    """Its tensors, its settings, and our keys and rule for them; rows are chosen as the paper does."""
    name = shared / "oracles" / request.param
    tensors, settings = load_file(f"{name}.safetensors"), json.loads(name.with_suffix(".json").read_text())
    for of in ("q", "k", "v", "merge_gate", "ln_s_k_weight", "ln_s_k_bias", "state_head_temp", "front_head_temp"):
        tensors[of].requires_grad_()
    of = settings["config"]
    options = KVMOptions(
        budget=of["state_budget_mode"], factor=of["state_growth_factor"], exponent=of["state_growth_exponent"]
    )
    schedule = Schedule(options, of["state_min_len"], of["chunk_len"], of["chunk_len"] * of["n_bswa_chunks"])
    rule = Rule(schedule, tensors["state_head_temp"], settings["head_dim"] ** -0.5)
    keys = LayerNormKeys(tensors["ln_s_k_weight"], tensors["ln_s_k_bias"], 4, of["sink_len"])
    monkeypatch.setattr("patches.kvm_rows.choose", choose)
    monkeypatch.setattr("patches.kvm_rows.kernel", lambda *_: keys.merge)
    return tensors, settings, keys, rule


def run(oracle, sizes):
    tensors, _, keys, rule = oracle
    pieces, past = [], None
    given = [tensors[name].split(sizes, 2) for name in ("q", "k", "v", "merge_gate")]
    for q, k, v, gates in zip(*given, strict=True):
        out, past = kvm_attention(q, k, v, gates.squeeze(-1), keys, rule, tensors["front_head_temp"], past)
        pieces.append(out)
    return torch.cat(pieces, 2).transpose(1, 2).flatten(2), past


def test_oracle_prefill_state_and_gradients(oracle):
    tensors, settings = oracle[:2]
    out, past = run(oracle, [settings["T"]])
    close(out, tensors["y"], 1e-9)
    D = settings["head_dim"]
    for ours, theirs in ((slice(0, D), "s_k"), (slice(D, 2 * D), "s_v"), (slice(-1, None), "s_vlen")):
        close(past.rows[..., ours], tensors[theirs], 1e-9)
    out.backward(tensors["dy"])
    gradients = [name for name in tensors if name.startswith("grad_")]
    assert len(gradients) == 8
    for name in gradients:
        close(tensors[name.removeprefix("grad_")].grad, tensors[name], 1e-9)


@torch.no_grad()
def test_oracle_prefill_then_decode(oracle):
    tensors, settings = oracle[:2]
    for split in (1, 3, 4, 8, 9, 13, 21):
        out, past = run(oracle, [split] + [1] * (settings["T"] - split))
        close(out, tensors[f"y_prefill{split}"], 1e-9)
        close(past.rows[..., : settings["head_dim"]], tensors["s_k"], 1e-9)
    chunks = [5, 11, 2, 7, settings["T"] - 25]
    close(run(oracle, chunks)[0], tensors["y"], 1e-9)


@torch.no_grad()
def test_oracle_appended_and_merged_tokens(oracle):
    tensors, settings, keys, rule = oracle
    chunk, steps = rule.schedule.chunk, settings["update_steps_prefill"]
    size = (len(steps) + 1) * chunk
    k, v, gates = (tensors[name][:, :, :size] for name in ("k", "v", "merge_gate"))
    blocks = prepare(k, v, gates.squeeze(-1), torch.arange(size), keys, chunk)
    rows = absorb(no_rows(k), blocks, 0, keys, chunk)
    for number, step in enumerate(steps, 1):
        before, after = rule.schedule.rows(number), rule.schedule.rows(number + 1)
        assert (before, after) == (step["len_before"], step["len_after"])
        _, founds = choose(rows, blocks, number, keys, after)
        if step["append_idx_rel"] is None:
            assert not founds.any()
        else:
            order = founds.logical_not().int().argsort(dim=-1, stable=True)
            appended, merged = order.split([after - before, chunk - after + before], -1)
            assert appended.tolist() == step["append_idx_rel"]
            assert merged.tolist() == step["merge_idx_rel"]
        rows = absorb(rows, blocks, number, keys, after)


# ---- the form for a pretrained base ----


@pytest.mark.parametrize("positions", ["row", "edge", "nope"])
@pytest.mark.parametrize("options", BUDGETS)
@torch.no_grad()
def test_equals_the_readable_form(options, positions):
    torch.manual_seed(0)
    config = Qwen2Config(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    T, window, sinks, chunk = 31, 8, 2, 4
    memory = KVM(config, window, sinks, KVM.read_options({"chunk": chunk, "positions": positions, **options})).double()
    memory.temperature.copy_(torch.rand(4) + 0.5)
    q, k, v = (torch.randn(2, heads, T, 8, dtype=torch.float64) for heads in (4, 2, 2))
    gates, bias = torch.rand(2, 2, T, dtype=torch.float64) + 0.5, torch.randn(16, dtype=torch.float64)
    fast, _ = memory.attend(make_step(memory, q, k, v, gates=gates, key_bias=bias))
    for b in range(2):
        for h in range(2):
            group = slice(2 * h, 2 * h + 2)
            readable = attention(
                q[b, group],
                k[b, h],
                v[b, h],
                gates[b, h],
                memory.temperature[group],
                rotary,
                chunk=chunk,
                window=window,
                sinks=sinks,
                budget=memory.schedule.budget,
                bias=bias.view(2, 8)[h],
                positions=positions,
            )
            close(fast[b, group].transpose(0, 1), readable)


@torch.no_grad()
def test_an_unlimited_budget_is_full_attention(base):
    base, ids = base.double(), tokens(2, 50)
    model = retrofit.patch(base, "kvm", 8, 2, chunk=4, **UNLIMITED)
    close(logits(model, ids), logits(base, ids), 1e-10)
    close(feed(model, ids, [13] + [1] * 37)[0], logits(base, ids), 1e-10)
    edge = retrofit.patch(base, "kvm", 8, 2, chunk=4, positions="edge", **UNLIMITED)
    assert (logits(edge, ids) - logits(base, ids)).abs().max() > 0.01


@pytest.mark.parametrize("positions", ["row", "edge", "nope"])
@pytest.mark.parametrize("options", [*BUDGETS, {"gate_appends": True, **BUDGETS[1]}])
@torch.no_grad()
def test_any_feeding_and_padding(make_base, options, positions):
    model = awake(make_base("Qwen2").double(), "kvm", chunk=4, positions=positions, **options)
    ids, lengths = tokens(3, 43), [43, 38, 26]
    whole = logits(model, ids)
    for sizes in ([1] * 43, [9, 1, 1, 13, 19], [34] + [1] * 9):
        close(feed(model, ids, sizes)[0], whole)
    mask = left_mask(lengths, 43)
    for sizes in ([43], [1] * 43, [11, 12, 1, 1, 18]):
        padded = feed(model, ids, sizes, mask, where=positions_of(mask))[0]
        for row, length in enumerate(lengths):
            close(padded[row, -length:], logits(model, ids[row : row + 1, -length:])[0])


def test_equal_tokens_are_a_tie_however_they_are_computed(make_base):
    """In the first layer equal tokens have equal keys up to rounding; which row they join must not hang on that."""
    model = awake(make_base("Llama"), "kvm", 8, 1, chunk=4, budget="power_law", factor=2.0)
    ids = tokens(2, 60) % 7 + 3
    close(feed(model, ids, [1] * 60)[0], logits(model, ids))


@torch.no_grad()
def test_the_window_saw_tooths():
    """A token is exact until the chunk W after its own begins: what merges with weight 0 is seen only so long."""
    config = Qwen2Config(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    memory = KVM(config, 8, 0, KVM.read_options({"chunk": 4, "rows": 4})).double()
    memory.temperature.fill_(1.0)
    step = make_step(memory, *(torch.randn(1, heads, 24, 8, dtype=torch.float64) for heads in (4, 2, 2)))
    step.gates = torch.zeros(1, 2, 24, dtype=torch.float64)
    before = memory.attend(step)[0]
    for token, last in ((4, 11), (5, 11), (7, 11), (8, 15)):  # the first chunk, 0 to 3, founds rows instead
        step.v[:, :, token] += 1
        differs = (memory.attend(step)[0] - before).abs().amax((0, 1, 3)) > 1e-12
        step.v[:, :, token] -= 1
        assert differs.nonzero().flatten().tolist() == list(range(token, last + 1))


@torch.no_grad()
def test_long_prompts_go_block_by_block(make_base, monkeypatch):
    model = awake(make_base("Qwen2").double(), "kvm", 8, 2, chunk=2, budget="power_law", factor=1.0)
    ids = tokens(2, 60)
    expected = logits(model, ids)
    for gathered in (1, 5000):
        monkeypatch.setattr("patches.window.GATHERED", gathered)
        close(logits(model, ids), expected)


def test_gate_and_temperature_start_neutral_and_learn(make_base):
    model = retrofit.patch(make_base("Qwen2"), "kvm", 8, 2)
    ids = tokens(2, 40)
    memory = model.model.layers[0].self_attn.memory
    assert torch.equal(memory.write_gates(torch.randn(1, 3, 64)), torch.ones(1, 3, 2))
    logits_ = model(ids).logits
    logits_.square().mean().backward()
    gradients = {name.rpartition("memory.")[2]: p.grad.abs().max() for name, p in model.memory_parameters()}
    assert set(gradients) == {"merge_gate.weight", "temperature"}
    assert all(gradient > 0 for gradient in gradients.values())


# ---- rows and bytes ----


def test_schedules():
    fixed = Schedule(KVMOptions(), 6, chunk=4, window=8)
    assert [fixed.rows(n) for n in range(5)] == [0, 4, 6, 6, 6]
    root = Schedule(KVMOptions(budget="power_law", factor=2.0, exponent=0.5), 1, chunk=4, window=8)
    # after the block [4 n - 4, 4 n), B(4 n + 4) = floor(2 sqrt(4 n + 4))
    assert [root.rows(n) for n in (1, 2, 3, 4, 5, 10)] == [4, 6, 8, 8, 9, 13]
    bent = Schedule(KVMOptions(budget="saturating", saturation=20, multiple=3), 1, chunk=4, window=8)
    assert [bent.rows(n) for n in (1, 2, 3, 10, 1000)] == [4, 6, 6, 12, 18]
    every = Schedule(KVMOptions(budget="power_law", factor=1.0, exponent=1.0), 1, chunk=4, window=8)
    assert [every.rows(n) for n in (1, 2, 50)] == [4, 8, 200]


def test_two_threads_that_count_at_once_count_alike() -> None:
    """All layers and calls share a schedule: another thread goes on in the middle of a count."""
    alone, shared = (Schedule(KVMOptions(budget="power_law", factor=2.0), 1, chunk=4, window=8) for _ in range(2))
    budget = shared.budget

    def interrupted(tokens: int) -> int:
        shared.budget = budget
        shared.rows(3)
        return budget(tokens)

    shared.budget = interrupted
    shared.rows(3)
    assert [shared.rows(n) for n in range(8)] == [alone.rows(n) for n in range(8)]


@pytest.mark.parametrize("options", BUDGETS)
@torch.no_grad()
def test_cache_bytes_follow_the_schedule(make_base, options):
    base, S, W, chunk = make_base("Qwen2"), 2, 8, 4
    model = retrofit.patch(base, "kvm", W, S, chunk=chunk, **options)
    schedule, kv_heads, D = model.model.layers[0].self_attn.memory.schedule, 2, 16
    cache, ids = DynamicCache(), tokens(1, 60)
    for t in range(60):
        model(ids[:, t : t + 1], past_key_values=cache)
        if t >= S + W:
            blocks = (t - S) // chunk + 1 - W // chunk
            floats = (S + W) * 2 * kv_heads * D + W * kv_heads + schedule.rows(blocks) * kv_heads * (2 * D + 4)
            assert retrofit.cache_bytes(cache) == 2 * 4 * floats


def test_by_default_the_state_is_no_larger_than_ahn(family, make_base):
    base = make_base(family)
    kvm, ahn = (retrofit.patch(base, kind, 512, 4) for kind in ("kvm", "ahn-gdn"))
    memory = kvm.model.layers[0].self_attn.memory
    assert state_bytes(kvm) <= state_bytes(ahn) < state_bytes(kvm) * (1 + 1 / memory.rows)
    assert 512 % memory.chunk == 0
    assert memory.chunk <= memory.rows


@torch.no_grad()
def test_on_some_layers(make_base):
    base = make_base("Qwen2", num_hidden_layers=3)
    model = awake(base, "kvm", layers=[1], others="window")
    ids = tokens(2, 40)
    close(feed(model, ids, [13] + [1] * 27)[0], logits(model, ids))
    cache = feed(model, ids, [40])[1]
    assert ["rows" in layer.state for layer in cache.layers] == [False, True, False]
    generated = model.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False)
    assert torch.equal(generated, model.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False, use_cache=False))


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chunk": 3}, "multiple of chunk=3"),
        ({"chunk": 16}, "multiple of chunk=16"),
        ({"chunk": 4, "rows": 3}, "chunk=4 is more than rows=3"),
        ({"chunk": 0}, "chunk=0"),
        ({"rows": -1}, "rows=-1"),
        ({"budget": "fix"}, "did you mean 'fixed'"),
        ({"positions": "rows"}, "did you mean 'row'"),
        ({"exponent": 1.5}, "exponent=1.5"),
        ({"factor": 0}, "factor=0"),
        ({"gate_appends": 1}, "gate_appends=1"),
        ({"chunks": 4}, "did you mean 'chunk'"),
    ],
)
def test_refusals(make_base, options, says):
    with pytest.raises(RetrofitError, match=says):
        retrofit.patch(make_base("Qwen2"), "kvm", 8, 2, **options)


def test_a_window_that_the_chunk_does_not_divide_is_refused_and_nothing_changes(make_base):
    model = retrofit.patch(make_base("Qwen2"), "kvm", 8, 2, chunk=4)
    with pytest.raises(RetrofitError, match="multiple of chunk"):
        model.set_window(10)
    assert model.config.memory["window"] == model.model.layers[0].self_attn.memory.window == 8
    model.set_window(12, 0)
    assert model.model.layers[1].self_attn.memory.window == 12

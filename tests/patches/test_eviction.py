"""Eviction policies against a few lines of plain Python, fast form against plain form, fed in pieces."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

import retrofit
from patches.cache import MemoryCacheLayer
from patches.errors import RetrofitError
from patches.eviction import Entries
from patches.kinds import KINDS
from patches.sequence import Starts
from tests.patches.steps import make_step

CASES = {
    "tova": ("tova", {}),
    "tova-head": ("tova", {"scope": "head"}),
    "tova-protected": ("tova", {"protect_newest": True}),
    "tova-lnln": ("tova", {"positions": "lnln"}),
    "tova-lnln-head": ("tova", {"positions": "lnln", "scope": "head"}),
    "h2o": ("h2o", {"heavy": 3}),
    "h2o-halves": ("h2o", {}),
    "h2o-layer": ("h2o", {"scope": "layer", "heavy": 5}),
    "h2o-recent-only": ("h2o", {"heavy": 0}),
}
case = pytest.mark.parametrize(("kind", "options"), CASES.values(), ids=CASES.keys())
HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.7


def turn(x, position):
    """``x`` (..., DIM) at rotary ``position``, pairs of its halves as complex numbers."""
    half = DIM // 2
    frequency = 100.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * frequency * position)
    return torch.cat([turned.real, turned.imag], -1)


def rotary(position):
    half = DIM // 2
    frequency = 100.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = (position.unsqueeze(-1).double() * frequency).repeat(1, 1, 2)
    return angle.cos(), angle.sin()


def by_hand(memory, q, k, v):
    """One row, one set of heads, one token after the other: ``q`` (H, T, D), ``k``, ``v`` (H_kv, T, D), not rotated."""
    groups, options = len(q) // len(k), memory.options
    kept, total, outputs = [], {}, []
    for t in range(q.shape[1]):
        rows = [*kept, t]
        places = rows
        if getattr(options, "positions", "true") == "lnln":
            places = [0.0]
            for a, b in pairwise(rows):
                places.append(places[-1] + (b - a if b - a <= 10 else math.log(math.log(b - a))))
        weights, heads = [], []
        for h in range(len(q)):
            query = turn(q[h, t], places[-1])
            logits = torch.stack([query @ turn(k[h // groups, row], p) for row, p in zip(rows, places, strict=True)])
            weights.append((logits * SCALE).softmax(0))
            heads.append(weights[-1] @ v[h // groups, rows])
        outputs.append(torch.stack(heads))
        received = torch.stack(weights).sum(0)
        for i, row in enumerate(rows):
            total[row] = received[i] + (total.get(row, 0) if memory.kind == "h2o" else 0)
        kept = rows
        if len(rows) > memory.capacity:
            protected = memory.window if memory.kind == "h2o" else int(options.protect_newest)
            kept.remove(min((row for row in rows if memory.sinks <= row <= t - protected), key=total.__getitem__))
    return torch.stack(outputs, 1), kept


def make(kind, options, window=4, sinks=2):
    config = SimpleNamespace(
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, hidden_size=HEADS * DIM, head_dim=DIM
    )
    return KINDS[kind](config, window, sinks, KINDS[kind].read_options(options))


def attend(memory, q, k, v, pads, layer):
    """The memory on all tokens of padded texts at once; ``q``, ``k`` not rotated."""
    n = q.shape[2]
    position = torch.arange(n, dtype=torch.float64)[:, None]
    rotated = turn(q, position), turn(k, position), v
    step = make_step(memory, *rotated, turns=rotary, starts=Starts(pads, pads), layer=layer, scale=SCALE)
    return memory(step)[0]


def some(n=30, rows=2, **kwargs):
    torch.manual_seed(3)
    shapes = ((rows, HEADS, n, DIM), (rows, KV_HEADS, n, DIM), (rows, KV_HEADS, n, DIM))
    return [torch.randn(shape, dtype=torch.float64, **kwargs) for shape in shapes]


@case
@pytest.mark.parametrize("sinks", [0, 2])
def test_every_choice_is_the_one_made_by_hand(kind, options, sinks):
    memory = make(kind, options, sinks=sinks)
    q, k, v = some()
    pads = (0, 7)
    layer = MemoryCacheLayer(kind, memory.window, memory.sinks)
    out = attend(memory, q, k, v, pads, layer)
    sets = KV_HEADS if memory.options.scope == "head" else 1
    for row, skip in enumerate(pads):
        for i in range(sets):
            ours, theirs = (slice(i * size // sets, (i + 1) * size // sets) for size in (HEADS, KV_HEADS))
            # positions start after the padding by hand: attention does not change when all are shifted
            heads, kept = by_hand(memory, q[row, ours, skip:], k[row, theirs, skip:], v[row, theirs, skip:])
            torch.testing.assert_close(out[row, ours, skip:], heads, atol=1e-5, rtol=0)
            assert layer.state["positions"][row, i].tolist() == kept
            assert len(kept) == memory.capacity == layer.keys.shape[2]


@pytest.mark.parametrize(
    ("kind", "options"), [CASES["tova"], CASES["tova-head"], CASES["tova-protected"], CASES["h2o"], CASES["h2o-layer"]]
)
def test_the_fast_loop_is_the_plain_one(kind, options, poisoned_empty):
    # longer than a block of the fast loop; gradients too
    inputs = some(n=200, requires_grad=True)
    results = []
    for how in ({"prefill": "token"}, {"prefill": "chunk", "chunk": 1}):
        layer = MemoryCacheLayer(kind, 4, 2)
        out = attend(make(kind, {**options, **how}), *inputs, (3, 0), layer)
        weight = torch.linspace(-1, 1, out.shape[2], dtype=out.dtype)[:, None]
        results.append((out, layer.state["positions"], *torch.autograd.grad((out * weight).square().sum(), inputs)))
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, atol=1e-9, rtol=1e-9)


@case
@torch.no_grad()
def test_a_text_may_be_fed_in_any_pieces(make_base, kind, options):
    model = retrofit.patch(make_base("Qwen3"), memory=kind, window=5, sinks=1, **options)
    ids = torch.randint(3, 101, (2, 36))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    whole = model(ids, attention_mask=mask, use_cache=True)
    bytes_held = []
    for sizes in ([1] * 36, [20, 16], [4, 3, 1, 1, 27], [7, 29]):
        cache, logits, at = DynamicCache(), [], 0
        for size in sizes:
            at += size
            step = model(ids[:, at - size : at], attention_mask=mask[:, :at], past_key_values=cache)
            logits.append(step.logits)
            if at > 18:
                bytes_held.append(retrofit.cache_bytes(cache))
        logits = torch.cat(logits, 1)
        torch.testing.assert_close(logits[mask > 0], whole.logits[mask > 0], atol=1e-5, rtol=0)
        for ours, other in zip(cache.layers, whole.past_key_values.layers, strict=True):
            assert torch.equal(ours.state["positions"], other.state["positions"])
    assert len(set(bytes_held)) == 1
    alone = model(ids[1:, 6:]).logits
    torch.testing.assert_close(alone[0], whole.logits[1, 6:], atol=1e-5, rtol=0)


@case
@torch.no_grad()
def test_a_budget_of_everything_is_full_attention(base, kind, options):
    ids = torch.randint(3, 101, (2, 30))
    expected = base(ids).logits
    model = retrofit.patch(base, memory=kind, window=30, **options)
    assert torch.equal(model(ids).logits, expected)
    # the last of S + W + 1 tokens still sees all of them, now in our attention
    heavy = {"heavy": 0} if kind == "h2o" else {}
    model = retrofit.patch(base, memory=kind, window=26, sinks=3, **{**options, **heavy})
    logits = model(ids).logits
    assert not torch.equal(logits, expected)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["tova", "h2o"])
@torch.no_grad()
def test_full_and_chunked_prefill_hold_what_they_say(make_base, monkeypatch, kind):
    longest = []
    join = Entries.join

    def watched(self, other):
        longest.append(self.size + other.size)
        return join(self, other)

    monkeypatch.setattr(Entries, "join", watched)
    base, ids = make_base("Llama"), torch.randint(3, 101, (2, 60))
    heavy = {"heavy": 0} if kind == "h2o" else {}
    peak, logits = {}, {}
    for how in ({"prefill": "full"}, {"prefill": "chunk", "chunk": 7}, {"prefill": "token"}):
        longest.clear()
        model = retrofit.patch(base, memory=kind, window=8, sinks=2, **how, **heavy)
        logits[how["prefill"]] = model(ids).logits
        peak[how["prefill"]] = max(longest)
    assert peak["full"] == 60
    assert peak["chunk"] == 10 + 7
    # nothing is dropped before the end of the call
    torch.testing.assert_close(logits["full"], base(ids).logits, atol=1e-5, rtol=0)
    assert not torch.allclose(logits["chunk"], logits["full"], atol=1e-3)
    assert not torch.allclose(logits["chunk"], logits["token"], atol=1e-3)


@pytest.mark.parametrize("kind", ["tova", "h2o"])
@torch.no_grad()
def test_a_prompt_is_read_in_chunks_unasked(base, monkeypatch, kind):
    """An eighth of the window: bounded, and no step per token; with a short window that is every token."""
    loops, choose = [], KINDS[kind]._choose_victims

    def watched(self, *args):
        loops.append(1)
        return choose(self, *args)

    monkeypatch.setattr(KINDS[kind], "_choose_victims", watched)
    ids, heavy = torch.randint(3, 101, (2, 60)), {"heavy": 3} if kind == "h2o" else {}
    for window, alike in ((32, {"prefill": "chunk", "chunk": 4}), (15, {"prefill": "token"})):
        loops.clear()
        ours = retrofit.patch(base, memory=kind, window=window, sinks=2, **heavy)
        logits = ours(ids).logits
        assert bool(loops) == (window < 16)
        other = retrofit.patch(base, memory=kind, window=window, sinks=2, **heavy, **alike)
        assert torch.equal(logits, other(ids).logits)
        for memory in ours.model.memories().values():
            at = torch.arange(60)[memory.capacity :]
            assert memory.seen_beyond(at).max() <= memory.capacity + max(1, window // 8)


@pytest.mark.parametrize("kind", ["tova", "h2o"])
def test_a_model_saved_before_there_were_chunks_unasked(kind):
    """It drops after every token, as it did."""
    assert KINDS[kind].read_options({}, saved=True).prefill == "token"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["tova", "h2o"])
def test_generation_with_and_without_a_cache(make_base, kind, implementation):
    model = retrofit.patch(make_base("Mistral", attn_implementation=implementation), memory=kind, window=4, sinks=1)
    ids = torch.randint(3, 101, (2, 14))
    for how in ({}, {"num_beams": 3}):
        cached, plain = (
            model.generate(ids, max_new_tokens=10, do_sample=False, use_cache=use, **how) for use in (True, False)
        )
        assert torch.equal(cached, plain)


@pytest.mark.parametrize("kind", ["tova", "h2o"])
@torch.no_grad()
def test_bfloat16(make_base, kind):
    base = make_base("Qwen2")
    ids = torch.randint(3, 101, (1, 40))
    exact = retrofit.patch(base, memory=kind, window=6, sinks=2)(ids).logits
    out = retrofit.patch(base.to(torch.bfloat16), memory=kind, window=6, sinks=2)(ids, use_cache=True)
    assert out.logits.dtype == torch.bfloat16
    assert out.past_key_values.layers[0].keys.dtype == torch.bfloat16
    # before the first choice that rounding may turn around
    torch.testing.assert_close(out.logits[:, :9].float(), exact[:, :9], atol=0.15, rtol=0.05)
    assert out.logits.isfinite().all()


@pytest.mark.parametrize("kind", ["tova", "h2o"])
def test_there_is_nothing_to_train(make_base, kind):
    distill = pytest.importorskip("distill")
    model = retrofit.patch(make_base("Qwen2"), memory=kind, window=6, sinks=2)
    assert not KINDS[kind].trainable
    assert list(model.memory_parameters()) == []
    with pytest.raises(RetrofitError, match="no parameters to train"):
        distill.DistillTrainer(model, distill.DistillConfig(output_dir="unused"))


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("tova", {"scope": "heads"}, "scope: 'heads' is not one of .*did you mean 'head'"),
        ("tova", {"prefill": "once"}, "one of token, chunk, full"),
        ("h2o", {"chunk": 0}, "chunk=0: give a whole number"),
        ("tova", {"positions": "rope"}, "one of true, lnln"),
        ("tova", {"protect_newest": 1}, "protect_newest=1"),
        ("tova", {"heavy": 4}, "no option 'heavy'"),
        ("h2o", {"heavy": -1}, "heavy=-1"),
        ("h2o", {"heavy": 2.5}, "heavy=2.5"),
    ],
)
def test_bad_options_are_refused_when_patching(make_base, kind, options, says):
    with pytest.raises(RetrofitError, match=says):
        retrofit.patch(make_base("Qwen2"), memory=kind, window=6, **options)

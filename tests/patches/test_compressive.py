"""Compressive pooling: the readable form, one place for every token, constant bytes, what it refuses."""

import pytest
import torch
from transformers import DynamicCache, Qwen2Config

import retrofit
from patches.compressive import Compressive
from patches.errors import RetrofitError
from tests.helpers import awake, close, feed, left_mask, logits, state_bytes, tokens
from tests.patches.steps import make_step


def make_memory(window, sinks, **options):
    config = Qwen2Config(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    return Compressive(config, window, sinks, Compressive.read_options(options))


def readable(q, k, v, window, sinks, ratio, pool, rows):
    """Heads ``(H, T, D)`` of one sequence, token by token: each holds lists of what it sees."""
    out = []
    for t in range(q.shape[1]):
        evicted = list(range(sinks, max(t - window + 1, sinks)))
        whole = len(evicted) // ratio * ratio
        groups = [evicted[i : i + ratio] for i in range(0, whole, ratio)][-rows:]
        exact = [j for j in range(t + 1) if j < sinks or j > t - window or j in evicted[whole:]]
        reduce = (lambda x: x.mean(1)) if pool == "average" else (lambda x: x.amax(1))
        heads = []
        for h in range(q.shape[0]):
            kv = h // (q.shape[0] // k.shape[0])
            seen_k, seen_v = (
                torch.stack([*(x[kv, j] for j in exact), *(reduce(x[:, group])[kv] for group in groups)])
                for x in (k, v)
            )
            heads.append((seen_k @ q[h, t] * q.shape[-1] ** -0.5).softmax(0) @ seen_v)
        out.append(torch.stack(heads))
    return torch.stack(out, 1)


@pytest.mark.parametrize(("window", "sinks"), [(8, 2), (1, 0), (5, 1), (3, 6)])
@pytest.mark.parametrize(
    ("pool", "ratio", "rows"), [("average", 4, 3), ("max", 4, 2), ("average", 1, 5), ("max", 3, 50)]
)
def test_equals_the_readable_form(window, sinks, pool, ratio, rows):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 41, 8, dtype=torch.float64) for heads in (4, 2, 2))
    memory = make_memory(window, sinks, pool=pool, ratio=ratio, rows=rows)
    fast, _ = memory.attend(make_step(memory, q, k, v))
    for b in range(2):
        close(fast[b], readable(q[b], k[b], v[b], window, sinks, ratio, pool, rows))


def test_long_prompts_go_block_by_block(monkeypatch):
    """Blocks that one mask serves, several at a time, a rest: all the same as one block."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 400, 8, dtype=torch.float64) for heads in (4, 2, 2))
    memory, expected = make_memory(20, 2, rows=6), readable(q[0], k[0], v[0], 20, 2, 4, "average", 6)
    for gathered in (1, 5000, 2**22):
        monkeypatch.setattr("patches.window.GATHERED", gathered)
        close(memory.attend(make_step(memory, q, k, v))[0][0], expected)


def test_every_token_is_in_one_place():
    """With keys of zero all rows weigh the same: the output counts in how many places each token is, and where."""
    window, sinks, T = 6, 1, 40
    memory = make_memory(window, sinks, rows=5)
    q, k = torch.zeros(1, 4, T, 8, dtype=torch.float64), torch.zeros(1, 2, T, 8, dtype=torch.float64)
    for token in range(T):
        v = torch.zeros_like(k)
        v[:, :, token] = 1
        out = memory.attend(make_step(memory, q, k, v))[0][0, 0, :, 0]
        for t in range(token, T):
            evicted = max(t - window + 1 - sinks, 0)
            visible = sinks + min(t + 1 - sinks, window) + evicted % 4 + min(evicted // 4, 5)
            group = (token - sinks) // 4
            if token < sinks or token > t - window or group >= evicted // 4:
                share = 1
            else:
                share = 0.25 if group >= evicted // 4 - 5 else 0
            assert abs(out[t] - share / (visible if t >= sinks else t + 1)) < 1e-12


@pytest.mark.parametrize("options", [{}, {"pool": "max", "rows": 3}, {"ratio": 1, "rows": 2}, {"ratio": 3, "rows": 50}])
@torch.no_grad()
def test_any_feeding_and_padding(make_base, options):
    model = awake(make_base("Qwen2"), "compressive", **options)
    ids, lengths = tokens(3, 43), [43, 38, 26]
    whole = logits(model, ids)
    for sizes in ([1] * 43, [9, 1, 1, 13, 19], [34] + [1] * 9):
        close(feed(model, ids, sizes)[0], whole)
    mask = left_mask(lengths, 43)
    # without positions padding moves the row's: the largest channels of rotated keys must not move with them
    for sizes in ([43], [1] * 43, [11, 12, 1, 1, 18]):
        padded = feed(model, ids, sizes, mask)[0]
        for row, length in enumerate(lengths):
            close(padded[row, -length:], logits(model, ids[row : row + 1, -length:])[0])


@torch.no_grad()
def test_a_queue_of_everything_unpooled_is_full_attention(base):
    base, ids = base.double(), tokens(2, 50)
    close(logits(retrofit.patch(base, "compressive", 8, 2, ratio=1, rows=50), ids), logits(base, ids), 1e-10)


@torch.no_grad()
def test_bytes_are_constant_and_those_of_ahn(make_base):
    base, ids = make_base("Qwen2"), tokens(1, 60)
    model = retrofit.patch(base, "compressive", 8, 2)
    assert state_bytes(model) == state_bytes(retrofit.patch(base, "ahn-gdn", 8, 2))
    cache, held = DynamicCache(), []
    for t in range(60):
        model(ids[:, t : t + 1], past_key_values=cache)
        held.append(retrofit.cache_bytes(cache))
    layers, row = 2, 2 * 2 * 16 * 4  # keys and values of 2 heads of 16 in float32
    assert set(held[10:]) == {layers * (10 * row + state_bytes(model))}


def test_nothing_to_train(make_base):
    model = retrofit.patch(make_base("Qwen2"), "compressive", 8, 2)
    assert not Compressive.trainable
    assert not list(model.memory_parameters())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ratio": 0}, "ratio=0"),
        ({"rows": 2.5}, "rows=2.5"),
        ({"pool": "avrage"}, "did you mean 'average'"),
        ({"row": 4}, "did you mean 'rows'"),
    ],
)
def test_refusals(make_base, options, says):
    with pytest.raises(RetrofitError, match=says):
        retrofit.patch(make_base("Qwen2"), "compressive", 8, 2, **options)

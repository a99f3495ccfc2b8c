"""H2O: its scores against the attention that the base itself reports, and the original code's single drop."""

import pytest
import torch
from transformers import DynamicCache

import retrofit
from patches.errors import RetrofitError


@pytest.fixture
def eager(make_base):
    """One layer, so that its attention does not depend on what an earlier one has dropped."""
    return make_base("Llama", num_hidden_layers=1, attn_implementation="eager")


def received(base, ids, scope):
    """Attention that each token gets from all queries, summed over the heads that share it: ``(B, sets, T)``."""
    weights = base(ids, output_attentions=True).attentions[0]  # (B, H, T, T)
    per_key_head = weights.unflatten(1, (base.config.num_key_value_heads, -1)).sum((2, 3))
    return per_key_head if scope == "head" else per_key_head.sum(1, keepdim=True)


@pytest.mark.parametrize("scope", ["head", "layer"])
@torch.no_grad()
def test_scores_count_from_the_first_token(eager, scope):
    model = retrofit.patch(eager, memory="h2o", window=8, heavy=12, scope=scope)
    ids = torch.randint(3, 101, (2, 20))
    for sizes in ([20], [1] * 20, [9, 11]):
        cache, at = DynamicCache(), 0
        for size in sizes:
            model(ids[:, at : at + size], past_key_values=cache)
            at += size
        assert not cache.sequence.evicting
        torch.testing.assert_close(cache.layers[0].state["scores"], received(eager, ids, scope), atol=1e-5, rtol=0)


@pytest.mark.parametrize("scope", ["head", "layer"])
@torch.no_grad()
def test_a_full_prefill_keeps_recent_tokens_and_heavy_hitters(eager, scope):
    ids = torch.randint(3, 101, (2, 50))
    model = retrofit.patch(eager, memory="h2o", window=5, heavy=7, sinks=1, scope=scope, prefill="full")
    layer = model(ids, use_cache=True).past_key_values.layers[0]
    scores = received(eager, ids, scope)
    heavy = scores[:, :, 1:-5].topk(7).indices.sort().values + 1
    first, recent = torch.zeros_like(heavy[..., :1]), torch.arange(45, 50).expand(*heavy.shape[:2], -1)
    expected = torch.cat([first, heavy, recent], 2)
    assert torch.equal(layer.state["positions"].long(), expected)
    torch.testing.assert_close(layer.state["scores"], scores.gather(2, expected), atol=1e-5, rtol=0)


@torch.no_grad()
def test_sizes(eager):
    ids = torch.randint(3, 101, (1, 40))
    for options, rows in (({}, 2 + 6 + 6), ({"heavy": 3}, 2 + 6 + 3), ({"heavy": 0}, 2 + 6)):
        model = retrofit.patch(eager, memory="h2o", window=6, sinks=2, **options)
        assert model(ids, use_cache=True).past_key_values.layers[0].keys.shape[2] == rows
    # what is kept beyond sinks and window counts as state: keys and values, and a position and a score of every row
    model = retrofit.patch(eager, memory="h2o", window=6, sinks=2, heavy=3, scope="layer")
    assert retrofit.kept_bytes(model) == 4 * (3 * 2 * 2 * 16 + 2 * (2 + 6 + 3))


def test_more_rows_than_the_base_sees_are_refused(make_base):
    base = make_base("Mistral", sliding_window=16)
    retrofit.patch(base, memory="h2o", window=7, sinks=2, heavy=7)
    says = r"sinks \+ window \+ heavy <= 16 \(now 2 \+ 8 \+ 8\)"
    with pytest.raises(RetrofitError, match=says):
        retrofit.patch(base, memory="h2o", window=8, sinks=2)
    with pytest.raises(RetrofitError, match=says):
        retrofit.patch(base, memory="h2o", window=4, sinks=2).set_window(8)


@torch.no_grad()
def test_it_projects_once(make_base):
    """Also while the base's own attention runs and the scores are kept beside it."""
    model = retrofit.patch(make_base("Llama"), memory="h2o", window=4, sinks=1)
    seen = []
    for projection in ("q_proj", "k_proj", "v_proj"):
        getattr(model.model.layers[0].self_attn, projection).register_forward_hook(lambda *_: seen.append(1))
    cache = DynamicCache()
    for size in (3, 1, 2, 1):
        model(torch.randint(3, 101, (1, size)), past_key_values=cache)
    assert len(seen) == 3 * 4

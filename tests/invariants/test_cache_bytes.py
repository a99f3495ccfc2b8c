"""Invariant 7: once the window is full, the cache's measured bytes do not grow."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import retrofit
from retrofit.costs.held import row_bytes
from retrofit.evaluation.baselines import equal_memory_window, window_only
from tests.helpers import ON_A_WINDOW, SIZE, S, W, awake, feed, tokens

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def assert_stops_growing(model: Any) -> None:
    _, cache = feed(model, tokens(2, 64), [64])
    full = retrofit.cache_bytes(cache)
    for sizes in ([1] * 20, [33], [7, 1, 90]):
        _, cache = feed(model, tokens(2, sum(sizes)), sizes, cache=cache)
        assert retrofit.cache_bytes(cache) == full
    _, longer = feed(model, tokens(2, 300), [300])
    assert retrofit.cache_bytes(longer) == full, "the bytes depend on how the text was fed"


def test_the_cache_stops_growing(one_model: Any) -> None:
    assert_stops_growing(one_model)


def test_in_half_precision(kind: str, half: tuple[PreTrainedModel, torch.dtype, bool]) -> None:
    base, dtype, mixed = half
    with torch.autocast("cpu", dtype, enabled=mixed):
        assert_stops_growing(awake(base if mixed else base.to(dtype), kind))


@pytest.mark.parametrize("kind", ON_A_WINDOW)
def test_a_kind_on_a_window_keeps_no_other_rows(partner: PreTrainedModel, kind: str) -> None:
    for dtype in DTYPES:
        model = awake(partner.to(dtype), kind)
        _, cache = feed(model, tokens(3, 64), [64])
        for layer in cache.layers:
            held = sum(tensor.numel() * tensor.element_size() for tensor in layer.tensors())
            assert held == sum(tensor.untyped_storage().nbytes() for tensor in layer.tensors()), "a view holds more"
        rows = cache.layers[0].keys.numel() + cache.layers[0].values.numel()
        assert cache.layers[0].keys.dtype == dtype
        assert rows <= 3 * 2 * 2 * 16 * (W + S) * 2, "keys and values kept beyond sinks and window"


def kept(model: Any) -> int:
    """Bytes of a full cache in the layers that have a window, but for the sinks' keys and values."""
    _, cache = feed(model, tokens(1, 200), [200])
    layers = [cache.layers[index] for index in model.model.memories()]
    return retrofit.cache_bytes(SimpleNamespace(layers=layers)) - len(layers) * S * row_bytes(model.config, model.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_beside_the_window_are_those_of_a_full_cache(
    base: PreTrainedModel, kind: str, dtype: torch.dtype
) -> None:
    model = awake(base.to(dtype), kind)
    held, row, layers = kept(model), row_bytes(model.config, dtype), len(model.model.memories())
    assert held - layers * W * row == layers * retrofit.kept_bytes(model)
    wide = kept(window_only(model, equal_memory_window(model)))
    assert 0 <= wide - held < layers * row, "not the window of as many bytes"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_kept_bytess_and_sizes_by_layer(partner: PreTrainedModel, kind: str, dtype: torch.dtype) -> None:
    for by_layer in ({"0": {"window": 16}}, {"1": SIZE.get(kind, {})}, {"0": SIZE.get(kind, {}), "1": {"window": 24}}):
        model = awake(partner.to(dtype), kind, by_layer=by_layer)
        held, row = kept(model), row_bytes(model.config, model.dtype)
        windows = [memory.window for memory in model.model.memories().values()]
        assert -(-(held - sum(windows) * row) // 2) == retrofit.kept_bytes(model)
        assert -(-(held - 2 * W * row) // 2) == retrofit.kept_bytes(model, W)
        wide = kept(window_only(model, equal_memory_window(model)))
        assert 0 <= wide - held < 2 * row, "not the window of as many bytes"


@pytest.mark.parametrize("others", ["full", "window"])
def test_layers_without_the_memory_have_a_share_of_its_bytes_where_they_have_a_window(
    partner: PreTrainedModel, kind: str, others: str
) -> None:
    model = awake(partner, kind, layers=[1], others=others)
    held, row, layers = kept(model), row_bytes(model.config, model.dtype), len(model.model.memories())
    assert layers == (1 if others == "full" else 2)
    assert -(-(held - layers * W * row) // layers) == retrofit.kept_bytes(model)
    assert 0 <= kept(window_only(model, equal_memory_window(model))) - held < layers * row


def test_the_teacher_s_cache_is_counted_too(partner: PreTrainedModel) -> None:
    _, cache = feed(partner, tokens(2, 20), [20], cache=DynamicCache())
    assert (
        retrofit.cache_bytes(cache) == 2 * 2 * 2 * 2 * 20 * 16 * 4
    )  # layers, k and v, rows, heads, tokens, dim, float32

"""Invariant 7: once the window is full, the cache's measured bytes do not grow."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import retrofit
from patches.kinds import KINDS
from tests.helpers import ON_A_WINDOW, S, W, awake, feed, tokens

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
def test_the_bytes_are_sinks_window_gates_and_state(partner: PreTrainedModel, kind: str) -> None:
    for dtype in DTYPES:
        model = awake(partner.to(dtype), kind)
        _, cache = feed(model, tokens(3, 64), [64])
        for layer in cache.layers:
            held = sum(tensor.numel() * tensor.element_size() for tensor in layer.tensors())
            assert held == sum(tensor.untyped_storage().nbytes() for tensor in layer.tensors()), "a view holds more"
        rows = cache.layers[0].keys.numel() + cache.layers[0].values.numel()
        assert cache.layers[0].keys.dtype == dtype
        assert rows <= 3 * 2 * 2 * 16 * (W + S) * 2, "keys and values kept beyond sinks and window"
        state = sum(tensor.numel() * tensor.element_size() for tensor in cache.layers[0].state.values())
        assert state == 3 * retrofit.state_bytes(model)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ON_A_WINDOW])
def test_state_bytes_are_what_is_held_beyond_sinks_window_and_gates(partner: PreTrainedModel, kind: str) -> None:
    for dtype in DTYPES:
        model = awake(partner.to(dtype), kind)
        layer = feed(model, tokens(3, 64), [64])[1].layers[0]
        held = sum(tensor.numel() * tensor.element_size() for tensor in layer.tensors())
        gates = 0 if layer.gates is None else layer.gates.numel() * layer.gates.element_size()
        rows = (W + S) * 2 * 2 * 16 * dtype.itemsize  # keys and values of two heads of 16
        assert held - gates - 3 * rows == 3 * retrofit.state_bytes(model)


def test_the_teacher_s_cache_is_counted_too(partner: PreTrainedModel) -> None:
    _, cache = feed(partner, tokens(2, 20), [20], cache=DynamicCache())
    assert (
        retrofit.cache_bytes(cache) == 2 * 2 * 2 * 2 * 20 * 16 * 4
    )  # layers, k and v, rows, heads, tokens, dim, float32

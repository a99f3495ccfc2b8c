"""The cache layer's arithmetic: what stands where in sinks and ring, what is evicted when, however tokens arrive."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from patches.cache import MemoryCacheLayer, adopt
from patches.errors import RetrofitError


def marked(slots: range, rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Keys (B, 1, n, 1) that say of which slot they are, 100 b + t; values: minus that; gates (B, n, 1): half of it."""
    mark = torch.tensor(slots, dtype=torch.float32) + 100 * torch.arange(rows)[:, None]
    return mark[:, None, :, None], -mark[:, None, :, None], mark[:, :, None] / 2


def fed(layer: MemoryCacheLayer, sizes: list[int], pad: Tensor | None = None, rows: int = 1) -> list[list[float]]:
    """Feed ``sizes`` tokens at a time as a memory does; returns the keys that each call evicts, by row."""
    evicted: list[list[float]] = [[] for _ in range(rows)]
    capacity = layer.window + layer.sinks
    min_pad = 0 if pad is None else int(pad.min())
    for size in sizes:
        k, v, gates = marked(range(layer.seen, layer.seen + size), rows)
        if layer.seen + size - min_pad <= capacity:
            layer.append_gates(gates)
            layer.update(k, v)
            continue
        if layer.evicting and size == 1 and pad is None:
            gone, _, gone_gates = layer.push(k, v, gates)
        else:
            stream = layer.stream(k, v, gates, pad)
            first = max(capacity + min_pad - layer.seen, 0)
            gone, gone_gates = stream.k[:, :, first:size], stream.gates[:, first:size]
            layer.commit(stream, size)
        assert torch.equal(gone[:, 0, :, 0] / 2, gone_gates[:, :, 0]), "a token's gate did not stay with it"
        for row in range(rows):
            evicted[row] += gone[row, 0, :, 0].tolist()
    return evicted


@settings(max_examples=80, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    window=st.integers(1, 7),
    sinks=st.integers(0, 5),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_every_token_is_in_one_place(window: int, sinks: int, sizes: list[int]) -> None:
    layer = MemoryCacheLayer("none", window, sinks)
    (evicted,) = fed(layer, sizes)
    seen = sum(sizes)
    assert layer.seen == layer.get_seq_length() == seen
    keys = layer.keys[0, 0, :, 0].tolist()
    assert layer.values[0, 0, :, 0].tolist() == [-key for key in keys]
    if seen <= window + sinks:
        assert not layer.evicting
        assert (keys, evicted) == ([*range(seen)], [])
    else:
        assert keys[:sinks] == [*range(sinks)]
        assert sorted(keys[sinks:]) == [*range(seen - window, seen)]
        assert all(int(key) % window == place for place, key in enumerate(keys[sinks:])), "token t lies at t % W"
        assert evicted == [*range(sinks, seen - window)], "in order, each once, never a sink"
        assert (layer.gates[0, :, 0] * 2).tolist() == keys[sinks:]


@settings(max_examples=80, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    window=st.integers(1, 7),
    sinks=st.integers(0, 5),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    data=st.data(),
)
def test_padding_is_no_sink(window: int, sinks: int, sizes: list[int], data: st.DataObject) -> None:
    seen = sum(sizes)
    pads = data.draw(st.lists(st.integers(0, seen), min_size=2, max_size=3))
    layer = MemoryCacheLayer("none", window, sinks)
    fed(layer, sizes, torch.tensor(pads), len(pads))
    if layer.evicting:
        for row, pad in enumerate(pads):
            keys = layer.keys[row, 0, :, 0]
            assert sorted(keys[sinks:].tolist()) == [100 * row + t for t in range(seen - window, seen)]
            arrived = [i for i in range(sinks) if pad + i < seen]  # what is not there yet may be anything
            assert keys[arrived].tolist() == [100 * row + pad + i for i in arrived]


def test_it_is_a_transformers_cache_layer() -> None:
    layer = MemoryCacheLayer("none", 3, 1)
    assert layer.get_seq_length() == 0
    assert not layer.is_compileable
    fed(layer, [2])
    assert layer.get_mask_sizes(5) == (7, 0)
    fed(layer, [6])
    assert not layer.is_sliding
    assert layer.get_mask_sizes(1) == (9, 0)
    layer.reset()
    assert (layer.get_seq_length(), layer.tensors(), layer.evicting) == (0, [], False)


def test_tokens_are_never_written_over_in_a_tensor_that_was_given_out() -> None:
    """The stream handed to the attention may be needed for gradients: a later token must not appear in it."""
    layer = MemoryCacheLayer("none", 3, 1)
    fed(layer, [6])
    k, v, gates = marked(range(6, 8))
    stream = layer.stream(k, v, gates, None)
    before = stream.k.clone()
    layer.commit(stream, 2)
    fed(layer, [1, 1, 1])
    assert torch.equal(stream.k, before)


def test_only_empty_plain_layers_are_adopted() -> None:
    cache = DynamicCache()
    ours = adopt(cache, 2, "none", 8, 2)
    assert cache.layers[2] is ours
    assert adopt(cache, 2, "none", 8, 2) is ours
    assert adopt(cache, 2, "none", 9, 2) is not ours, "empty, it takes another window"
    cache.layers[1].update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))
    with pytest.raises(RetrofitError, match=r"memory off.*new cache"):
        adopt(cache, 1, "none", 8, 2)

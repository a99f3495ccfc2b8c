"""The cache's arithmetic: what stands where in sinks and ring, what is evicted when, however texts arrive."""

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from patches.cache import MemoryCache, MemoryCacheLayer, ScratchLayer, newest_at_places
from patches.errors import RetrofitError
from patches.kinds import KINDS
from patches.sequence import Pass, Starts
from tests.conftest import tiny_base
from tests.helpers import S, W, awake, close, feed, left_mask, logits, positions, tokens
from tests.patches.steps import CPU, rotary


def marked(slots: range, rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Keys (B, 1, n, 1) that say of which slot they are, 100 b + t; values: minus that; gates (B, 1, n): half of it."""
    mark = torch.tensor(slots, dtype=torch.float32) + 100 * torch.arange(rows)[:, None]
    return mark[:, None, :, None], -mark[:, None, :, None], mark[:, None] / 2


def fed(layer: MemoryCacheLayer, sizes: list[int], pads: list[int] | None = None, seen: int = 0) -> list[list[float]]:
    """Feed ``sizes`` tokens at a time as a memory does; returns the keys that each call evicts, by row."""
    rows = 1 if pads is None else len(pads)
    evicted: list[list[float]] = [[] for _ in range(rows)]
    starts = Starts() if pads is None else Starts(tuple(pads))
    capacity = layer.window + layer.sinks

    def arrive(own: MemoryCacheLayer, now: Pass, of: slice, *new: Tensor) -> None:
        if now.decoding:
            gone, _, gates = own.replace(now, *new)
        else:
            stream = own.stream(now, *new)
            first = now.first_evicting(own.window, own.sinks)
            gone, gates = stream.k[:, :, first : now.new], stream.gates[:, :, first : now.new]
            own.commit(stream, now)
        assert torch.equal(gone[..., 0] / 2, gates), "a token's gate did not stay with it"
        for row, keys in zip(range(rows)[of], gone[:, 0, :, 0].tolist(), strict=True):
            evicted[row] += keys

    for size in sizes:
        new = marked(range(seen, seen + size), rows)
        evicting = layer.aligned or seen + size - min(starts.pads) > capacity
        decoding = size == 1 and seen - max(starts.pads) > capacity
        index = torch.tensor([seen - pad for pad in starts.pads])
        now = Pass(seen, size, starts, evicting, rotary, CPU, CPU, decoding=decoding, index=index if decoding else None)
        seen += size
        if not evicting:
            layer.append(*new)
        elif decoding or not starts.padded:
            arrive(layer, now, slice(None), *new)
        else:
            parts = []
            for text in now.texts:
                part = layer.part(text, {})
                if text.now.new:
                    arrive(part, text.now, text.rows, *(x[text.rows, :, text.skip :] for x in new))
                parts.append((text.rows, part))
            layer.join(parts)
    return evicted


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def always(**arguments: Any) -> Any:
    """The same examples in every run."""
    chosen = settings(max_examples=80, deadline=None, derandomize=True, phases=[Phase.generate])
    return lambda test: chosen(given(window=st.integers(1, 7), sinks=st.integers(0, 5), **arguments)(test))


@always(sizes=sizes)
def test_every_token_is_in_one_place(window: int, sinks: int, sizes: list[int]) -> None:
    layer = MemoryCacheLayer("none", window, sinks)
    (evicted,) = fed(layer, sizes)
    seen = sum(sizes)
    keys = layer.keys[0, 0, :, 0].tolist()
    assert layer.values[0, 0, :, 0].tolist() == [-key for key in keys]
    if seen <= window + sinks:
        assert not layer.aligned
        assert (keys, evicted) == ([*range(seen)], [])
    else:
        assert keys[:sinks] == [*range(sinks)]
        assert sorted(keys[sinks:]) == [*range(seen - window, seen)]
        lies = [sinks + (int(key) - sinks) % window for key in keys[sinks:]]
        assert lies == [*range(sinks, sinks + window)], "token t lies at S + (t - S) % W"
        assert evicted == [*range(sinks, seen - window)], "in order, each once, never a sink"
        assert (layer.gates[0, 0] * 2).tolist() == keys[sinks:]


@always(sizes=sizes, data=st.data())
def test_padding_is_in_no_place(window: int, sinks: int, sizes: list[int], data: st.DataObject) -> None:
    """Each row of a padded batch holds, evicts and decodes what it would by itself."""
    seen = sum(sizes)
    pads = data.draw(st.lists(st.integers(0, seen), min_size=2, max_size=3))
    layer = MemoryCacheLayer("none", window, sinks)
    evicted = fed(layer, sizes, pads)
    if not layer.aligned:
        return
    for row, pad in enumerate(pads):
        alone, length = MemoryCacheLayer("none", window, sinks), seen - pad
        (gone,) = fed(alone, [1] * length)
        assert [key - 100 * row - pad for key in evicted[row]] == gone
        for name, held in layer.named_tensors().items():
            expected = alone.named_tensors().get(name)
            count = min(length, window + sinks) if name != "gates" else max(min(length - sinks, window), 0)
            assert not held[row, :, count:].any(), "what is not there yet is zero"
            if count and expected is not None:
                shift = {"keys": 1.0, "values": -1.0, "gates": 0.5}[name] * (100 * row + pad)
                assert torch.equal(held[row, :, :count] - shift, expected[0, :, -count:])


@pytest.mark.parametrize("places", [0, 1, 3, 7])
@pytest.mark.parametrize("total", [0, 1, 3, 4, 20])
def test_the_newest_at_each_place_of_a_ring(total: int, places: int) -> None:
    ring = [-1] * places
    for item in range(total if places else 0):
        ring[item % places] = item
    assert [max(item, -1) for item in newest_at_places(total, places).tolist()] == ring


@pytest.mark.parametrize("seen", [5, 9])
def test_parts_of_a_layer_are_joined_as_they_were(seen: int) -> None:
    """S + W = 5, the second text 5 tokens shorter than 9 or 3 than 5, and a state that grows with a text."""
    layer, pads = MemoryCacheLayer("none", 4, 1), [0, 5 if seen == 9 else 3]
    fed(layer, [seen], pads)
    layer.state["rows"] = torch.arange(10.0).view(2, 1, 5)
    length = seen - pads[1]

    def parts_of(now: Pass, grown: int) -> list[tuple[slice, MemoryCacheLayer]]:
        shapes = lambda seen: {"rows": (1, min(grown or seen, 5)), "later": (1,)}  # noqa: E731
        return [(text.rows, layer.part(text, shapes(text.now.seen))) for text in now.texts]

    starts, before = Starts(tuple(pads)), layer.named_tensors()
    parts = parts_of(Pass(seen, 1, starts, True, rotary, CPU, CPU), 0)
    (_, long), (_, short) = parts
    assert [x.keys.shape[2] for x in (long, short)] == [5, length]
    assert [x.gates.shape[2] for x in (long, short)] == [4, length - 1], "of the ring alone"
    assert torch.equal(short.keys, marked(range(pads[1], seen))[0] + 100)
    assert torch.equal(short.gates * 2, marked(range(pads[1] + 1, seen))[0][..., 0] + 100)
    rows = before["state.rows"][1:]
    # until texts are aligned, padding lies in front of what is kept of each token
    assert torch.equal(short.state["rows"], rows[..., :length] if layer.aligned else rows[..., -length:])
    for _, part in parts:
        assert part.aligned
        assert part.named_tensors().keys() == before.keys(), "a state that is not there yet is left out"
        for name, x in part.named_tensors().items():
            assert x.untyped_storage().data_ptr() == before[name].untyped_storage().data_ptr(), "a copy"
    short.state["new"] = torch.ones(1, 2)
    layer.join(parts)
    assert layer.aligned
    for row, part in enumerate([long, short]):
        for name, x in part.named_tensors().items():
            whole = layer.named_tensors()[name][row : row + 1]
            assert torch.equal(whole[tuple(slice(n) for n in x.shape)], x), name
    assert not layer.keys[1, :, length:].any()
    assert layer.state["new"].tolist() == [[0, 0], [1, 1]]
    again = layer.named_tensors()
    layer.join(parts_of(Pass(99, 1, starts, True, rotary, CPU, CPU), 5))
    assert all(layer.named_tensors()[name] is again[name] for name in before), "views of all rows need no new tensor"


def test_it_is_a_transformers_cache_layer() -> None:
    cache = DynamicCache()
    MemoryCache.adopt(cache, {0: KINDS["none"](tiny_base("Qwen2").config, 3, 1, None)})
    layer = cache.layers[0]
    assert (layer.get_seq_length(), layer.is_compileable, layer.is_croppable, layer.is_sliding) == (
        0,
        False,
        True,
        False,
    )
    for size in (2, 6):
        fed(layer, [size], seen=cache.sequence.seen)
        cache.sequence.seen += size
    assert (layer.get_seq_length(), layer.get_mask_sizes(1), layer.is_croppable) == (8, (9, 0), False)
    with pytest.raises(RetrofitError, match="memory on"):
        layer.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    cache.reset()
    assert (layer.get_seq_length(), layer.tensors(), layer.aligned) == (0, [], False)


def test_tokens_are_never_written_over_in_a_tensor_that_was_given_out() -> None:
    """The stream handed to the attention may be needed for gradients: a later token must not appear in it."""
    layer = MemoryCacheLayer("none", 3, 1)
    fed(layer, [6])
    now = Pass(6, 2, Starts(), True, rotary, CPU, CPU)
    stream = layer.stream(now, *marked(range(6, 8)))
    before = stream.k.clone()
    layer.commit(stream, now)
    fed(layer, [1, 1, 1], seen=8)
    assert torch.equal(stream.k, before)


def test_a_layer_that_stands_in_for_a_cache_keeps_nothing() -> None:
    layer = ScratchLayer("none", 3, 1)
    for pads in (None, [0, 2]):
        assert any(fed(layer, [8], pads))
        layer.append(*marked(range(2)))
        assert layer.tensors() == []


def test_only_empty_plain_layers_are_adopted() -> None:
    config, cache = tiny_base("Qwen2").config, DynamicCache()
    of = lambda window: {2: KINDS["none"](config, window, 2, None)}  # noqa: E731
    ours = MemoryCache.adopt(cache, of(8))
    assert ours is cache
    layer = cache.layers[2]
    assert MemoryCache.adopt(cache, of(8)).layers[2] is layer
    assert MemoryCache.adopt(cache, of(9)).layers[2] is not layer, "empty, it takes another window"
    cache.sequence.seen = 1
    with pytest.raises(RetrofitError, match=r"window=9.*new cache"):
        MemoryCache.adopt(cache, of(8))
    filled = DynamicCache()
    filled.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), 0)
    with pytest.raises(RetrofitError, match=r"memory off.*new cache"):
        MemoryCache.adopt(filled, of(8))
    assert type(filled) is DynamicCache, "a refused cache is as it was"


# ---- a model's cache: what its owner may do with it ----

KIND_OF_EACH_BASE = ["none", "ahn-gdn", "joint", "kvm", "compressive", "expected", "tova", "h2o"]
LENGTHS = [3 * W, 2 * W, W // 2]


@pytest.fixture(params=KIND_OF_EACH_BASE)
def model(request: pytest.FixtureRequest) -> Any:
    return awake(tiny_base("Qwen2").double(), request.param)


def ragged(model: Any, length: int = 3 * W) -> tuple[Tensor, Tensor, Any]:
    """Ids and mask of three padded texts, and a cache that holds all but the last of their tokens."""
    ids, mask = tokens(3, length + 6), left_mask([n + length + 6 - 3 * W for n in LENGTHS], length + 6)
    return ids, mask, feed(model, ids[:, :length], [length - 1, 1], mask)[1]


def test_texts_of_different_length_decode_as_each_alone(model: Any) -> None:
    """First those that still fill their windows apart from the others, then all in one step."""
    steps = 2 * W + 3
    ids, mask = tokens(3, 3 * W + steps), left_mask([n + steps for n in LENGTHS], 3 * W + steps)
    together, cache = feed(model, ids, [3 * W, *[1] * steps], mask, where=positions(mask))
    assert cache.sequence.full
    assert cache.sequence.index.tolist() == [n + steps - 1 for n in LENGTHS]
    for row, length in enumerate(LENGTHS):
        alone, own = feed(model, ids[row : row + 1, -length - steps :], [length, *[1] * steps])
        close(together[row, -length - steps :], alone[0])
        assert own.sequence.index.tolist() == [length + steps - 1]


@pytest.mark.parametrize("change", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_rows_of_a_padded_batch_are_chosen(model: Any, change: str) -> None:
    for length in (3 * W, 5 * W):  # before the shortest text has filled its window, and after
        ids, mask, cache = ragged(model, length)
        rows = [0, 0, 1, 1, 2, 2] if change == "batch_repeat_interleave" else [2, 0, 0]
        getattr(cache, change)(2 if change == "batch_repeat_interleave" else torch.tensor(rows))
        expected, _ = feed(model, ids[rows], [length, *[1] * 6], mask[rows])
        ours, _ = feed(model, ids[rows][:, length:], [1] * 6, mask[rows], cache)
        for i, row in enumerate(rows):
            real = mask[row, length:].bool()
            close(ours[i][real], expected[i, length:][real])


def test_forks_go_their_own_way(model: Any) -> None:
    for length in (W // 2 + 1, 3 * W):
        ids = tokens(2, length + 4)
        _, cache = feed(model, ids[:, :length], [length])
        before = [x.clone() for layer in cache.layers for x in layer.tensors()]
        own = cache.fork()
        expected = logits(model, torch.cat([ids[:, :length], ids[:, length:].flip(1)], 1))[:, length:]
        close(feed(model, ids[:, length:].flip(1), [2, 2], cache=own)[0], expected)
        assert (cache.get_seq_length(), own.get_seq_length()) == (length, length + 4)
        after = [x for layer in cache.layers for x in layer.tensors()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        close(feed(model, ids[:, length:], [4], cache=cache)[0], logits(model, ids)[:, length:])


def test_cropped_and_reset_caches_start_where_they_say(model: Any) -> None:
    ids, keeps_scores = tokens(2, 3 * W), model.config.memory["kind"] == "h2o"
    _, cache = feed(model, ids[:, : S + W], [S, W])
    if keeps_scores:
        with pytest.raises(RetrofitError, match="cannot be cropped"):
            cache.crop(1 - W)
    else:
        cache.crop(1 - W)
        assert cache.get_seq_length() == S + 1
        close(feed(model, ids[:, S + 1 :], [1, 3 * W - S - 2], cache=cache)[0], logits(model, ids)[:, S + 1 :])
        with pytest.raises(RetrofitError, match="cannot be cropped"):
            cache.crop(1 - W)
        assert cache.get_seq_length() == 3 * W
    *_, padded = ragged(model)
    padded.reset()
    assert padded.get_seq_length() == 0
    close(feed(model, ids, [W, 2 * W - 1, 1], cache=padded)[0], logits(model, ids))

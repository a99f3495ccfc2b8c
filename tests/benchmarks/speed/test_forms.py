"""Benchmarks: that they compare what they say, and measure memory right. Never how fast anything is."""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch

from benchmarks.speed import decode, prefill, scan, two_forms, window
from benchmarks.speed.two_forms import check_equal
from patches.errors import RetrofitError
from retrofit.bench import models
from retrofit.bench.machine import PEAK_RESET, Where, peak_bytes
from retrofit.bench.timing import interleaved, ratios, spread

SMALL = window.Case(length=70, window=16, sinks=3, heads=2, kv_heads=1, head_dim=8)


def test_rounds_interleave_the_arms_and_do_not_count_the_first() -> None:
    order: list[str] = []
    seconds = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=2)
    assert order == ["a", "b"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}
    interleaved({"c": lambda: order.append("c")}, repeats=1, warm_up=False)
    assert order[6:] == ["c"]
    with pytest.raises(RetrofitError, match="repeats=0"):
        interleaved({}, repeats=0)


def test_spread_is_the_median_and_the_quartiles() -> None:
    assert spread("x", [5.0, 1.0, 2.0, 4.0, 3.0]) == {"x": 3.0, "x_low": 2.0, "x_high": 4.0}
    assert spread("x", [7.0]) == {"x": 7.0, "x_low": 7.0, "x_high": 7.0}
    assert ratios([6.0, 2.0], [3.0, 4.0]) == [2.0, 0.5]


def after_holding_more(elements: int) -> Callable[[], torch.Tensor]:
    torch.ones(4 * elements)
    return functools.partial(torch.ones, elements)


@pytest.mark.skipif(not PEAK_RESET.exists(), reason="peak memory is read from Linux's /proc")
def test_peak_memory_counts_what_the_call_holds_and_nothing_before_it() -> None:
    held = peak_bytes(torch.device("cpu"), after_holding_more, 2**24)
    assert held is not None
    assert held == pytest.approx(4 * 2**24, abs=2**22)


def test_the_dense_mask_shows_the_window_and_the_sinks() -> None:
    mask = window.dense_mask(SMALL)
    seen = [[j <= t and (t - j < SMALL.window or j < SMALL.sinks) for j in range(70)] for t in range(70)]
    assert mask.tolist() == seen


@pytest.mark.parametrize("backward", [False, True])
def test_window_rows(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter([6 * 2**20, 2 * 2**20])  # each would start a process
    monkeypatch.setattr(two_forms, "peak_bytes", lambda _, prepare, *how: prepare(*how)() is not None and next(held))
    dense, blocked, ratio = window.run(dataclasses.replace(SMALL, backward=backward), repeats=1)
    assert [dense["name"], blocked["name"], ratio["name"]] == ["dense mask", "blocked", "dense / blocked"]
    assert [row["extra_mib"] for row in (dense, blocked, ratio)] == [6, 2, 3]
    assert ratio["seconds"] == pytest.approx(dense["seconds"] / blocked["seconds"])
    assert set(window.COLUMNS) == set(ratio)


def test_forms_that_differ_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    original = window.window_attention
    monkeypatch.setattr(window, "window_attention", lambda *a, **k: original(*a, **{**k, "scale": 1.0}))
    with pytest.raises(RetrofitError, match="differ"):
        window.run(SMALL, repeats=1)
    monkeypatch.setitem(scan.FORMS, "chunked", lambda *a, **k: (a[0], a[0]))
    with pytest.raises(RetrofitError, match="differ"):
        scan.run(scan.Case(length=20, heads=1, head_dim=4), repeats=1)


def test_scan_rows() -> None:
    rows = scan.run(scan.Case(length=70, heads=1, head_dim=4), repeats=2)
    assert [row["pass"] for row in rows] == 3 * ["forward"] + 3 * ["forward + backward"]
    assert [row["name"] for row in rows[:3]] == ["token loop", "chunked", "loop / chunked"]
    assert set(scan.COLUMNS) == set(rows[0])


@pytest.mark.parametrize("memory", ["ahn-gdn", "ahn-dn", "none"])
def test_decoding_holds_the_same_bytes_at_any_context(memory: str) -> None:
    case = decode.Case(memories=(memory,), window=8, sinks=2, layers=1, hidden=128, short=20, long=80)
    full_short, full_long, full_ratio, *_, short, long, ratio = decode.run(case, repeats=1)
    assert (long["name"], ratio["name"]) == (memory, f"{memory}: long / short")
    assert (short["context"], long["context"]) == (20, 80)
    assert ratio["cache_bytes"] == 1.0
    assert 0 < long["cache_bytes"] == short["cache_bytes"] < full_long["cache_bytes"]
    assert full_ratio["cache_bytes"] == round(full_long["cache_bytes"] / full_short["cache_bytes"], 4) > 3


def test_prefill_rows_are_beside_none_and_the_half_length() -> None:
    rows = prefill.run(
        prefill.Case(memories=("ahn-dn",), window=8, sinks=2, layers=1, hidden=128, length=20, longest=40), repeats=1
    )
    assert [(row["name"], row["length"]) for row in rows] == [
        (name, length) for name in (models.FULL, "none", "ahn-dn") for length in (20, 40)
    ]
    assert [row["to_none"] for row in rows[2:4]] == [1.0, 1.0]
    assert [row["to_half"] is None for row in rows] == [True, False] * 3
    assert set(prefill.COLUMNS) == set(rows[0])
    with pytest.raises(RetrofitError, match="longer than 10"):
        prefill.Case(window=8, sinks=2, length=10)


class Counter:
    """A CUDA of the test's own: what was asked of it, and memory that goes up and down as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, devices: int = 2) -> None:
        self.held, self.peak, self.asked = 100, 100, []
        fake = {
            "device_count": lambda: devices,
            "set_device": lambda index: self.asked.append(("set", index)),
            "synchronize": lambda *_: self.asked.append("wait"),
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda *_: setattr(self, "peak", self.held),
            "memory_allocated": lambda *_: self.held,
            "max_memory_allocated": lambda *_: self.peak,
        }
        for name, function in fake.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def hold(self, more: int) -> None:
        self.held += more
        self.peak = max(self.peak, self.held)


def test_on_a_gpu_the_allocator_counts_what_the_call_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Counter(monkeypatch)

    def prepare() -> Callable[[], None]:
        gpu.hold(1000)  # of the inputs, and what was only needed to make them
        gpu.hold(-500)
        return lambda: [gpu.hold(70), gpu.hold(-70), gpu.asked.append("ran")]  # type: ignore[return-value]

    assert peak_bytes(torch.device("cuda"), prepare) == 70
    assert gpu.asked == ["wait", "ran", "wait"]

    def too_much() -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(MemoryError):
        peak_bytes(torch.device("cuda"), too_much)


def test_a_gpu_is_made_the_current_one_and_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Counter(monkeypatch)
    assert Where(device="cuda:1").place() == torch.device("cuda:1")
    assert gpu.asked == [("set", 1)]
    for device, said in {
        "cuda:2": "torch sees 2 CUDA devices",
        "gpu": "use cpu, cuda",
        "cpu:1": "use cpu, cuda",
    }.items():
        with pytest.raises(RetrofitError, match=said):
            Where(device=device)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_forms_and_models_in_half_precision(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_forms, "peak_bytes", lambda *_: None)
    rows = window.run(dataclasses.replace(SMALL, dtype=dtype, backward=True), repeats=1)
    assert [row["extra_mib"] for row in rows] == [None] * 3
    assert len(scan.run(scan.Case(length=40, heads=1, head_dim=4, dtype=dtype), repeats=1)) == 6
    shape = {"window": 8, "sinks": 2, "layers": 1, "hidden": 128, "dtype": dtype}
    rows = decode.run(decode.Case(**shape, short=20, long=40), repeats=1)
    assert rows[0]["cache_bytes"] == 20 * 2 * 64 * 2
    assert len(prefill.run(prefill.Case(memories=("ahn-gdn",), **shape, length=20), repeats=1)) == 3


def test_results_that_are_no_numbers_are_no_match() -> None:
    with pytest.raises(RetrofitError, match="differ by nan"):
        check_equal([torch.tensor([1.0]), torch.tensor([float("nan")])], 0.1)

"""What one thread does to a model changes no other thread's call: its memory is off there alone, its window stays."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from threading import Event
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from patches.errors import RetrofitError
from tests.helpers import awake, close, logits, tokens

IDS = tokens(2, 40)
PATIENCE = 60  # seconds


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@contextmanager
def halfway(model: Any, threads: ThreadPoolExecutor) -> Iterator[Any]:
    """Inside the block another thread stands in the middle of a call, whose logits its future then has."""
    there, on = Event(), Event()

    def wait(*_: Any) -> None:
        there.set()
        assert on.wait(PATIENCE)

    handle = model.model.layers[-1].register_forward_pre_hook(wait)
    call = threads.submit(logits, model, IDS)
    try:
        assert there.wait(PATIENCE)
        handle.remove()
        yield call
    finally:
        on.set()


def test_the_memory_is_off_in_one_thread_alone(
    one_model: Any, partner: PreTrainedModel, threads: ThreadPoolExecutor
) -> None:
    own = logits(one_model, IDS)
    with one_model.memory_off():
        assert torch.equal(threads.submit(logits, one_model, IDS).result(), own)
        assert torch.equal(logits(one_model, IDS), logits(partner, IDS))
        with halfway(one_model, threads) as call:  # it begins in here and ends out there
            pass
    assert torch.equal(call.result(), own)


def test_blocks_may_end_in_any_order(one_model: Any, partner: PreTrainedModel, threads: ThreadPoolExecutor) -> None:
    begun, done = Event(), Event()

    def outlast() -> bool:
        with one_model.memory_off():
            begun.set()
            assert done.wait(PATIENCE)
            return torch.equal(logits(one_model, IDS), logits(partner, IDS))

    own = logits(one_model, IDS)
    with one_model.memory_off():
        other = threads.submit(outlast)
        assert begun.wait(PATIENCE)
    assert torch.equal(logits(one_model, IDS), own)
    done.set()
    assert other.result()
    assert one_model.model.memory_enabled
    assert torch.equal(logits(one_model, IDS), own)


def test_no_window_changes_under_a_call(one_model: Any, threads: ThreadPoolExecutor) -> None:
    own = logits(one_model, IDS)
    with halfway(one_model, threads) as call:
        with pytest.raises(RetrofitError, match="another thread"):
            one_model.set_window(16)
        with pytest.raises(RetrofitError, match="another thread"):
            one_model.set_window(8, sinks=1)
    assert torch.equal(call.result(), own)
    one_model.set_window(16)
    wider = logits(one_model, IDS)
    one_model.set_window(8)
    assert torch.equal(logits(one_model, IDS), own)
    assert not torch.equal(wider, own)


def test_what_is_compiled_has_its_memory_off_too(make_base: Callable[..., PreTrainedModel]) -> None:
    base = make_base("Qwen2", num_hidden_layers=1)
    model = awake(base, "none")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        close(compiled(IDS, use_cache=False).logits, logits(model, IDS))
        with model.memory_off():
            close(compiled(IDS, use_cache=False).logits, logits(base, IDS))
        close(compiled(IDS, use_cache=False).logits, logits(model, IDS))


def test_a_call_that_fails_is_over(one_model: Any) -> None:
    def stop(*_: Any) -> None:
        raise KeyError("on the way")

    handle = one_model.model.layers[0].register_forward_pre_hook(stop)
    with pytest.raises(KeyError, match="on the way"):
        logits(one_model, IDS)
    handle.remove()
    one_model.set_window(16)


def test_a_copy_has_its_own_switch(one_model: Any, partner: PreTrainedModel) -> None:
    copy = deepcopy(one_model)
    own = logits(one_model, IDS)
    with one_model.memory_off():
        assert torch.equal(logits(copy, IDS), own)
    with copy.memory_off():
        assert torch.equal(logits(copy, IDS), logits(partner, IDS))
        assert torch.equal(logits(one_model, IDS), own)

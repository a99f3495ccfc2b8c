"""Invariant 3: a freshly patched model is the window-only model at any length, and its memory still gets gradients.

It is so for memories that add what they read to the window's output, behind a gate or projection that begins at zero.
Rows that stand in the window's own softmax are seen from the start, so the kinds that keep such rows have another exact
limit: with room for every token they are full attention (in tests/patches: test_kvm, test_eviction,
test_compressive, test_expected). Gradients are asked of the kinds that have something to fit.
"""

import pytest
import torch
from transformers import PreTrainedModel

import retrofit
from tests.helpers import ON_A_WINDOW, TRAINABLE, S, W, feed, left_mask, logits, tokens


@pytest.mark.parametrize("kind", ON_A_WINDOW)
def test_fresh_it_is_the_window(base: PreTrainedModel, kind: str) -> None:
    fresh, window = (retrofit.patch(base, name, W, S) for name in (kind, "none"))
    ids, mask = tokens(3, 30), left_mask([30, 17, 4], 30)
    assert torch.equal(logits(fresh, ids), logits(window, ids))
    sizes = [11, 1, 1, 17]
    assert torch.equal(feed(fresh, ids, sizes, mask)[0], feed(window, ids, sizes, mask)[0])


@pytest.mark.parametrize("kind", ON_A_WINDOW)
def test_fresh_in_half_precision(kind: str, half: tuple[PreTrainedModel, torch.dtype, bool]) -> None:
    base, dtype, mixed = half
    base = base if mixed else base.to(dtype)
    fresh, window = (retrofit.patch(base, name, W, S) for name in (kind, "none"))
    ids, mask = tokens(2, 40), left_mask([40, 17], 40)
    with torch.autocast("cpu", dtype, enabled=mixed):
        assert torch.equal(logits(fresh, ids), logits(window, ids))
        sizes = [11, 1, 28]
        assert torch.equal(feed(fresh, ids, sizes, mask)[0], feed(window, ids, sizes, mask)[0])


@pytest.mark.parametrize("kind", TRAINABLE)
def test_everything_learns_from_the_second_step_on(base: PreTrainedModel, kind: str) -> None:
    model = retrofit.patch(base, kind, W, S)
    parameters = {name: p for name, p in model.memory_parameters() if p.requires_grad}  # others are measured
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    moved = []
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens(2, 40), labels=tokens(2, 40)).loss.backward()
        moved.append({name for name, p in parameters.items() if p.grad is not None and p.grad.abs().max() > 0})
        optimizer.step()
    # behind a zero output nothing else can learn in the first step
    for index in model.model.memories():
        assert any(f"layers.{index}." in name for name in moved[0]), "a layer's memory has no gradient"
    assert moved[1] == parameters.keys()

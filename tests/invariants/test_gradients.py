"""Invariant 8: gradients reach exactly the memory, alike with and without checkpointing; the base stays as it is.

TRAINABLE are the kinds that have something to fit; the others have no parameter that a gradient could reach.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import retrofit
from tests.helpers import TRAINABLE, W, awake, checksum, close, left_mask, logits, tokens

MakeBase = Callable[..., PreTrainedModel]
LENGTH = 30
PIECES = ((0, 12), (12, 13), (13, 14), (14, 24), *((t, t + 1) for t in range(24, LENGTH)))


def gradients(model: Any, out: Tensor) -> dict[str, Tensor]:
    """Gradients of a loss that minds every logit, by parameter."""
    model.zero_grad()
    (out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        close(gradient, theirs[name])


@pytest.mark.parametrize("kind", TRAINABLE)
def test_exactly_the_memory_learns_and_the_base_stays(base: PreTrainedModel, kind: str) -> None:
    model = awake(base, kind).train()
    memory = {name for name, p in model.memory_parameters() if p.requires_grad}  # what is not is measured
    assert {name for name, p in model.named_parameters() if p.requires_grad} == memory
    assert all(".self_attn.memory." in name for name in memory)
    before, teacher = checksum(model), logits(base, tokens(2, LENGTH))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    for _ in range(2):
        found = gradients(model, model(tokens(2, LENGTH)).logits)
        assert found.keys() == memory
        assert all(g.isfinite().all() and g.abs().max() > 0 for g in found.values())
        optimizer.step()
    assert checksum(model) == before == checksum(base)
    with model.memory_off():
        assert torch.equal(logits(model, tokens(2, LENGTH)), teacher)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_in_half_precision(kind: str, half: tuple[PreTrainedModel, torch.dtype, bool]) -> None:
    """With a base of 16 bits, or under autocast, the memory learns in float32, and what it would learn in float32."""
    base, dtype, mixed = half
    ids, mask = tokens(3, LENGTH), left_mask([LENGTH, 17, 5], LENGTH)
    model = awake(base, kind, push=0.03)
    exact = gradients(model, model(ids, attention_mask=mask).logits)
    if not mixed:
        model = awake(base.to(dtype), kind, push=0.03)
    with torch.autocast("cpu", dtype, enabled=mixed):
        out = model(ids, attention_mask=mask).logits
    found = gradients(model, out.float())
    assert found.keys() == exact.keys()
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    ours, theirs = (torch.cat([parts[name].flatten() for name in exact]) for parts in (found, exact))
    assert ours.isfinite().all()
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.98


@pytest.mark.parametrize("kind", TRAINABLE)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(partner: PreTrainedModel, kind: str, reentrant: bool) -> None:
    model = awake(partner.double(), kind).train()
    ids, mask = tokens(3, LENGTH), left_mask([LENGTH, 17, 5], LENGTH)
    plain = gradients(model, model(ids, attention_mask=mask).logits)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()  # a reentrant segment whose input needs no gradient gives none
    out = model(ids, attention_mask=mask, use_cache=False).logits
    with model.memory_off(), torch.no_grad():  # the teacher looks in between, as in distillation
        model(ids, attention_mask=mask)
    assert_same(gradients(model, out), plain)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_they_are_the_derivative(partner: PreTrainedModel, kind: str) -> None:
    model = awake(partner.double(), kind)
    for module in list(model.modules()):  # the families' norms compute in float32, too coarse for differences
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, torch.nn.Identity())
    ids, mask = tokens(2, LENGTH), left_mask([LENGTH, 17], LENGTH)
    found = gradients(model, model(ids, attention_mask=mask).logits)

    def loss() -> float:
        out = logits(model, ids, mask)
        return float((out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).square().mean())

    generator, step = torch.Generator().manual_seed(1), 1e-5
    for name, parameter in model.memory_parameters():
        if not parameter.requires_grad:
            continue
        direction = torch.randn(parameter.shape, generator=generator).to(parameter)
        direction /= direction.norm()
        expected = float((found[name] * direction).sum())
        with torch.no_grad():
            parameter.add_(step * direction)
            up = loss()
            parameter.sub_(2 * step * direction)
            down = loss()
            parameter.add_(step * direction)
        assert (up - down) / (2 * step) == pytest.approx(expected, rel=1e-4, abs=1e-9), name


@pytest.mark.parametrize("unfrozen", ["memory", "q_proj", "v_proj"])
@pytest.mark.parametrize("kind", TRAINABLE)
def test_through_a_cache(partner: PreTrainedModel, kind: str, unfrozen: str) -> None:
    """Nothing that a graph needs is written over; the projections stand for what a LoRA adapter trains besides."""
    model = awake(partner.double(), kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(unfrozen in name)
    ids = tokens(2, LENGTH)
    cache = DynamicCache()
    out = [model(ids[:, start:end], past_key_values=cache).logits for start, end in PIECES]
    assert_same(gradients(model, torch.cat(out, 1)), gradients(model, model(ids, use_cache=False).logits))


@pytest.mark.parametrize("kind", TRAINABLE)
def test_gradients_to_the_input(partner: PreTrainedModel, kind: str) -> None:
    """As for soft prompts; later tokens have no part in earlier logits, every token in those of the last."""
    model = awake(partner.double(), kind)
    embeddings = model.get_input_embeddings()(tokens(1, LENGTH)).detach().requires_grad_()
    out = model(inputs_embeds=embeddings, use_cache=False).logits
    (early,) = torch.autograd.grad(out[0, 20].sum(), embeddings, retain_graph=True)
    assert not early[0, 21:].any()
    (late,) = torch.autograd.grad(out[0, -1].sum(), embeddings)
    assert (late[0].abs().amax(1) > 0).all()


@pytest.mark.parametrize("kind", TRAINABLE)
def test_below_the_capacity_there_is_nothing_to_learn(partner: PreTrainedModel, kind: str) -> None:
    model = retrofit.patch(partner, kind, W, 2)
    assert not model(tokens(2, W), use_cache=False).logits.requires_grad


@pytest.mark.parametrize("kind", TRAINABLE)
def test_in_bfloat16_gradients_are_float32_and_near(partner: PreTrainedModel, kind: str) -> None:
    ids = tokens(2, LENGTH)
    model = awake(partner, kind, push=0.03)
    exact = gradients(model, model(ids).logits)
    model = awake(partner.to(torch.bfloat16), kind, push=0.03)
    for name, gradient in gradients(model, model(ids).logits.float()).items():
        assert gradient.dtype == torch.float32
        assert (gradient - exact[name]).norm() < 0.2 * exact[name].norm() + 1e-4, name

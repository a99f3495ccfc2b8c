"""The invariants, in short, with flash-linear-attention behind every recurrence: `make test-kernels`.

tests/invariants holds them on torch's forms, to 1e-9 in float64, which these kernels do not compute in.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import retrofit
from distill.simulate import checkpoint_layers
from patches import fla_ops
from tests.conftest import tiny_base
from tests.helpers import S, W, awaken, feed, left_mask, logits, positions, tokens
from tests.kernels.arguments import forced
from tests.kernels.test_models import KINDS

pytestmark = pytest.mark.usefixtures("interpreter")
LENGTH, SHORT = 27, 14  # of the rows of a batch, the second padded on the left


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    kind, options = KINDS[request.param]
    with forced("fla"):
        yield awaken(retrofit.patch(tiny_base("Qwen2", num_hidden_layers=1), kind, W, S, **options), 0.03)


def near(ours: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-4)


def test_every_way_to_read_a_text_is_one_computation(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    ids, mask = tokens(2, LENGTH), left_mask([LENGTH, SHORT], LENGTH)
    where = positions(mask)
    whole = logits(model, ids, mask, where)
    assert calls  # it is fla that reads
    # a row alone: neither the others nor its padding count
    near(whole[:1], logits(model, ids[:1]))
    near(whole[1:, -SHORT:], logits(model, ids[1:, -SHORT:]))
    # in pieces, in which the padding ends and the memory begins: the chunked form, the recurrent form, single tokens
    pieces, cache = feed(model, ids, [12, 9, 4, 1, 1], mask, where=where)
    near(pieces[mask.bool()], whole[mask.bool()])
    # decoding goes on from there as one call over all of it would
    more = torch.cat([ids, tokens(2, 2, seed=1)], 1)
    mask = torch.cat([mask, torch.ones(2, 2, dtype=torch.long)], 1)
    after, _ = feed(model, more[:, LENGTH:], [1, 1], mask, cache, positions(mask))
    near(after, logits(model, more, mask, positions(mask))[:, LENGTH:])


@torch.no_grad()
def test_it_begins_as_its_base_and_stays_it_with_the_memory_off(model: Any) -> None:
    base, ids = tiny_base("Qwen2", num_hidden_layers=1), tokens(2, LENGTH)
    exact = base(ids).logits
    assert torch.equal(logits(model, ids[:, : S + W]), base(ids[:, : S + W]).logits)
    assert not torch.allclose(logits(model, ids), exact, atol=1e-3)  # the memory shows
    with model.memory_off():
        assert torch.equal(logits(model, ids), exact)


def test_generation_and_gradients(model: Any) -> None:
    ids, mask = tokens(2, LENGTH), left_mask([LENGTH, SHORT], LENGTH)
    how = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    told = model.generate(ids, attention_mask=mask, **how)
    seen = torch.cat([mask, torch.ones(2, 2, dtype=torch.long)], 1)
    near(torch.stack(told.logits, 1), logits(model, told.sequences, seen, positions(seen))[:, LENGTH - 1 : -1])

    found = []
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_layers(model)
        model.train().zero_grad()
        model(ids, attention_mask=mask).logits[mask.bool()].square().mean().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert found[0].keys() == found[1].keys() == learning
    for name, gradient in found[0].items():
        assert gradient.any(), name
        near(found[1][name], gradient)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the queries with which fla's kernels were called."""
    calls: list[tuple[int, ...]] = []
    run = fla_ops.run_form

    def told(chunks: Any, steps: Any, gradient: bool, q: Tensor, *rest: Any, **how: Any) -> Any:
        calls.append(tuple(q.shape))
        return run(chunks, steps, gradient, q, *rest, **how)

    monkeypatch.setattr(fla_ops, "run_form", told)
    return calls

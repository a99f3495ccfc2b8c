"""The demo's teacher: what each stage asks, and that lessons teach. Whether it recalls only the demo itself shows."""

import pytest
import torch

from distill.demo import teacher as demo_teacher
from distill.demo.teacher import SHORT, as_llama, copies, new_model, train_teacher
from distill.demo.text import WORDS, documents, generator
from patches.errors import RetrofitError


def test_model_depends_on_the_seed_alone() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, again, other = new_model(0), new_model(0), new_model(1)
    assert torch.equal(torch.get_rng_state(), before), "the caller's random state was touched"
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.lm_head.weight is first.get_input_embeddings().weight
    assert first(documents(2, 20, generator(0, "test"))).logits.shape == (2, 20, len(WORDS))


def test_the_teacher_as_a_llama_is_itself() -> None:
    teacher, ids = new_model(0), documents(2, 20, generator(0, "test"))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases begin at zero
    llama = as_llama(teacher)
    assert torch.equal(llama(ids).logits, teacher(ids).logits)
    assert llama.lm_head.weight is llama.get_input_embeddings().weight


def test_copies_can_be_known_from_what_came_before() -> None:
    ids, known = copies(30, generator(0, "test"))
    assert ids.shape == known.shape == (30, SHORT)
    for row, marks in zip(ids.tolist(), known.tolist(), strict=True):
        period = marks.index(True) - 1
        assert 8 <= period <= 32
        assert all(marks[period + 1 :])
        assert row[period:] == row[: SHORT - period]


def test_stages_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CHECK_EVERY": 2, "COPIED": -1.0, "RECALLED": -1.0, "FULL_STEPS": 6, "BATCH": 2}.items():
        monkeypatch.setattr(demo_teacher, name, value)
    seen: list[tuple[str, int, int, float, float]] = []
    model = train_teacher(0, lambda *step: seen.append(step))
    assert [(stage, step) for stage, step, *_ in seen] == [
        *[("copy", step) for step in (1, 2)],
        *[("short", step) for step in (1, 2)],
        *[("full", step) for step in range(1, 7)],
    ]
    assert not model.training
    losses = [loss for stage, *_, loss, _ in seen if stage == "full"]
    assert losses[-1] < losses[0]


def test_another_start_is_tried_and_then_it_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_teacher, "COPY_STEPS", 2)
    steps: list[tuple[str, float]] = []
    with pytest.raises(RetrofitError, match="seed 5"):
        train_teacher(5, lambda stage, _step, _most, loss, _accuracy: steps.append((stage, loss)))
    assert [stage for stage, _ in steps] == ["copy"] * 2 * demo_teacher.ATTEMPTS
    assert len({loss for _, loss in steps[::2]}) == demo_teacher.ATTEMPTS, "each attempt has its own initial weights"

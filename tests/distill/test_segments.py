"""Rows in segments: the losses and gradients of whole rows, for every kind; what a cut changes; what stays bounded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from distill import full_attention
from distill.config import DistillConfig
from distill.objective import Objective
from distill.recipe import read_recipe
from distill.run import distill
from distill.simulate import Tracker, checkpoint_layers
from patches.errors import RetrofitError
from tests.conftest import FAMILIES, OTHERS
from tests.helpers import TRAINABLE, S, W, awake

LENGTH = 41


@pytest.fixture
def make(make_base: Callable[..., PreTrainedModel]) -> Callable[..., Any]:
    """A tiny model in float64 with an opened memory of some kind."""

    def made(kind: str, **how: Any) -> Any:
        base = make_base(FAMILIES[TRAINABLE.index(kind) % len(FAMILIES)]).double()
        return awake(base, kind, **how).train()

    return made


def batch(rows: int = 2, left: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, 101, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    found = {"input_ids": ids, "labels": ids.clone()}
    if left:
        mask = torch.ones_like(ids)
        mask[0, :left] = 0
        found["labels"][0, :left] = -100
        found["attention_mask"] = mask
    return found


def scored(model: Any, objective: Objective, rows: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Losses, and the gradients of a weighted sum of them."""
    where = objective.scored(rows["labels"], S + W)
    model.zero_grad()
    losses = objective.losses(model, model, rows, where)
    (losses * torch.linspace(1, 2, len(losses), dtype=losses.dtype)).sum().backward()
    return losses.detach(), [p.grad.clone() for _, p in model.memory_parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", TRAINABLE)
@pytest.mark.parametrize("size", [4, 7, 20])  # 4 x 10 + 1: the last token joins those before it
def test_segments_give_the_losses_and_gradients_of_whole_rows(make: Any, kind: str, size: int) -> None:
    model, rows = make(kind), batch(left=3 if size == 7 else 0)
    losses, gradients = scored(model, Objective(), rows)
    in_pieces, in_pieces_gradients = scored(model, Objective(segment=size), rows)
    torch.testing.assert_close(in_pieces, losses, rtol=1e-9, atol=1e-12)
    assert len(gradients) == len(in_pieces_gradients) > 0
    for ours, whole in zip(in_pieces_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_segments_of_every_family(make_base: Callable[..., PreTrainedModel], family: str, checkpointing: bool) -> None:
    model, rows = awake(make_base(family).double(), "joint").train(), batch()
    losses, gradients = scored(model, Objective(), rows)
    if checkpointing:
        checkpoint_layers(model)
    in_pieces, in_pieces_gradients = scored(model, Objective(segment=7), rows)
    torch.testing.assert_close(in_pieces, losses, rtol=1e-9, atol=1e-12)
    for ours, whole in zip(in_pieces_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("settings", [{"loss": "ce"}, {"loss": "mse"}, {"mse_weight": 0.5, "offload_teacher": True}])
def test_every_loss_can_be_taken_in_segments(make: Any, settings: dict[str, Any]) -> None:
    model, rows = make("ahn-gdn"), batch()
    losses, gradients = scored(model, Objective(**{**settings, "offload_teacher": False}), rows)
    in_pieces, in_pieces_gradients = scored(model, Objective(**settings, segment=6), rows)
    torch.testing.assert_close(in_pieces, losses, rtol=1e-9, atol=1e-12)
    for ours, whole in zip(in_pieces_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["joint", "kvm"])
def test_layers_of_a_segment_can_be_computed_one_by_one(make: Any, kind: str) -> None:
    model, rows = make(kind), batch()
    losses, gradients = scored(model, Objective(), rows)
    with Tracker() as before:
        scored(model, Objective(segment=20), rows)
    checkpoint_layers(model)
    with Tracker() as after:
        in_pieces, in_pieces_gradients = scored(model, Objective(segment=20), rows)
    torch.testing.assert_close(in_pieces, losses, rtol=1e-9, atol=1e-12)
    for ours, whole in zip(in_pieces_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-12)
    assert after.peak < 0.9 * before.peak


def test_layers_with_full_attention_carry_their_cache(make: Any) -> None:
    model, rows = make("joint", layers=[1]), batch()
    _, gradients = scored(model, Objective(), rows)
    _, in_pieces = scored(model, Objective(segment=5), rows)
    for ours, whole in zip(in_pieces, gradients, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("base", "padded", "without"),
    [({}, False, True), ({}, True, False), ({"attn_implementation": "eager"}, False, False)],
    ids=["sdpa", "padded on the left", "eager"],
)
def test_the_teacher_builds_no_mask_where_it_can_do_without(
    make_base: Callable[..., PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    base: dict[str, str],
    padded: bool,
    without: bool,
) -> None:
    model, rows = awake(make_base("Qwen2", **base).double(), "joint"), batch(left=3 if padded else 0)
    losses, _ = scored(model, Objective(), rows)
    masks = []
    attend = full_attention.attend

    def watch(module: Any, q: Any, k: Any, v: Any, mask: Any, **how: Any) -> Any:
        masks.append(mask)
        return attend(module, q, k, v, mask, **how)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, full_attention.NAME, watch)
    in_pieces, _ = scored(model, Objective(segment=6), rows)
    # transformers' eager attention takes its softmax in float32
    torch.testing.assert_close(in_pieces, losses, rtol=1e-5 if base else 1e-9, atol=1e-12)
    assert model.config._attn_implementation == base.get("attn_implementation", "sdpa")
    assert bool(masks) == without
    assert masks == [None] * len(masks)


def test_a_cut_changes_gradients_and_not_losses(make: Any) -> None:
    model, rows = make("joint"), batch()
    losses, whole = scored(model, Objective(segment=6), rows)
    cut_losses, cut = scored(model, Objective(segment=6, segments_back=1), rows)
    _, never = scored(model, Objective(segment=6, segments_back=100), rows)
    torch.testing.assert_close(cut_losses, losses)
    assert any(not torch.allclose(a, b) for a, b in zip(cut, whole, strict=True))
    for a, b in zip(never, whole, strict=True):
        torch.testing.assert_close(a, b)


def test_activations_do_not_grow_with_the_row(make: Any) -> None:
    """Four times the tokens add no more than the teacher's cache, its states, and what is carried at each border."""
    model = make("ahn-gdn")
    config = model.config
    of_token = 8 * (2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim + config.hidden_size)
    state = sum(layer.state_bytes(torch.float64) for layer in model.model.memories().values())
    window = 8 * (S + W) * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim

    def peak(tokens: int) -> int:
        ids = torch.randint(3, 101, (1, tokens))
        rows = {"input_ids": ids, "labels": ids}
        with Tracker() as tracker:
            scored(model, Objective(segment=32), rows)
        return tracker.peak

    peak(64)
    growth = peak(512) - peak(128)
    assert growth < 1.5 * (384 * of_token + 12 * (state + window))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_segments_of_a_model_in_bfloat16(make_base: Callable[..., PreTrainedModel], checkpointing: bool) -> None:
    model = awake(make_base("Qwen2").bfloat16(), "ahn-gdn").train()
    losses, gradients = scored(model, Objective(), batch())
    if checkpointing:
        checkpoint_layers(model)
    in_pieces, in_pieces_gradients = scored(model, Objective(segment=7), batch())
    assert in_pieces.dtype == torch.float32
    torch.testing.assert_close(in_pieces.mean(), losses.mean(), rtol=0.02, atol=0)
    for ours, whole in zip(in_pieces_gradients, gradients, strict=True):
        assert (ours - whole).norm() < 0.1 * whole.norm()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_of_a_step_stays_behind(make: Any, checkpointing: bool) -> None:
    """The graph keeps functions, and these must not keep the graph: it holds them where Python cannot see it."""
    model, rows = make("joint"), batch()
    if checkpointing:
        checkpoint_layers(model)
    with Tracker() as tracker:
        scored(model, Objective(segment=8), rows)
        first = tracker.live
        scored(model, Objective(segment=8), rows)
    assert tracker.live == first


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(RetrofitError, match="go with segment"):
        DistillConfig(segments_back=2)


def test_the_recipe_of_long_rows_runs_scaled_down(checkpoint: Path, text_file: Path, tmp_path: Path) -> None:
    """The keys of the shipped recipe, with smaller numbers: segments, layers one by one, held-out rows in chunks."""
    shipped = read_recipe("qwen2.5-7b-ahn-gdn-131072")
    smaller = {"base": str(checkpoint), "data": str(text_file), "output_dir": str(tmp_path / "run"), "streaming": False}
    smaller |= {
        "window": 28,
        "sinks": 4,
        "max_length": 512,
        "segment": 16,
        "max_steps": 2,
        "eval_rows": 1,
        "dtype": "float32",
    }
    smaller |= {"eval_steps": 2, "save_steps": 2, "holdout": 0.2}
    metrics = distill(DistillConfig.from_dict({**shipped, **smaller}))
    kls = [entry["eval_kl"] for entry in metrics["curve"] if "eval_kl" in entry]
    assert kls[-1] == pytest.approx(metrics["rows"][-1]["kl"], rel=1e-4)

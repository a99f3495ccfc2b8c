"""The local stage: its loss as one writes it down, what it learns, exact resumption across stages, refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import retrofit
from distill.config import DistillConfig
from distill.data.rows import Rows
from distill.local_fit import LocalFit
from patches.errors import RetrofitError
from retrofit.evaluation.baselines import window_only
from tests.distill.test_trainer import losses, make_trainer, memory
from tests.helpers import TRAINABLE, awaken, left_mask, tokens

MakeBase = Callable[..., PreTrainedModel]
W, S = 8, 2
SCORED = torch.arange(40).expand(3, 40) % 5 < torch.tensor([[5], [3], [0]])  # all, some and none


def written_out(model: Any, ids: Tensor, mask: Tensor | None, scored: Tensor) -> Tensor:
    """Each layer's error at each row ``(layers, B)``, with a graph; by hooks on the base, called layer after layer."""
    seen: dict[int, tuple[Any, Any]] = {}
    bare = window_only(model)
    with torch.no_grad(), model.memory_off():
        handles = [
            layer.self_attn.register_forward_hook(
                lambda _module, _args, given, out, index=index: seen.update({index: (given, out[0])}), with_kwargs=True
            )
            for index, layer in enumerate(model.model.layers)
        ]
        model.model(ids, attention_mask=mask, use_cache=False)
        for handle in handles:
            handle.remove()
    rows = []
    for index in range(len(model.model.layers)):
        given, full = seen[index]
        outputs = []
        for one in (model, bare):
            plan = one.model._plan_pass(ids, mask, None, None, one.model.memories(), {})
            how = {**given, "attention_mask": None, "memory_pass": plan}
            outputs.append(one.model.layers[index].self_attn(**how)[0])
        ours, window = ([((out - full)[b][scored[b]] ** 2).sum() for b in range(len(ids))] for out in outputs)
        least = [1e-6 * (full[b][scored[b]] ** 2).sum() for b in range(len(ids))]
        rows.append(
            [
                x / torch.maximum(y, z).clamp_min(1e-30) if scored[b].any() else x
                for b, (x, y, z) in enumerate(zip(ours, window, least, strict=True))
            ]
        )
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("kind", TRAINABLE)
def test_it_is_what_one_writes_down(kind: str, make_base: MakeBase) -> None:
    """The loss and its gradient, of rows padded on the left and with few labels."""
    torch.manual_seed(0)
    model = awaken(retrofit.patch(make_base("Qwen2").double(), kind, W, S), 0.05)
    ids, mask = tokens(3, 40), left_mask([40, 31, 40], 40)
    scored = SCORED & (mask.cumsum(1) > W + S)
    theirs = written_out(model, ids, mask, scored)
    fit, batch = LocalFit(model), {"input_ids": ids, "attention_mask": mask}
    torch.testing.assert_close(fit.errors(model, batch, scored), theirs.detach(), rtol=1e-7, atol=1e-9)
    counts = scored.sum(1)
    ours, wanted = fit.total(model, batch, scored), (theirs.mean(0) * counts).sum()
    torch.testing.assert_close(ours, wanted, rtol=1e-7, atol=1e-9)
    parameters = [parameter for _, parameter in model.memory_parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(wanted, parameters, allow_unused=True, materialize_grads=True)
    for mine, reference in zip(torch.autograd.grad(ours, parameters), expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-9)
    assert any(gradient.abs().max() > 1e-4 for gradient in expected)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_local_steps_bring_each_layer_nearer(kind: str, make_base: MakeBase, rows: Rows, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = retrofit.patch(make_base("Qwen2"), kind, W, S)
    settings = {"local_steps": 12, "max_steps": 12, "learning_rate": 5e-3, "eval_strategy": "steps", "eval_steps": 12}
    trainer = make_trainer(model, rows, tmp_path, save_strategy="no", **settings)
    before = trainer.evaluate()
    trainer.train()
    (after,) = [entry for entry in trainer.state.log_history[1:] if "eval_layer_error" in entry]
    names = [name for name in before if name.startswith("eval_layer_error_")]
    assert len(names) == model.config.num_hidden_layers
    curve = [entry["local_loss"] for entry in trainer.state.log_history if "local_loss" in entry]
    assert len(curve) == 12
    assert not losses(trainer)
    assert after["eval_layer_error"] < before["eval_layer_error"]
    assert after["eval_layer_error"] == pytest.approx(sum(after[name] for name in names) / len(names))


def test_nothing_of_the_model_is_kept_for_the_backward_pass(make_base: MakeBase, rows: Rows) -> None:
    """A layer's graph goes before the next layer runs, and the base has no part in any."""
    model = awaken(retrofit.patch(make_base("Qwen2"), "joint", W, S))
    ids = rows.batch()[0][:2]
    total = LocalFit(model).total(model, {"input_ids": ids}, torch.ones_like(ids, dtype=torch.bool))
    leaves = {node.variable for node, _ in total.grad_fn.next_functions if node is not None}
    assert leaves == {parameter for parameter in model.parameters() if parameter.requires_grad}


@pytest.mark.parametrize("stopped_at", [2, 3, 5])
def test_resuming_in_any_stage_is_bit_equal(stopped_at: int, make_base: MakeBase, rows: Rows, tmp_path: Path) -> None:
    """In the first stage, between the stages, and in the second."""
    settings = {"local_steps": 3, "max_steps": 6, "local_learning_rate": 3e-2, "save_steps": 1}

    def model() -> Any:
        base = make_base("Qwen2")
        torch.manual_seed(3)
        return retrofit.patch(base, "joint", W, S)

    straight = make_trainer(model(), rows, tmp_path / "a", **settings)
    straight.train()
    rates = [entry["learning_rate"] for entry in straight.state.log_history if "learning_rate" in entry]
    torch.manual_seed(99)
    again = make_trainer(model(), rows, tmp_path / "b", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{stopped_at}"))
    assert all(torch.equal(value, memory(straight.model)[name]) for name, value in memory(again.model).items())
    assert losses(again)[-1:] == losses(straight)[-1:]
    # each stage warms up for a tenth of its steps and comes down to nearly nothing
    assert rates == pytest.approx([3e-2 * share for share in (0, 1, 0.5)] + [1e-2 * share for share in (0, 1, 0.5)])


def test_the_second_stage_starts_without_the_first_ones_moments(
    make_base: MakeBase, rows: Rows, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    model = retrofit.patch(make_base("Qwen2"), "joint", W, S)
    trainer = make_trainer(model, rows, tmp_path, local_steps=3, max_steps=5, save_strategy="no")
    trainer.train()
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {2}


def test_accumulation_equals_the_big_batch(make_base: MakeBase, rows: Rows, tmp_path: Path) -> None:
    found = []
    for batch, accumulated in ((4, 1), (2, 2)):
        base = make_base("Qwen2")
        torch.manual_seed(3)
        model = retrofit.patch(base, "joint", W, S)
        settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
        trainer = make_trainer(model, rows, tmp_path / str(batch), local_steps=2, max_steps=2, **settings)
        trainer.train()
        found.append(memory(model))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-5, msg=name)


def test_rows_within_the_window_teach_nothing(make_base: MakeBase) -> None:
    model = awaken(retrofit.patch(make_base("Qwen2"), "joint", W, S))
    ids = tokens(2, W + S)
    total = LocalFit(model).total(model, {"input_ids": ids}, torch.zeros_like(ids, dtype=torch.bool))
    total.backward()
    assert total.item() == 0
    assert all(not parameter.grad.any() for _, parameter in model.memory_parameters())


def test_more_local_steps_than_steps_are_refused(make_base: MakeBase, rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match="local_steps: 5 is more than the 4 steps"):
        DistillConfig(max_steps=4, local_steps=5)
    model = retrofit.patch(make_base("Qwen2"), "joint", W, S)
    with pytest.raises(RetrofitError, match="the run has only 6 steps"):
        make_trainer(model, rows, tmp_path, local_steps=7, max_steps=-1, num_train_epochs=1).train()
    with pytest.raises(RetrofitError, match="lr_scheduler_type='reduce_lr_on_plateau' does not work"):
        make_trainer(
            model,
            rows,
            tmp_path,
            local_steps=2,
            lr_scheduler_type="reduce_lr_on_plateau",
            eval_strategy="steps",
            eval_steps=2,
        ).train()
    assert not list(tmp_path.iterdir())

"""The trainer: its loss, what it leaves alone, accumulation, checkpointing, exact resumption, checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import retrofit
from distill import DistillConfig, DistillTrainer
from distill.checkpoint import checkpoints
from distill.config import CHECKPOINTING
from distill.data.rows import Rows, cut_records, cut_row, pack_tokens
from patches.errors import RetrofitError
from retrofit.evaluation.scores import evaluate
from tests.helpers import awaken, load_rows, tokens

MakeBase = Callable[..., PreTrainedModel]
Model = Any


def make_trainer(model: Model, rows: Any, folder: Path, callbacks: Any = None, **settings: Any) -> DistillTrainer:
    defaults = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_steps": 2,
        "save_total_limit": None,
        "eval_strategy": "no",
        "use_cpu": True,
    }
    args = DistillConfig(**{**defaults, **settings})
    return DistillTrainer(model, args, rows, rows.select(slice(5)), callbacks=callbacks)


def lengths_of(*lengths: int) -> Rows:
    """Four rows of each of these lengths."""
    documents = [{"input_ids": tokens(1, length, seed)[0]} for seed in range(4) for length in lengths]
    return cut_records(documents, [*lengths] * 4, max(lengths))


def memory(model: Model) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.memory_parameters()}


def losses(trainer: DistillTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def opened(model: Model) -> Model:
    """The same with a memory that does something: as patched, it adds exactly nothing."""
    with torch.no_grad():
        for name, parameter in model.memory_parameters():
            if name.endswith("read_proj.weight"):
                parameter.normal_(std=0.5)
    return model


@pytest.mark.parametrize("label_shift", ["next", "ahn"])
def test_loss_is_the_mean_kl_over_scored_positions(model: Model, rows: Rows, tmp_path: Path, label_shift: str) -> None:
    trainer = make_trainer(opened(model), rows, tmp_path, label_shift=label_shift)
    ids = rows.batch()[0][:3]
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.5, -100)
    student = model(ids).logits.log_softmax(-1)
    with model.memory_off():
        teacher = model(ids).logits.log_softmax(-1)
    kl = (teacher.exp() * (teacher - student)).sum(-1)  # (3, 40)
    if label_shift == "next":
        expected = kl[:, 8:-1][labels[:, 9:] != -100].mean()
    else:
        expected = kl[:, 8:][labels[:, 8:] != -100].mean()
    loss = trainer.compute_loss(model, {"input_ids": ids, "labels": labels})
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    parameters = [parameter for _, parameter in model.memory_parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), rtol=1e-4, atol=1e-7
    )


def test_positions_count_once_any_layer_has_forgotten(
    make_base: Callable[..., PreTrainedModel], rows: Rows, tmp_path: Path
) -> None:
    """Windows of single layers may be narrower than the model's, or wider in all of them."""
    for windows, lossless in (({"1": {"window": 3}}, 5), ({"0-1": {"window": 9}}, 11)):
        model = opened(retrofit.patch(make_base("Qwen2"), "ahn-gdn", window=6, sinks=2, by_layer=windows))
        trainer = make_trainer(model, rows, tmp_path)
        ids = rows.batch()[0][:3]
        with model.memory_off():
            teacher = model(ids).logits.log_softmax(-1)
        kl = (teacher.exp() * (teacher - model(ids).logits.log_softmax(-1))).sum(-1)
        assert (kl[:, lossless] > 1e-5).all()
        loss = trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
        torch.testing.assert_close(loss, kl[:, lossless:-1].mean())


def test_a_batch_without_labels_trains_nothing(model: Model, rows: Rows, tmp_path: Path) -> None:
    ids = rows.batch()[0][:2]
    trainer = make_trainer(opened(model), rows, tmp_path)
    loss = trainer.compute_loss(model, {"input_ids": ids, "labels": torch.full_like(ids, -100)})
    loss.backward()
    assert loss.item() == 0
    assert all(not parameter.grad.any() for _, parameter in model.memory_parameters())


def test_right_padding_changes_nothing(model: Model, rows: Rows, tmp_path: Path) -> None:
    trainer = make_trainer(opened(model), rows, tmp_path)
    ids = rows.batch()[0][:2]
    plain = trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
    pad = torch.zeros(2, 5, dtype=torch.long)
    mask = torch.cat([torch.ones_like(ids), pad], 1)
    padded = {"input_ids": torch.cat([ids, pad], 1), "labels": torch.cat([ids, pad - 100], 1), "attention_mask": mask}
    torch.testing.assert_close(trainer.compute_loss(model, padded), plain, rtol=1e-5, atol=1e-7)


def test_no_logits_of_the_whole_sequence(model: Model, rows: Rows, tmp_path: Path) -> None:
    seen = []
    model.lm_head.register_forward_hook(lambda _m, _a, logits: seen.append(logits.shape[1]))
    make_trainer(model, rows, tmp_path, max_steps=1).train()
    assert seen == [1, 1]  # teacher and student


def test_only_the_memory_changes(model: Model, rows: Rows, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    trainer = make_trainer(model, rows, tmp_path, max_steps=20, weight_decay=0.1)
    trainer.train()
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name, _ in model.memory_parameters()}
    assert model.config.to_dict() == config
    trained = trainer.evaluate()
    assert trained["eval_kl"] < 0.98 * trained["eval_kl_window_only"]


def test_accumulation_equals_the_big_batch(
    make_base: Callable[..., PreTrainedModel], rows: Rows, tmp_path: Path
) -> None:
    class Uneven(Rows):  # rows with very different numbers of labels: a mean of means would show
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            row = super().__getitem__(index)
            return {**row, "labels": row["labels"].masked_fill(torch.arange(40) > 10 + index, -100)}

    data = Uneven(rows.parts[0], rows.places[:, 1:])
    results = []
    for name, batch, accumulation in (("big", 4, 1), ("small", 1, 4)):
        torch.manual_seed(3)
        model = retrofit.patch(make_base("Qwen2"), memory="ahn-gdn", window=6, sinks=2)
        settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        trainer = make_trainer(model, data, tmp_path / name, max_steps=3, adam_epsilon=1e-4, **settings)
        trainer.train()
        results.append((losses(trainer), memory(model)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for name, parameter in results[0][1].items():
        torch.testing.assert_close(parameter, results[1][1][name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_weights(
    make_base: Callable[..., PreTrainedModel], rows: Rows, tmp_path: Path, use_reentrant: bool
) -> None:
    results = []
    for name in ("plain", "checkpointed"):
        torch.manual_seed(3)
        model = retrofit.patch(make_base("Qwen2"), memory="ahn-gdn", window=6, sinks=2)
        settings = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": use_reentrant}}
        trainer = make_trainer(
            model, rows, tmp_path / name, window_sampling="ahn", **(settings if name == "checkpointed" else {})
        )
        trainer.train()
        assert model.model.layers[0].gradient_checkpointing == (name == "checkpointed")
        results.append(memory(model))
    for name, parameter in results[0].items():
        torch.testing.assert_close(parameter, results[1][name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("sampling", ["fixed", "ahn"])
@pytest.mark.parametrize("stop", [2, 6])  # in the first epoch and in the second
def test_resuming_is_bit_equal(
    make_base: Callable[..., PreTrainedModel], tmp_path: Path, sampling: str, stop: int
) -> None:
    tokens = torch.randint(3, 101, (14 * 70,), generator=torch.Generator().manual_seed(1))
    rows = pack_tokens(tokens, 70)  # 14 rows: an epoch ends within an accumulated batch of 4

    def fresh() -> Model:
        torch.manual_seed(3)
        return retrofit.patch(make_base("Qwen2"), memory="ahn-gdn", window=6, sinks=2)

    settings = {
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "window_sampling": sampling,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    whole = make_trainer(fresh(), rows, tmp_path, **settings)
    whole.train()
    again = make_trainer(fresh(), rows, tmp_path / "again", **settings)
    torch.manual_seed(99)  # whatever state the new process is in
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    for name, parameter in memory(whole.model).items():
        assert torch.equal(parameter, memory(again.model)[name]), name
    assert losses(whole) == losses(again)
    kls = [[entry["eval_kl"] for entry in t.state.log_history if "eval_kl" in entry] for t in (whole, again)]
    assert kls[0] == kls[1]
    assert len(kls[0]) == 3  # after steps 3, 6 and the last


def test_a_drawn_window_is_used_and_never_saved(
    model: Model, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    original = type(model).set_window

    def set_window(self: Model, window: int, sinks: int) -> None:
        used.append((window, sinks))
        original(self, window, sinks)

    monkeypatch.setattr(type(model), "set_window", set_window)
    make_trainer(model, rows, tmp_path, window_sampling="ahn", save_steps=1).train()
    drawn = used[::2]
    assert len(drawn) == 4
    assert all(window + sinks == 32 for window, sinks in drawn)  # the only candidate for 40 tokens
    assert used[1::2] == [(6, 2)] * 4
    for folder in checkpoints(tmp_path):
        saved = json.loads((folder / "adapter_config.json").read_text())["memory"]
        assert (saved["window"], saved["sinks"]) == (6, 2)


def test_checkpoints_hold_the_memory_and_not_the_base(
    model: Model, rows: Rows, tmp_path: Path, make_base: Callable[..., PreTrainedModel]
) -> None:
    make_trainer(model, rows, tmp_path, save_steps=1, save_total_limit=2).train()
    assert [folder.name for folder in checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-4"]
    assert not (tmp_path / ".saving").exists()
    last = tmp_path / "checkpoint-4"
    expected = {"adapter_config.json", "adapter_model.safetensors", "README.md", ".retrofit"}
    expected |= {"checksums.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert {path.name for path in last.iterdir()} == expected
    saved = load_file(last / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.") for name in saved} == set(memory(model))
    loaded = retrofit.load_adapter(make_base("Qwen2"), last)
    ids = rows.batch()[0][:2]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("label_shift", ["next", "ahn"])
@pytest.mark.parametrize(
    "settings", [{"loss": "ce"}, {"loss": "mse"}, {"mse_weight": 0.5}, {"loss": "ce", "mse_weight": 2.0}]
)
def test_the_other_losses(model: Model, rows: Rows, tmp_path: Path, label_shift: str, settings: dict[str, Any]) -> None:
    trainer = make_trainer(opened(model), rows, tmp_path, label_shift=label_shift, **settings)
    ids = rows.batch()[0][:3]
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.5, -100)
    scored = torch.zeros_like(ids, dtype=torch.bool)
    scored[:, 8:-1] = labels[:, 9:] != -100 if label_shift == "next" else labels[:, 8:-1] != -100
    if label_shift == "ahn":
        scored[:, -1] = labels[:, -1] != -100
    loss = settings.get("loss", "kl")
    if loss == "ce":
        scored[:, :-1] &= labels[:, 1:] != -100
        scored[:, -1] = False
    heads: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _m, args: heads.append(args[0]))
    student = model(ids).logits.log_softmax(-1)
    with model.memory_off():
        teacher = model(ids).logits.log_softmax(-1)
    of_student, of_teacher = torch.stack(heads[:2]), torch.stack(heads[2:])
    each = {
        "kl": (teacher.exp() * (teacher - student)).sum(-1),
        "ce": -student.gather(-1, ids.roll(-1, 1)[..., None]).squeeze(-1),
        "mse": (of_student - of_teacher).square().mean((0, -1)),
    }
    expected = each[loss][scored].mean()
    if weight := settings.get("mse_weight"):
        expected = expected + weight * each["mse"][scored].mean()
    found = trainer.compute_loss(model, {"input_ids": ids, "labels": labels})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    parameters = [parameter for _, parameter in model.memory_parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), rtol=1e-4, atol=1e-6
    )


def test_mse_with_checkpointing(model: Model, rows: Rows, tmp_path: Path) -> None:
    settings = {"loss": "mse", "max_steps": 2, CHECKPOINTING: True}
    plain = make_trainer(opened(model), rows, tmp_path / "plain", loss="mse", max_steps=2)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain.train()
    model.load_state_dict(start)
    again = make_trainer(model, rows, tmp_path / "checkpointed", **settings)
    again.train()
    assert losses(again) == pytest.approx(losses(plain), rel=1e-5)
    model.load_state_dict(start)
    reentrant = {f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}}
    with pytest.raises(RetrofitError, match="reentrant"):
        make_trainer(model, rows, tmp_path / "reentrant", **settings, **reentrant).train()


@pytest.mark.parametrize("sampling", ["fixed", "ahn"])
def test_conversations_of_any_length_are_trained_on(
    make_base: Callable[..., PreTrainedModel],
    chat_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    datasets_cache: Path,
    sampling: str,
) -> None:
    lines = []
    for number in range(24):  # shorter than S + W, and longer
        turns = [("user", "?" * number), ("assistant", "abc" * (number % 9 + 1))]
        lines.append(json.dumps({"conversations": [{"from": role, "value": text} for role, text in turns]}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    split = load_rows(str(tmp_path / "a.jsonl"), chat_tokenizer, max_length=64, holdout=0.2)
    torch.manual_seed(3)
    base = make_base("Qwen2", vocab_size=len(chat_tokenizer))
    model = retrofit.patch(base, memory="ahn-gdn", window=44, sinks=2)
    settings = {"max_steps": 12, "per_device_train_batch_size": 2, "window_sampling": sampling, "output_dir": tmp_path}
    args = DistillConfig(**settings, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True)
    trainer = DistillTrainer(model, args, split.train, split.held_out, split.collator)
    trainer.train()
    assert any(losses(trainer))
    kl = trainer.evaluate()["eval_kl"]

    # what is scored are the tokens past the window that belong to an answer, of each row alone
    alone = []
    for row in (split.held_out[index] for index in range(len(split.held_out))):
        one = {key: part[None] for key, part in row.items()}
        scored = trainer.objective.scored(one["labels"], 46)
        alone.append(trainer.objective.losses(model, model, one, scored).detach())
    count = len(torch.cat(alone))
    assert 0 < count < split.tokens["held_out"]
    assert kl == pytest.approx(torch.cat(alone).mean().item(), rel=1e-5)
    scores = evaluate(model, split.held_out.batch()[0], start=46, labels=split.held_out.batch()[1])
    assert scores["ahn-gdn"].mean_kl == pytest.approx(kl, rel=1e-4)
    assert scores["ahn-gdn"].scored.sum() == count


@pytest.mark.parametrize("masked", [False, True])
def test_a_batch_within_the_window_gives_every_parameter_a_gradient_of_zero(
    model: Model, rows: Rows, tmp_path: Path, masked: bool
) -> None:
    ids = rows.batch()[0][:2, :5]
    batch = {"input_ids": ids, "labels": ids} | ({"attention_mask": torch.ones_like(ids)} if masked else {})
    loss = make_trainer(opened(model), rows, tmp_path).compute_loss(model, batch)
    loss.backward()
    assert loss.item() == 0
    assert all(not parameter.grad.any() for _, parameter in model.memory_parameters())


@pytest.mark.parametrize("local_steps", [0, 8])
def test_a_wider_layer_gets_a_gradient_from_every_batch(make_base: MakeBase, tmp_path: Path, local_steps: int) -> None:
    """Also from one whose rows lie within its window: processes wait for one another's gradients."""
    model = awaken(retrofit.patch(make_base("Qwen2"), "ahn-gdn", 6, 2, by_layer={"1": {"window": 30}}))
    settings = {"per_device_train_batch_size": 1, "max_steps": 8, "local_steps": local_steps}
    trainer = make_trainer(model, lengths_of(20, 40), tmp_path, **settings)
    short = {key: part[None] for key, part in cut_row({"input_ids": tokens(1, 20)[0]}, 0, 20).items()}
    trainer.compute_loss(model, short).backward()
    gradients = {name: parameter.grad for name, parameter in model.memory_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    assert {int(name.split(".")[2]) for name, gradient in gradients.items() if gradient.any()} == {0}
    before = memory(model)
    trainer.train()
    changed = {name for name, value in memory(model).items() if not torch.equal(value, before[name])}
    assert {int(name.split(".")[2]) for name in changed} == {0, 1}


@pytest.mark.parametrize("local_steps", [0, 2])
def test_rows_from_which_a_layer_learns_nothing_are_refused(
    make_base: MakeBase, tmp_path: Path, local_steps: int
) -> None:
    model = retrofit.patch(make_base("Qwen2"), "ahn-gdn", 6, 2, by_layer={"1": {"window": 30}})
    trainer = make_trainer(model, lengths_of(20, 33), tmp_path, local_steps=local_steps)
    with pytest.raises(RetrofitError, match="none of the 8 training rows has anything to learn beyond 32 tokens"):
        make_trainer(model, lengths_of(20, 32), tmp_path, local_steps=local_steps).train()
    labels = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in trainer.train_dataset]
    with pytest.raises(RetrofitError, match="has anything to learn beyond 32"):
        trainer.objective.check_rows(labels, 32)
    assert not list(tmp_path.iterdir())

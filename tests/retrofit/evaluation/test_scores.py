"""Evaluation: scores equal those of whole logits, one teacher pass serves all, the window that costs as much."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import retrofit
from patches.errors import RetrofitError
from retrofit.costs.held import row_bytes
from retrofit.evaluation.baselines import equal_memory_window, window_only
from retrofit.evaluation.scores import evaluate, gap_closed, hidden_states
from tests.helpers import awaken

W, S = 6, 2
START = W + S


@pytest.fixture
def model(base: PreTrainedModel) -> Any:
    """Every family with a memory that does something."""
    torch.manual_seed(3)
    model = retrofit.patch(base, memory="ahn-gdn", window=W, sinks=S)
    with torch.no_grad():
        for name, parameter in model.memory_parameters():
            if name.endswith("read_proj.weight"):
                parameter.normal_(std=0.5)
    return model


@pytest.fixture
def sequences() -> Tensor:
    return torch.randint(3, 101, (5, 30), generator=torch.Generator().manual_seed(0))


def test_scores_are_those_of_the_whole_logits(model: Any, sequences: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "retrofit.evaluation.scores.CHUNK_ELEMENTS", 101 * 7
    )  # chunks that fit neither rows nor batches
    scores = evaluate({"bare": window_only(model), "memory": model}, sequences, start=START, batch_size=2)
    assert list(scores) == ["teacher", "bare", "memory"]
    with torch.no_grad():
        with model.memory_off():
            teacher = model(sequences).logits.log_softmax(-1)
        student = model(sequences).logits.log_softmax(-1)
    kl = (teacher.exp() * (teacher - student)).sum(-1)[:, START:-1]
    nll = -student[:, :-1].gather(-1, sequences[:, 1:, None]).squeeze(-1)[:, START:]
    got = scores["memory"]
    torch.testing.assert_close(got.kl, kl, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got.nll, nll, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.correct, student.argmax(-1)[:, START:-1] == sequences[:, START + 1 :])
    assert got.mean_kl == pytest.approx(kl.mean().item(), rel=1e-4)
    assert got.mean_nll == pytest.approx(nll.mean().item(), rel=1e-5)
    assert not scores["teacher"].kl.any()
    assert scores["bare"].mean_kl > 0


def test_only_labelled_tokens_are_scored_and_padding_changes_nothing(model: Any, sequences: Tensor) -> None:
    whole = evaluate({"bare": window_only(model), "memory": model}, sequences, start=START, batch_size=2)
    labels = sequences.masked_fill(torch.rand(sequences.shape, generator=torch.Generator().manual_seed(1)) < 0.6, -100)
    labels[2:4] = -100  # a batch without any
    labels[4, 20:] = -100
    labels[0, : START + 1] = sequences[0, : START + 1]  # within the window: not scored
    padded = torch.cat([sequences, torch.zeros(5, 3, dtype=torch.long)], 1)
    labels = torch.cat([labels, torch.full((5, 3), -100)], 1)
    scores = evaluate({"bare": window_only(model), "memory": model}, padded, start=START, labels=labels, batch_size=2)
    scored = labels[:, START + 1 :] != -100
    for name in ("teacher", "bare", "memory"):
        got, all_ = scores[name], whole[name]
        assert torch.equal(got.scored, scored)
        assert got.nll[~scored].isnan().all()
        assert not got.correct[~scored].any()
        for part in ("nll", "kl", "correct"):
            expected = getattr(all_, part)[scored[:, :-3]]
            torch.testing.assert_close(getattr(got, part)[scored], expected, rtol=1e-5, atol=1e-6)
        assert got.mean_nll == pytest.approx(all_.nll[scored[:, :-3]].mean().item(), rel=1e-5)
    with pytest.raises(RetrofitError, match="no token after position 8 is labelled"):
        evaluate(model, sequences, start=START, labels=torch.full_like(sequences, -100))


@pytest.mark.parametrize("chunk", [7, 16])
def test_long_sequences_are_read_in_chunks(model: Any, sequences: Tensor, chunk: int) -> None:
    labels = sequences.clone()
    labels[:2, 20:] = labels[2:4, 12:25] = -100
    models = {"bare": window_only(model), "memory": model}
    whole, pieced = (
        evaluate(models, sequences, start=START, labels=labels, batch_size=2, chunk=size) for size in (None, chunk)
    )
    for name, scores in whole.items():
        torch.testing.assert_close(pieced[name].kl, scores.kl, rtol=1e-4, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(pieced[name].nll, scores.nll, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert torch.equal(pieced[name].scored, scores.scored)


def test_the_teacher_runs_once_per_batch_however_many_models(model: Any, sequences: Tensor) -> None:
    others = {name: window_only(model, width) for name, width in (("a", 6), ("b", 12))}
    calls = []
    model.get_decoder().register_forward_hook(lambda *_: calls.append(model.get_decoder().memory_enabled))
    evaluate({"memory": model, **others}, sequences, start=START, batch_size=3)
    assert calls == [False, True, False, True]


def test_one_model_is_named_by_its_memory_and_needs_no_teacher(model: Any, sequences: Tensor) -> None:
    scores = evaluate(model, sequences, start=0, teacher=False)
    assert list(scores) == ["ahn-gdn"]
    assert scores["ahn-gdn"].kl.isnan().all()
    assert scores["ahn-gdn"].nll.shape == (5, 29)


def test_the_package_offers_it() -> None:
    assert retrofit.evaluate is evaluate


def test_progress_is_reported_per_batch(model: Any, sequences: Tensor) -> None:
    seen = []
    evaluate(model, sequences, start=START, batch_size=2, on_batch=lambda done, all_: seen.append((done, all_)))
    assert seen == [(2, 5), (4, 5), (5, 5)]


@pytest.mark.parametrize("start", [-1, 29, 30])
def test_too_short_sequences_are_refused(model: Any, sequences: Tensor, start: int) -> None:
    with pytest.raises(RetrofitError, match="cannot score"):
        evaluate(model, sequences, start=start)


def test_the_equal_memory_window_holds_as_many_bytes(make_base: Callable[..., PreTrainedModel]) -> None:
    base = make_base("Qwen2")  # 4 query heads on 2 key/value heads of 16
    model = retrofit.patch(base, memory="ahn-gdn", window=W, sinks=S)
    assert row_bytes(model.config, torch.float32) == 2 * 2 * 16 * 4
    kept = 4 * 16 * 16 + W * 8  # numbers of the state, and of the gates of each token
    assert equal_memory_window(model) == W + -(-kept // (2 * 2 * 16))
    half = retrofit.patch(base.to(torch.bfloat16), memory="ahn-gdn", window=W, sinks=S)
    assert equal_memory_window(half) == W + -(-2 * kept // (2 * 2 * 16))  # which stay fp32


def test_the_window_only_model_keeps_the_layers(make_base: Callable[..., PreTrainedModel]) -> None:
    model = retrofit.patch(make_base("Qwen2"), memory="ahn-gdn", window=W, sinks=S, layers=[1], others="window")
    bare = window_only(model, 9).config.memory
    assert {key: bare[key] for key in ("kind", "window", "sinks", "layers", "others")} == {
        "kind": "none",
        "window": 9,
        "sinks": S,
        "layers": [1],
        "others": "window",
    }


def test_the_gap_closed() -> None:
    assert gap_closed(0.02, 0.08) == pytest.approx(0.75)
    assert gap_closed(0.0, 0.0) == 0.0


def test_scores_of_a_bfloat16_model_are_those_of_float64_products(make_base: Callable[..., PreTrainedModel]) -> None:
    """The states are the model's own, in its dtype; what the head makes of them is not rounded once more."""
    base = make_base("Qwen2")
    base.get_output_embeddings().weight.data.mul_(20)  # large logits are where bfloat16 is coarse
    model = awaken(retrofit.patch(base, "ahn-gdn", W, S)).bfloat16()
    sequences = torch.randint(3, 101, (3, 40), generator=torch.Generator().manual_seed(0))
    got = evaluate(model, sequences, start=START)
    head = model.get_output_embeddings().weight.double()
    read = sequences[:, :-1]  # as they are read: some CPUs round a product in bfloat16 by its shape
    with torch.no_grad():
        with model.memory_off():
            states = hidden_states(model, {"input_ids": read})
        teacher = (states.double() @ head.T).log_softmax(-1)[:, START:]
        rounded = model.get_output_embeddings()(states).float().log_softmax(-1)[:, START:]
        student = (hidden_states(model, {"input_ids": read}).double() @ head.T).log_softmax(-1)[:, START:]
    kl = (teacher.exp() * (teacher - student)).sum(-1)
    nll = -student.gather(-1, sequences[:, START + 1 :, None]).squeeze(-1)
    torch.testing.assert_close(got["ahn-gdn"].kl.double(), kl, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got["ahn-gdn"].nll.double(), nll, rtol=1e-5, atol=1e-4)
    assert (rounded.double() - teacher).abs().max() > 1e-2, "the head's product would have been rounded visibly"

"""What the model decides per call: which mask is made, which token is in window or memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import retrofit
from patches.errors import RetrofitError
from tests.conftest import tiny_base
from tests.helpers import ON_A_WINDOW, ROOT, TRAINABLE, S, W, awake, capacity, feed, fresh_process, logits, tokens

MakeBase = Callable[..., PreTrainedModel]


def influence(model: Any, length: int) -> torch.Tensor:
    """(T, T) True where the last layer's output at t depends on token j, for a model of one layer."""
    embeddings = model.get_input_embeddings()(tokens(1, length)).detach()
    rows = []
    for j in range(length):
        moved = embeddings.clone()
        moved[0, j] += 1.0
        with torch.no_grad():
            out = [model(inputs_embeds=x, use_cache=False).logits[0] for x in (embeddings, moved)]
        rows.append((out[0] - out[1]).abs().amax(-1) > 0)
    return torch.stack(rows, 1)


@pytest.mark.parametrize(("window", "sinks"), [(4, 2), (4, 0), (1, 0), (2, 5)])
def test_sinks_and_window_partition_what_is_seen(window: int, sinks: int, make_base: MakeBase) -> None:
    model = retrofit.patch(make_base("Qwen3", num_hidden_layers=1).double(), "none", window, sinks)
    t, j = torch.arange(14)[:, None], torch.arange(14)
    assert torch.equal(influence(model, 14), (j <= t) & ((t - j < window) | (j < sinks)))


@pytest.mark.parametrize("kind", [kind for kind in ON_A_WINDOW if kind in TRAINABLE])
def test_the_memory_holds_what_left_the_window_and_nothing_else(kind: str, make_base: MakeBase) -> None:
    base = make_base("Qwen2", num_hidden_layers=1).double()
    model = awake(base, kind, 4, 2)
    t, j = torch.arange(14)[:, None], torch.arange(14)
    assert torch.equal(influence(model, 14), j <= t), "some past token is nowhere, or a future one is seen"
    # what the memory adds depends on evicted tokens, and it adds nothing before the first one
    plain = retrofit.patch(base, "none", 4, 2)
    added = (logits(model, tokens(1, 14)) - logits(plain, tokens(1, 14)))[0].abs().amax(-1)
    assert not added[:6].any()
    assert (added[6:] > 0).all()


def test_no_mask_of_all_pairs_is_built(make_base: MakeBase) -> None:
    seen: list[int] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        seen.append(0 if mask is None else mask.numel())

    for attention in ("sdpa", "eager"):
        model = awake(make_base("Llama", attn_implementation=attention), "ahn-gdn")
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(look, with_kwargs=True)
        mask = torch.ones(2, 200, dtype=torch.long)
        mask[0, :50] = 0
        feed(model, tokens(2, 200), [199, 1], mask)
        assert len(seen) == 4
        assert max(seen) <= 1
        seen.clear()


def test_layers_left_to_the_base_get_their_mask(make_base: MakeBase) -> None:
    base = make_base("Llama", attn_implementation="eager")
    model = awake(base, "ahn-gdn", layers=[1])
    ids = tokens(1, 30)
    first: dict[str, torch.Tensor] = {}
    for name, each in (("base", base), ("model", model)):
        with torch.no_grad():
            first[name] = each(ids, output_hidden_states=True).hidden_states[1]
    assert torch.equal(first["base"], first["model"])


def test_the_window_is_set_in_every_layer(make_base: MakeBase) -> None:
    model = awake(make_base("Qwen2"), "ahn-gdn", layers=[0], others="window")
    model.set_window(window=12)
    assert (model.config.memory["window"], model.config.memory["sinks"]) == (12, S)
    model.set_window(5, 3)
    assert {(m.window, m.sinks) for m in model.model.memories().values()} == {(5, 3)}
    for window, sinks in ((0, 0), (3, -1), (2.5, 0)):
        with pytest.raises(RetrofitError):
            model.set_window(window, sinks)
    assert capacity(model) == 8, "a refused window has changed something"
    other = retrofit.patch(make_base("Qwen2"), "ahn-gdn", 5, 3, layers=[0], others="window")
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(model, tokens(1, 30)), logits(other, tokens(1, 30)))


@pytest.mark.parametrize("layers", [None, [0], [1]])
def test_a_native_window_that_is_longer(layers: list[int] | None, make_base: MakeBase) -> None:
    base = make_base("Mistral", sliding_window=16)
    model = awake(base, "ahn-gdn", layers=layers, push=0.03)
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[:, :12] = 0  # every row padded: more slots than the native window before anything is evicted
    assert torch.equal(logits(model, ids[:, :10]), logits(base, ids[:, :10]))
    with model.memory_off():
        assert torch.equal(logits(model, ids), logits(base, ids))
    sizes = [5, 9, 1, 1, 1, 1, 1, 1, 1, 1, 6, 12]
    whole = logits(model, ids, mask)
    torch.testing.assert_close(feed(model, ids, sizes, mask)[0][:, 12:], whole[:, 12:], rtol=0, atol=1e-5)
    torch.testing.assert_close(whole[:, 12:], logits(model, ids[:, 12:]), rtol=0, atol=1e-5)


def test_some_layers_with_a_native_window(make_base: MakeBase) -> None:
    base = make_base("Qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    assert base.config.layer_types == ["full_attention", "sliding_attention"]
    model = awake(base, "ahn-gdn")
    assert model.model.memories().keys() == {0}
    with model.memory_off():
        assert torch.equal(logits(model, tokens(2, 40)), logits(base, tokens(2, 40)))
    assert torch.equal(logits(model, tokens(2, W + S)), logits(base, tokens(2, W + S)))
    model.set_window(19, 1)  # more than the layer that slides keeps
    assert torch.equal(logits(model, tokens(2, 20)), logits(base, tokens(2, 20)))
    assert not torch.equal(logits(model, tokens(2, 21)), logits(base, tokens(2, 21)))


def test_a_configuration_without_a_memory_is_no_model() -> None:
    from patches.qwen2 import RetrofitQwen2Config, RetrofitQwen2ForCausalLM

    with pytest.raises(RetrofitError, match=r"retrofit\.patch"):
        RetrofitQwen2ForCausalLM(RetrofitQwen2Config(hidden_size=16, num_attention_heads=2, num_hidden_layers=1))


@pytest.mark.parametrize("asked", [False, True])
def test_products_of_a_memory_do_not_follow_the_global_switch(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it was told that they may; afterwards the switch is as before."""
    switch, seen = torch.backends.cuda.matmul, []
    model = awake(tiny_base("Qwen2"), "ahn-gdn")
    gates = type(model.model.memories()[0]).write_gates

    def watched(self: Any, x: Tensor) -> Tensor:
        seen.append(switch.fp32_precision)
        return gates(self, x)

    monkeypatch.setattr(type(model.model.memories()[0]), "write_gates", watched)
    for memory in model.model.memories().values():
        memory.tf32 = asked
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        logits(model, tokens(1, 3 * W))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"tf32" if asked else "ieee"}


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
@torch.no_grad()
def test_experts_are_balanced_by_the_loss_of_the_base(family: str) -> None:
    base, ids = tiny_base(family), tokens(2, W)
    losses = [model(ids, labels=ids, output_router_logits=True) for model in (base, retrofit.patch(base, "none", W, S))]
    assert losses[0].aux_loss > 0
    assert torch.equal(losses[0].aux_loss, losses[1].aux_loss)
    assert torch.equal(losses[0].loss, losses[1].loss)


def test_what_a_backward_pass_computes_again_is_of_its_own_token(make_base: MakeBase) -> None:
    """Though the cache has counted on by then."""
    model, cache = awake(make_base("Qwen2"), "ahn-gdn"), DynamicCache()
    with torch.no_grad():
        model(tokens(1, 30), past_key_values=cache)
    passes: list[Any] = []
    memory = model.model.memories()[0]
    attend = memory.attend
    memory.attend = lambda step: (passes.append(step.now), attend(step))[1]
    for token in range(2):
        model(tokens(1, 1, seed=token), past_key_values=cache)
    assert [replace(now, results={}).indices(0, 1).item() for now in passes] == [30, 31]


def test_a_whole_model_is_pickled(make_base: MakeBase, tmp_path: Path) -> None:
    """As ``torch.save`` and processes that are spawned do; in another process, which has made no such model."""
    model, ids = awake(make_base("Llama"), "ahn-gdn"), tokens(1, 30)
    torch.save((model, ids), tmp_path / "model.pt")
    code = "model, ids = torch.load('model.pt', weights_only=False)\nprint(model(ids).logits.sum().item())"
    said = fresh_process(code, tmp_path, path=ROOT)
    assert float(said.splitlines()[-1]) == pytest.approx(logits(model, ids).sum().item(), abs=1e-3)

"""Decoding compiled in one piece: the same tokens, no break in the graph, and one graph for all steps."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig

from patches.kinds import KINDS
from tests.conftest import tiny_base
from tests.helpers import TRAINABLE, S, W, awake, feed, left_mask, tokens

COMPILED = [name for name, kind in KINDS.items() if kind.compiles]
LENGTH, NEW = 3 * W, 4


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.no_grad()
def decoded(model: Any, step: Any, ids: Tensor, length: int = LENGTH) -> tuple[Tensor, Any]:
    """Logits of what comes after a prompt, token by token through ``step``, and the cache."""
    _, cache = feed(model, ids[:, :length], [length])
    tokens = (token.contiguous() for token in ids[:, length:].split(1, 1))
    return torch.cat([step(token, past_key_values=cache).logits for token in tokens], 1), cache


@pytest.mark.parametrize("kind", [*COMPILED, "joint, by layer"])
def test_a_step_is_one_graph(kind: str) -> None:
    kind, by_layer = kind.split(",")[0], {"1": {"window": W // 2, "features": 6}} if "," in kind else {}
    model = awake(tiny_base("Qwen2"), kind, by_layer=by_layer)
    ids, counter = tokens(2, LENGTH + NEW), CompileCounterWithBackend("aot_eager")
    plain, _ = decoded(model, model, ids)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    decoded(model, compiled, tokens(2, LENGTH + 1), LENGTH - 1)
    found, cache = decoded(model, compiled, ids)
    assert counter.frame_count == 1  # where a token lies is no part of it, nor is how long its text is
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)
    # what is not compiled goes on from there
    assert cache.get_seq_length() == LENGTH + NEW
    more = tokens(2, 3, seed=1)
    expected = feed(model, torch.cat([ids, more], 1), [LENGTH + NEW, 3])[0][:, -3:]
    torch.testing.assert_close(feed(model, more, [3], cache=cache)[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["none", "ahn-gdn", "joint"])
def test_generate_compiles(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded batch whose window fills while it generates: the first steps are not compiled, all others are."""
    model = awake(tiny_base("Qwen2"), kind, push=0.03)
    ids, mask = tokens(2, W), left_mask([W, W - 3], W)
    how = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 2 * W, "min_new_tokens": 2 * W}
    calls = [0]
    real = torch.compile

    def counted(function: Any, **options: Any) -> Any:
        compiled = real(function, **options)

        def call(**inputs: Any) -> Any:
            calls[0] += 1
            return compiled(**inputs)

        return call

    plain = model.generate(ids, **how)
    monkeypatch.setattr(torch, "compile", counted)
    config = CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    assert torch.equal(model.generate(ids, compile_config=config, **how), plain)
    assert calls[0] == 2 * W - 1 - (S + 3 + 1)  # the last is the first to evict one in the row with the most padding


def test_others_are_not_compiled() -> None:
    model = awake(tiny_base("Qwen2"), "kvm", push=0.03)
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    ids, how = tokens(1, 2 * W), {"do_sample": False, "max_new_tokens": 4, "return_dict_in_generate": True}
    told = model.generate(ids, compile_config=config, **how)
    assert not told.past_key_values.compileable
    assert torch.equal(told.sequences, model.generate(ids, **how).sequences)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_gradients_of_a_compiled_model(kind: str) -> None:
    """What torch's operators return while a graph is traced must be laid out as what they return when it runs."""
    model = awake(tiny_base("Qwen2", num_hidden_layers=1).double(), kind).train()
    ids = tokens(2, LENGTH)

    def gradients(call: Any) -> list[Tensor]:
        model.zero_grad()
        call(ids, use_cache=False).logits.square().mean().backward()
        return [parameter.grad.clone() for _, parameter in model.memory_parameters() if parameter.grad is not None]

    expected = gradients(model)
    torch._dynamo.reset()
    for mine, eager in zip(gradients(torch.compile(model, backend="aot_eager")), expected, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-9, atol=1e-12)

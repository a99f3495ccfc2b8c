"""Invariant 11: the chunked forms of the recurrences give the numbers of the readable ones, at any length and split."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from patches import scan
from tests.helpers import close

pytestmark = pytest.mark.usefixtures("poisoned_empty")
LENGTHS = (1, 63, 64, 65, 75, 200)


def inputs(length: int, seed: int, *, strongest: float = 3.0, zeros: float = 0.0) -> dict[str, Tensor]:
    """Random float64 arguments: unit keys, log decays to -``strongest``, a share ``zeros`` of beta exactly 0."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, length, d, generator=g, dtype=torch.float64) for d in (8, 8, 6))
    beta, decay, drop = (torch.rand(2, 3, length, generator=g, dtype=torch.float64) for _ in range(3))
    return {
        "q": q,
        "k": torch.nn.functional.normalize(k, dim=-1),
        "v": v,
        "beta": beta * (drop >= zeros),
        "log_decay": -strongest * decay,
        "state": torch.randn(2, 3, 8, 6, generator=g, dtype=torch.float64),
    }


linear_attention_steps = partial(scan.gated_delta_rule_steps, beta=None)


def linear(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that decayed linear attention has of them."""
    return {name: value for name, value in arguments.items() if name not in ("beta", "scale")}


def delta(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the gated delta rule: all, and a scale."""
    return {**arguments, "scale": 0.3}


Form = Callable[..., tuple[Tensor, Tensor]]
# the chunked and the stepwise form of each recurrence, and what picks its arguments
FORMS: dict[str, tuple[Form, Form, Callable[..., dict[str, Any]]]] = {
    "gated delta rule": (scan.gated_delta_rule_chunks, scan.gated_delta_rule_steps, delta),
    "linear attention": (scan.linear_attention_chunks, linear_attention_steps, linear),
}


@pytest.fixture(params=FORMS)
def forms(request: pytest.FixtureRequest) -> tuple[Form, Form, Callable[..., dict[str, Any]]]:
    """Each recurrence in turn, as in ``FORMS``."""
    return FORMS[request.param]


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float64
        close(a, b, 1e-9)


@pytest.mark.parametrize("length", LENGTHS)
def test_any_length(forms: Any, length: int) -> None:
    chunks, steps, pick = forms
    given_state = pick(inputs(length, length))
    assert_same(chunks(**given_state), steps(**given_state))
    for left_out in ("state", "log_decay"):
        fewer = {name: value for name, value in given_state.items() if name != left_out}
        assert_same(chunks(**fewer), steps(**fewer))


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 300])
def test_any_chunk(forms: Any, chunk: int) -> None:
    chunks, steps, pick = forms
    arguments = pick(inputs(75, 1))
    assert_same(chunks(**arguments, chunk=chunk), steps(**arguments))


@pytest.mark.parametrize("length", [1, 63, 65, 200])
def test_gradients_of_every_argument(forms: Any, length: int) -> None:
    chunks, steps, pick = forms
    arguments = pick(inputs(length, 2))
    found = []
    for form in (chunks, steps):
        leaves = {n: x.clone().requires_grad_() if torch.is_tensor(x) else x for n, x in arguments.items()}
        out, state = form(**leaves)
        (out.square().sum() + (state * torch.arange(6)).sum()).backward()
        found.append({name: leaf.grad for name, leaf in leaves.items() if torch.is_tensor(leaf)})
    for name, gradient in found[0].items():
        close(gradient, found[1][name], 1e-8)  # a sum of hundreds of terms


def test_no_token_at_all(forms: Any) -> None:
    chunks, steps, pick = forms
    arguments = pick(inputs(0, 0))
    for form in (chunks, steps):
        out, state = form(**arguments)
        assert out.shape == (2, 3, 0, 6)
        assert torch.equal(state, arguments["state"])


@pytest.mark.parametrize("strongest", [0.0, 1e-6, 30.0, 1000.0])
def test_no_decay_and_decays_that_forget_everything(forms: Any, strongest: float) -> None:
    chunks, steps, pick = forms
    arguments = pick(inputs(75, 3, strongest=strongest))
    out, state = chunks(**arguments)
    assert out.isfinite().all()
    assert_same((out, state), steps(**arguments))


def test_strong_decays_beside_none(forms: Any) -> None:
    """A decay of 1 behind one of exp(-1000): differences of running sums must not lose it, nor overflow."""
    chunks, steps, pick = forms
    arguments = inputs(75, 4, strongest=0.01)
    arguments["log_decay"][..., ::5] = -1000.0
    arguments = pick(arguments)
    assert_same(chunks(**arguments), steps(**arguments))
    in_float32 = {name: x.float() if torch.is_tensor(x) else x for name, x in arguments.items()}
    for ours, exact in zip(chunks(**in_float32), steps(**arguments), strict=True):
        assert ours.dtype == torch.float32
        close(ours.double(), exact, 1e-4)


def test_a_token_with_beta_0_leaves_the_state() -> None:
    arguments = inputs(75, 5)
    quiet = {**arguments, "beta": torch.zeros_like(arguments["beta"]), "log_decay": None}
    for form in (scan.gated_delta_rule_chunks, scan.gated_delta_rule_steps):
        assert torch.equal(form(**quiet)[1], arguments["state"])


def test_beta_1_writes_exactly_the_value() -> None:
    """With a unit key and beta 1, what the key recalls afterwards is its value: the delta rule's promise."""
    arguments = inputs(20, 6)
    arguments["beta"].fill_(1.0)
    for form in (scan.gated_delta_rule_chunks, scan.gated_delta_rule_steps):
        out, state = form(**{**arguments, "q": arguments["k"]})
        close(out, arguments["v"])
        close((arguments["k"][:, :, -1:] @ state)[:, :, 0], arguments["v"][:, :, -1])


@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    form=st.sampled_from(sorted(FORMS)),
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    chunk=st.integers(1, 70),
    strongest=st.sampled_from([0.0, 0.1, 3.0, 50.0, 400.0]),
    zeros=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_any_split(form: str, sizes: list[int], chunk: int, strongest: float, zeros: float, seed: int) -> None:
    """Fed in pieces, the state handed on: what the cache does, held to one pass of the readable form."""
    chunks, steps, pick = FORMS[form]
    arguments = pick(inputs(sum(sizes), seed, strongest=strongest, zeros=zeros))
    state, out, start = arguments["state"], [], 0
    for size in sizes:
        piece = {
            name: x[:, :, start : start + size] if torch.is_tensor(x) and name != "state" else x
            for name, x in arguments.items()
        }
        read, state = chunks(**{**piece, "state": state}, chunk=chunk)
        out.append(read)
        start += size
    assert_same((torch.cat(out, 2), state), steps(**arguments))


@pytest.mark.parametrize("length", [1, scan.STEPWISE, scan.STEPWISE + 1, 75])
def test_the_chosen_form_is_one_of_the_two(length: int) -> None:
    arguments = inputs(length, 7)
    assert_same(scan.run_recurrence(**arguments), scan.gated_delta_rule_steps(**arguments))
    assert_same(scan.run_recurrence(**linear(arguments)), linear_attention_steps(**linear(arguments)))


@pytest.mark.parametrize("length", [0, 1, 20, 21, 200])
def test_segments_carry_the_state(
    forms: tuple[Form, Form, Callable[..., dict[str, Any]]], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, form, choose), picked = forms, scan.run_recurrence
    arguments = choose(inputs(length, seed=1))
    expected = form(**arguments)
    monkeypatch.setattr(scan, "SEGMENT", 20)
    assert_same(picked(**arguments), expected)
    without = {**arguments, "state": None}
    if length:
        assert_same(picked(**without), form(**without))

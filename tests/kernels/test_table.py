"""The table of kernels: what it chooses, what can be forced, and its torch forms against the readable recurrences."""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from patches import fla_ops, kernels, scan
from patches.errors import RetrofitError
from tests.helpers import close
from tests.kernels.arguments import forced, recurrence, results

OPS = kernels.OPS[:2]  # the recurrences
# heads of queries, states, keys: one each; queries that share a state; states that share keys; both
HEADS = ((2, 2, 2), (6, 2, 2), (4, 4, 2), (8, 4, 2))


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is forced and nothing was chosen before."""
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    with forced():
        yield


def readable(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    *,
    scale: float,
    normalise: bool = False,
) -> tuple[Tensor, Tensor]:
    """The definition: everything repeated for each query head, then token by token in float64."""
    H, T = q.shape[1:3]
    states = max(x.shape[1] for x in (k, v, beta, log_decay) if x is not None)
    if normalise:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    k, v, beta, log_decay = (
        None if x is None else x.double().repeat_interleave(H // x.shape[1], 1) for x in (k, v, beta, log_decay)
    )
    S = q.new_zeros(len(q), H, q.shape[-1], v.shape[-1]) if state is None else state.repeat_interleave(H // states, 1)
    S, out = S.double(), []
    for t in range(T):
        if log_decay is not None:
            S = S * log_decay[:, :, t, None, None].exp()
        write = v[:, :, t]
        if op == "gated_delta_rule":
            write = beta[:, :, t, None] * (write - torch.einsum("bhk,bhkv->bhv", k[:, :, t], S))
        S = S + k[:, :, t, :, None] * write.unsqueeze(-2)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t].double(), S) * scale)
    return torch.stack(out, 2), S[:, :: H // states]


def unit_length(op: str, wanted: bool = True) -> dict[str, bool]:
    """What has the op give queries and keys unit length; the delta rule's alone does."""
    return {"normalise": wanted} if op == "gated_delta_rule" else {}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 5, 75])
@pytest.mark.parametrize("without", [(), ("log_decay", "state")])
def test_torch_forms(op: str, heads: tuple[int, int, int], tokens: int, without: tuple[str, ...]) -> None:
    if op == "linear_attention" and "log_decay" in without:
        heads = (heads[0], heads[2], heads[2])  # only a decay tells of more states than keys
    arguments = recurrence(op, tokens, heads=heads, without=without)
    for how in ({}, unit_length(op)):
        ours = results(getattr(kernels, op), arguments, scale=0.3, **how)
        theirs = results(partial(readable, op), arguments, scale=0.3, **how)
        assert ours.keys() == theirs.keys()
        for name, expected in theirs.items():
            assert ours[name].shape == expected.shape, name
            close(ours[name], expected, 1e-8)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("heads", HEADS)
def test_a_single_token_in_place(op: str, heads: tuple[int, int, int]) -> None:
    """The same numbers, in the state that was given; with a gradient that one stays as it is."""
    for dtype, tolerance in ((torch.float64, 1e-8), (torch.bfloat16, 1e-5)):
        arguments = recurrence(op, 1, heads=heads, dims=(7, 17), dtype=dtype)
        how, before = {"scale": 0.3, **unit_length(op)}, arguments["state"].clone()
        expected = getattr(kernels, op)(**arguments, **how)
        leaf = {**arguments, "v": arguments["v"].clone().requires_grad_()}
        close(getattr(kernels, op)(**leaf, **how, in_place=True)[0].detach(), expected[0], tolerance)
        assert torch.equal(arguments["state"], before)
        read, state = getattr(kernels, op)(**arguments, **how, in_place=True)
        assert state is arguments["state"]
        close(read, expected[0], tolerance)
        close(state, expected[1], tolerance)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_readings_and_states_are_float32(op: str, dtype: torch.dtype) -> None:
    arguments = recurrence(op, 40, heads=(4, 2, 2), dtype=dtype)
    exact = {name: x.double() for name, x in arguments.items()}
    for mine, expected in zip(
        getattr(kernels, op)(**arguments, scale=1.0), getattr(kernels, op)(**exact, scale=1.0), strict=True
    ):
        assert mine.dtype == torch.float32
        close(mine.double(), expected, 1e-4)


@pytest.mark.parametrize("lse", [True, False])
def test_attention_tells_its_log_sum_exp_if_asked(lse: bool) -> None:
    """And in which layout; what the two compute is tested where the torch forms are."""
    q, k, v = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 28, 8), torch.randn(2, 2, 28, 8)
    sinks = k[:, :, :3], v[:, :, :3]
    out, found = kernels.window_attention(q, k, v, *sinks, window=8, start=30, scale=0.5, lse=lse)
    last = q[:, :, -1:], k[:, :, -8:], v[:, :, -8:]
    one, once = kernels.decode_attention(*last, scale=0.5, lse=lse)
    k, v = (x.repeat_interleave(2, 1) for x in last[1:])
    logits = last[0] @ k.mT * 0.5
    close(one, logits.softmax(-1) @ v, 1e-5)
    assert out.shape == (2, 4, 20, 8)
    for sums, tokens in ((found, 20), (once, 1)):
        assert (sums is None) != lse
        assert sums is None or sums.shape == (2, 4, tokens)
    if once is not None:
        close(once, logits.logsumexp(-1), 1e-5)


def test_torch_serves_everything_on_a_cpu() -> None:
    for op in kernels.OPS:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for gradient in (True, False):
                assert kernels.find(op, "cpu", dtype, gradient)[0].backend == "torch"


def test_a_backend_that_does_not_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.zeros(1, 3, 1, 4)
    with (
        forced("fla"),
        pytest.raises(RetrofitError, match=r"RETROFIT_KERNELS=fla: .* needs a GPU; or unset RETROFIT_KERNELS"),
    ):
        kernels.linear_attention(q, q, q, scale=1.0)
    with forced("flaa"), pytest.raises(RetrofitError, match=r"did you mean 'fla'.*use .*torch, or unset it"):
        kernels.linear_attention(q, q, q, scale=1.0)
    kernels.linear_attention(q, q, q, scale=1.0)  # nothing of it is remembered


def test_forcing_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "torch")
    with forced("fla"):
        assert kernels.forced_backends() == ["fla"]
    assert os.environ[kernels.VARIABLE] == "torch"


def test_what_is_missing_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that fits but cannot be imported: the next one serves, and a single warning says why."""

    def absent(device: str, gradient: bool) -> Any:
        raise ImportError("it is not there: install it")

    said: list[str] = []
    kernels.logger.warning_once.cache_clear()
    monkeypatch.setattr(kernels, "TABLE", [kernels.Kernel("linear_attention", "other", absent), *kernels.TABLE])
    monkeypatch.setattr(kernels.logger, "warning", said.append)
    q = torch.zeros(1, 3, 1, 4)
    for _ in range(3):
        kernels.linear_attention(q, q, q, scale=1.0)
    assert len(said) == 1
    assert said[0] == "linear_attention runs on torch, not on other: it is not there: install it"


# ---- what stands between the table and fla, with the readable form in fla's place ----


class Recorded:
    """Stands for an op of fla, whose tokens come before heads; its numbers are those of the readable form."""

    def __init__(self, op: str):
        self.op, self.calls = op, 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None, **how: Any
    ) -> tuple[Tensor, Tensor]:
        self.calls += 1
        assert how.pop("output_final_state")
        assert len({x.dtype for x in (q, k, v)}) == 1
        assert q.shape[2] == k.shape[2] == v.shape[2] == g.shape[2]
        assert q.shape[-1] % 8 == v.shape[-1] % 8 == 0
        assert g.dtype == torch.float32
        assert initial_state is None or initial_state.dtype == torch.float32
        normalise = how.pop("use_qk_l2norm_in_kernel", False)
        given = [None if x is None else x.transpose(1, 2) for x in (q, k, v, how.pop("beta", None), g)]
        out, last = readable(self.op, *given, initial_state, normalise=normalise, **how)
        return out.transpose(1, 2).to(v.dtype), last.float()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("tokens", "gradient"), [(1, False), (8, False), (9, False), (1, True)])
def test_fla_is_given_what_it_takes(op: str, heads: tuple[int, int, int], tokens: int, gradient: bool) -> None:
    chunks, steps = Recorded(op), Recorded(op)
    run = partial(fla_ops.run_form, chunks, steps, gradient)
    arguments = recurrence(op, tokens, heads=heads, dims=(7, 17), dtype=torch.float32)
    ours = results(run, arguments, gradient, scale=0.3, **unit_length(op))
    theirs = results(partial(readable, op), arguments, gradient, scale=0.3, **unit_length(op))
    for name, expected in theirs.items():
        close(ours[name].double(), expected.double(), 1e-4)
    assert (steps.calls, chunks.calls) == ((1, 0) if tokens <= scan.STEPWISE and not gradient else (0, 1))
    without = {name: x for name, x in arguments.items() if name not in ("log_decay", "state")}
    if op == "linear_attention":
        without["k"] = without["k"].repeat_interleave(heads[1] // heads[2], 1)
    out, last = run(**without, log_decay=None, state=None, scale=1.0, **unit_length(op, False))
    close(out.double(), readable(op, **without, scale=1.0)[0], 1e-4)
    assert last.is_contiguous()
    assert last.untyped_storage().nbytes() == last.nbytes


@pytest.mark.parametrize("op", OPS)
def test_fla_with_no_token(op: str) -> None:
    run = partial(fla_ops.run_form, Recorded(op), Recorded(op), False)
    arguments = recurrence(op, 0, heads=(4, 2, 2), dtype=torch.float32)
    out, last = run(**arguments, scale=1.0, **unit_length(op, False))
    assert out.shape == (2, 4, 0, 6)
    assert torch.equal(last, arguments["state"])


def test_fla_is_refused_where_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper with a Triton that miscompiles the backward: forward yes, training no."""
    import sys
    import types

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, version, gradient, refused in (
        ((9, 0), "3.6.0", True, True),
        ((9, 0), "3.6.0", False, False),
        ((9, 0), "3.7.1", True, False),
        ((8, 0), "3.6.0", True, False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        triton = types.ModuleType("triton")
        triton.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "triton", triton)
        if refused:
            with pytest.raises(ImportError, match="miscompiles its backward"):
                fla_ops.refuse("cuda", gradient)
        else:
            fla_ops.refuse("cuda", gradient)

"""fla's kernels in Triton's interpreter against the recurrences token by token in float64: `make test-kernels`."""

from functools import partial
from typing import Any

import pytest
import torch

from patches import kernels
from tests.kernels.arguments import distance, forced, recurrence, results
from tests.kernels.test_table import OPS, readable, unit_length

pytestmark = pytest.mark.usefixtures("interpreter")
FLOAT32 = 1e-5
CASES: dict[str, dict[str, Any]] = {
    "a chunk and a bit": {"tokens": 70, "dims": (16, 16)},
    "one token with a gradient": {"tokens": 1},
    "odd sizes, shared states": {"tokens": 65, "heads": (2, 1, 1), "dims": (31, 33)},
    "nothing before": {"tokens": 20, "without": ("log_decay", "state")},
    "strong decays": {"tokens": 66, "dims": (8, 8), "strongest": 1000.0, "tolerance": 1e-4},
    "bfloat16": {"tokens": 66, "heads": (2, 2, 1), "dims": (15, 17), "dtype": torch.bfloat16, "tolerance": 0.02},
    "float16": {"tokens": 66, "heads": (2, 2, 1), "dims": (15, 17), "dtype": torch.float16, "tolerance": 0.003},
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(op: str, case: str) -> None:
    settings = dict(CASES[case])
    tolerance = settings.pop("tolerance", FLOAT32)
    if op == "linear_attention" and "log_decay" in settings.get("without", ()):
        settings["heads"] = (4, 2, 2)
    arguments = recurrence(op, **settings)
    compare(op, {name: x.float() if x.dtype == torch.float64 else x for name, x in arguments.items()}, tolerance)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [1, 8])
def test_the_fused_recurrent_form(op: str, tokens: int) -> None:
    arguments = recurrence(op, tokens, heads=(4, 2, 1), dims=(31, 33), dtype=torch.float32)
    compare(op, arguments, FLOAT32, gradient=False)


@pytest.mark.parametrize("op", OPS)
def test_a_state_handed_on(op: str) -> None:
    """In pieces, the recurrent form behind the chunked one: what a cache does."""
    arguments = recurrence(op, 70, dtype=torch.float32)
    whole = readable(op, **arguments, scale=1.0)
    state, out = arguments.pop("state"), []
    with forced("fla"), torch.no_grad():
        for first, last in ((0, 66), (66, 67), (67, 70)):
            piece = {name: x[:, :, first:last] for name, x in arguments.items()}
            read, state = getattr(kernels, op)(**piece, state=state, scale=1.0)
            out.append(read)
    for mine, expected in zip((torch.cat(out, 2), state), whole, strict=True):
        assert distance(mine, expected) < FLOAT32


def compare(op: str, arguments: dict[str, Any], tolerance: float, gradient: bool = True) -> None:
    exact = {name: x.double() for name, x in arguments.items()}
    theirs = results(partial(readable, op), exact, gradient, scale=0.3, **unit_length(op))
    with forced("fla"):
        assert kernels.find(op, "cpu", arguments["q"].dtype, gradient)[0].backend == "fla"
        ours = results(getattr(kernels, op), arguments, gradient, scale=0.3, **unit_length(op))
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert distance(ours[name], expected) < tolerance, name

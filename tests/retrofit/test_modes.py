"""Whatever measures a model does so in eval mode, and leaves every module in the mode in which it found it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import retrofit
from patches.kinds import KINDS
from retrofit.calibration import measure, weigh_layers
from retrofit.evaluation.contenders import contenders, ready
from retrofit.evaluation.scores import hidden_states
from retrofit.needs import Needs
from tests.conftest import tiny_base
from tests.helpers import tokens


def read_by_all(model: Any, ids: Tensor) -> None:
    rows = contenders({"memory": model})
    with ready(rows):
        for row in rows:
            hidden_states(row.model, {"input_ids": ids})


MEASURES: dict[str, Callable[[Any, Tensor], Any]] = {
    "calibrate": lambda model, ids: retrofit.calibrate(model, [ids]),
    "by need": lambda model, ids: measure([Needs(model, weigh_layers(model), [ids])], [ids]),
    "evaluate": lambda model, ids: retrofit.evaluate(model, ids, start=10),
    "contenders": read_by_all,
}


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("name", MEASURES)
def test_modes_are_as_they_were(name: str, breaks: bool, family: str) -> None:
    model = retrofit.patch(tiny_base(family, attention_dropout=0.5), "expected", window=8, sinks=2).train()
    model.model.layers[0].mlp.eval()
    before = {path: module.training for path, module in model.named_modules()}
    seen = []

    def look(module: Any, *_: Any) -> None:
        seen.append(module.training)
        if breaks:
            raise KeyError("on the way")

    model.model.layers[-1].self_attn.register_forward_hook(look)
    if breaks:
        with pytest.raises(KeyError, match="on the way"):
            MEASURES[name](model, tokens(2, 60))
    else:
        MEASURES[name](model, tokens(2, 60))
    assert not any(seen)
    assert seen
    assert {path: module.training for path, module in model.named_modules()} == before


@pytest.mark.parametrize("kind", [kind for kind, memory in KINDS.items() if memory.calibrates])
def test_dropout_has_no_part_in_calibration(kind: str) -> None:
    base, found = tiny_base("Qwen2", attention_dropout=0.5), []
    for training in (False, True):
        torch.manual_seed(0)
        model = retrofit.patch(base, kind, window=8, sinks=2).train(training)
        retrofit.calibrate(model, [tokens(2, 60)])
        found.append({name: x for name, x in model.state_dict().items() if ".memory." in name})
    for name, x in found[0].items():
        assert torch.equal(x, found[1][name]), name

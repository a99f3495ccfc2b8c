"""The demo with an untrained teacher and a few steps."""

import pytest
import torch

from distill.demo import run as demo
from distill.demo.teacher import OnStep, as_llama, new_model


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained teacher, three steps, eight held-out documents."""

    def train_teacher(seed: int, on_step: OnStep) -> torch.nn.Module:
        on_step("copy", 1, 2, 4.0, 0.0)
        on_step("full", 1, 1, 4.0, 0.0)
        return as_llama(new_model(seed)).eval()

    monkeypatch.setattr(demo, "train_teacher", train_teacher)
    for name, value in {"STEPS": 3, "BATCH": 2, "HELD_OUT": 8}.items():
        monkeypatch.setattr(demo, name, value)

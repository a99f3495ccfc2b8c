"""Every invariant runs over every kind of memory and every family; its finer points on each kind with one family."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from patches.kinds import KINDS
from tests.helpers import awake

# with other versions of transformers only: make test-versions
collect_ignore = [] if os.environ.get("RETROFIT_TRANSFORMERS") else ["test_versions.py"]
HALF = [(dtype, mixed) for dtype in (torch.bfloat16, torch.float16) for mixed in (False, True)]
FAMILIES = ("Qwen2", "Qwen3", "Llama", "Mistral")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of memory in turn; a new one is in as soon as it is in ``patches.kinds``."""
    return request.param


@pytest.fixture
def model(base: PreTrainedModel, kind: str) -> Any:
    """Each family with each kind, W = 8 and S = 2, its parameters pushed away from where they start."""
    return awake(base, kind)


@pytest.fixture
def partner(kind: str, make_base: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """One base for each kind, the families taking turns."""
    return make_base(FAMILIES[list(KINDS).index(kind) % len(FAMILIES)])


@pytest.fixture(params=range(len(HALF)), ids=[f"{str(dtype)[6:]}{'-autocast' * mixed}" for dtype, mixed in HALF])
def half(
    request: pytest.FixtureRequest, kind: str, make_base: Callable[..., PreTrainedModel]
) -> tuple[PreTrainedModel, torch.dtype, bool]:
    """A base in float32 and one of HALF: a 16-bit dtype, and whether the base is to be cast to it or to run under
    autocast. Each kind meets every family."""
    dtype, mixed = HALF[request.param]
    family = FAMILIES[(list(KINDS).index(kind) + request.param) % len(FAMILIES)]
    return make_base(family), dtype, mixed


@pytest.fixture
def one_model(partner: PreTrainedModel, kind: str) -> Any:
    """Each kind on one family, awake."""
    return awake(partner, kind)

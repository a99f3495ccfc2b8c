"""Sequences of all lengths in one step, in pages that others used before, read what they would have read alone."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from patches.errors import RetrofitError
from tests.helpers import awake, close, logits, tokens
from tests.serving.engine import Engine

FAMILIES = ("Qwen2", "Qwen3", "Llama", "Mistral", "SmolLM3")  # experts are no part of a page
CASES: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("ahn-gdn", {}),
    ("ahn-dn", {}),
    ("ahn-mamba2", {}),
    ("shared-gdn", {}),
    ("shared-mamba2", {}),
    ("joint", {}),
    ("joint", {"branches": "linear"}),
    ("tensor-cache", {}),
    ("tensor-cache", {"rule": "wedge", "slots": 3, "top_k": 2, "two_timescale": True, "z_norm": True}),
    ("tensor-cache", {"population": "all"}),
    ("infini", {}),
    ("infini", {"population": "all", "write": "delta"}),
    ("kvm", {"rows": 5, "chunk": 4}),
    ("kvm", {"rows": 5, "chunk": 2, "positions": "edge"}),
    ("expected", {"rows": 5}),
    ("expected", {"rows": 5, "bits": 4}),
    ("joint-rows", {"rows": 5, "bits": 8}),
    ("compressive", {"rows": 3, "ratio": 3}),
    ("compressive", {"rows": 3, "ratio": 1, "pool": "max"}),
]


def case_name(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(map(str, value.values()))


@pytest.fixture
def serve(make_base: Callable[..., PreTrainedModel]) -> Callable[..., Any]:
    """A model of some family in float64, awake."""

    def make(kind: str, family: str = "Qwen2", **options: Any) -> Any:
        return awake(make_base(family).double(), kind, **options)

    return make


def run(model: Any, lengths: list[int], most: int, pages: int, seed: int) -> None:
    """Feed sequences of ``lengths`` in random shares, ``pages`` at a time at most; their logits are the model's."""
    draw = random.Random(seed)
    engine = Engine(model, pages)
    texts = [tokens(1, length, seed=seed + i)[0] for i, length in enumerate(lengths)]
    expected = [logits(model, text[None])[0] for text in texts]
    waiting, running, free = list(range(len(texts))), {}, list(range(pages))
    while waiting or running:
        while waiting and free and draw.random() < 0.7:
            running[waiting.pop(0)] = [0, free.pop(draw.randrange(len(free)))]
        chosen = [index for index in running if draw.random() < 0.8]
        work, ends = [], {}
        for index in chosen:
            seen, page = running[index]
            # most sequences decode, some bring a part of their prompt
            count = 1 if draw.random() < 0.6 else draw.randint(1, most)
            ends[index] = min(seen + count, len(texts[index]))
            work.append((texts[index][seen : ends[index]], seen, page))
        draw.shuffle(order := list(range(len(work))))
        found = engine.step([work[i] for i in order]) if work else []
        for i, got in zip(order, found, strict=True):
            index = chosen[i]
            close(got, expected[index][work[i][1] : ends[index]], 1e-8)
        for index in chosen:
            running[index][0] = ends[index]
            if ends[index] == len(texts[index]) or draw.random() < 0.01:  # done, or given up half-way
                free.append(running.pop(index)[1])


@pytest.mark.parametrize(("kind", "options"), CASES, ids=case_name)
def test_sequences_in_pages_read_what_they_would_alone(serve: Any, kind: str, options: dict[str, Any]) -> None:
    run(serve(kind, **options), [3, 9, 10, 11, 40, 12, 25, 1, 33], most=14, pages=4, seed=1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["ahn-gdn", "joint", "tensor-cache", "kvm"])
def test_every_family(serve: Any, family: str, kind: str) -> None:
    run(serve(kind, family), [30, 12, 5, 24], most=20, pages=3, seed=2)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [("tova", {}, "its own choice"), ("h2o", {}, "its own choice"), ("kvm", {"budget": "saturating"}, "grows")],
)
def test_what_grows_has_no_page(serve: Any, kind: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RetrofitError, match=reason):
        Engine(serve(kind, **options), 1)

"""`retrofit estimate`: the AHN paper's digits, and the honest figures held to real models and real caches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import retrofit
from patches.config import MemoryConfig
from patches.errors import RetrofitError
from patches.kinds import KINDS, new_memory
from retrofit.costs import bases
from retrofit.costs.bases import base_config, built_in
from retrofit.costs.estimate import Device, cache_parts, estimate, layer_memories
from retrofit.costs.flops import Shape, forward_flops
from tests.conftest import FAMILIES
from tests.helpers import SIZE, S, W, awake, feed, tokens

MakeBase = Callable[..., PreTrainedModel]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_a_real_patched_model(kind: str, make_base: MakeBase, tmp_path: Path) -> None:
    base = make_base("Qwen3")
    base.save_pretrained(tmp_path)
    rows, _ = estimate(str(tmp_path), kind, W, S, 64, layers=[1])
    real = retrofit.patch(base, kind, W, S, layers=[1])
    assert rows[-1]["extra_parameters"] == sum(parameter.numel() for _, parameter in real.memory_parameters())


OPTIONS: dict[str, dict[str, Any]] = {
    "kvm, growing": {"budget": "power_law", "factor": 2.0},
    "tova, by head": {"scope": "head"},
    "h2o, few": {"heavy": 3},
    "tensor-cache, all": {"slots": 2, "z_norm": True, "two_timescale": True},
    "joint, linear": {"branches": "linear"},
    "joint, by query head": {"shared_state": False},
    "compressive, few": {"rows": 3, "ratio": 3},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*KINDS, *OPTIONS])
def test_bytes_are_those_of_a_real_cache(case: str, dtype: torch.dtype, make_base: MakeBase) -> None:
    kind, options = case.split(",")[0], OPTIONS.get(case, {})
    model = awake(make_base("Qwen2").to(dtype), kind, **options)
    memories = layer_memories(model.config, new_memory(kind, W, S, options=options))
    for length in (5, W + S, W + S + 1, 18, 19, 40, 41, 90):
        _, cache = feed(model, tokens(2, length), [length])
        expected = sum(sum(cache_parts(model.config, memory, length, dtype)) for memory in memories)
        assert retrofit.cache_bytes(cache) == 2 * expected, length


def test_layers_without_the_memory_are_counted_as_what_they_are(make_base: MakeBase, tmp_path: Path) -> None:
    base = make_base("Llama")
    base.save_pretrained(tmp_path)
    for others in ("full", "window"):
        rows, _ = estimate(str(tmp_path), "ahn-gdn", W, S, 50, layers=[0], others=others, batch=3)
        _, cache = feed(retrofit.patch(base, "ahn-gdn", W, S, layers=[0], others=others), tokens(3, 50), [50])
        assert rows[-1]["cache_bytes"] == retrofit.cache_bytes(cache)


@pytest.mark.parametrize("kind", ["none", "ahn-gdn", "expected", "kvm", "h2o"])
def test_windows_and_options_by_layer_are_counted(kind: str, make_base: MakeBase, tmp_path: Path) -> None:
    base = make_base("Llama")
    base.save_pretrained(tmp_path)
    by_layer = {"0": {"window": 4, **SIZE.get(kind, {})}, "1": {"window": 13}}
    for length in (6, 7, 15, 90) if kind != "h2o" else (6, 7, 90):  # at 15, one of its layers drops and one does not
        rows, _ = estimate(str(tmp_path), kind, W, S, length, by_layer=by_layer)
        _, cache = feed(retrofit.patch(base, kind, W, S, by_layer=by_layer), tokens(1, length), [length])
        assert rows[-1]["cache_bytes"] == retrofit.cache_bytes(cache), length


def test_layers_that_slide_keep_their_own_window(make_base: MakeBase, tmp_path: Path) -> None:
    base = make_base("Ministral")  # 12 tokens in its first layer
    base.save_pretrained(tmp_path)
    rows, _ = estimate(str(tmp_path), "none", W, S, 50)
    _, cache = feed(base, tokens(1, 50), [49, 1])
    assert rows[0]["cache_bytes"] == retrofit.cache_bytes(cache)
    shape = Shape.of(base.config)
    pairs = 12 * 13 // 2 + (50 - 12) * 12 + 50 * 51 // 2
    assert rows[0]["prefill_flops"] == 2 * shape.body * 50 + 4 * pairs * 64 + 2 * shape.head


def test_pairs_by_the_definition() -> None:
    for sinks, window, length in ((0, 5, 30), (3, 4, 30), (3, 4, 5)):
        memory = layer_memories(built_in("Qwen2.5-3B"), MemoryConfig("ahn-gdn", window, sinks))[0]
        by_hand = [sum(t - j < window or j < sinks for j in range(t + 1)) for t in range(length)]
        assert memory.seen_keys(length).tolist() == by_hand


@pytest.mark.parametrize(
    ("kind", "options", "seen"),
    [
        # S = 1, W = 4, blocks of 2: from token 5 on 3 or 4 window tokens, and as many rows as blocks allow
        ("kvm", {"chunk": 2, "rows": 3}, [1, 2, 3, 4, 5, 1 + 3 + 2, 1 + 4 + 2, 1 + 3 + 3, 1 + 4 + 3, 1 + 3 + 3]),
        ("compressive", {"ratio": 2, "rows": 2}, [1, 2, 3, 4, 5, 6, 1 + 1 + 4, 1 + 1 + 5, 1 + 2 + 4, 1 + 2 + 5]),
        ("tova", {}, [1, 2, 3, 4, 5, 6, 6, 6, 6, 6]),
        ("h2o", {"heavy": 2}, [1, 2, 3, 4, 5, 6, 7, 8, 8, 8]),
    ],
)
def test_rows_are_seen_too(kind: str, options: dict[str, Any], seen: list[int]) -> None:
    memory = layer_memories(built_in("Qwen2.5-3B"), MemoryConfig(kind, 4, 1, options=options))[0]
    assert memory.seen_keys(10).tolist() == seen


@pytest.mark.parametrize("family", [*FAMILIES, "Mixtral", "Qwen3Moe", "SmolLM3"])
def test_operations_of_the_base_are_what_torch_counts(family: str, make_base: MakeBase) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    base = make_base(family, attn_implementation="eager")
    shape, T = Shape.of(base.config), 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        base(tokens(1, T), use_cache=False)
    full = 4 * T * T * shape.heads * shape.head_dim * shape.layers  # eager attention does masked pairs, too
    ours = forward_flops(shape, [None] * shape.layers, T, head=T)
    causal = 4 * (T * (T + 1) // 2) * shape.heads * shape.head_dim * shape.layers
    assert counter.get_total_flops() == ours - causal + full


def test_a_matrix_state_costs_its_products() -> None:
    config = built_in("Qwen2.5-3B")
    evicted = 1000 - W - S
    # products of d x d: 16 query heads, 2 key heads
    state = {"ahn-gdn": 3 * 16, "ahn-mamba2": 2 * 16, "tensor-cache": 2 + 16, "shared-dn": 2 * 2 + 16}
    for kind, products in state.items():
        memory = layer_memories(config, MemoryConfig(kind, W, S))[0]
        assert memory is not None
        weights = sum(parameter.numel() for parameter in memory.parameters() if parameter.dim() > 1)
        assert memory.flops(1000) == 2 * weights * 1000 + 2 * products * 128**2 * evicted


@pytest.mark.parametrize(("shared", "states"), [(True, 2), (False, 16)])
def test_a_shared_state_is_written_once_and_read_by_all(shared: bool, states: int) -> None:
    config, evicted = built_in("Qwen2.5-3B"), 1000
    memory = layer_memories(config, new_memory("joint", W, S, options={"shared_state": shared}))[0]
    assert memory is not None
    # both branches are written and read; one is read by its keys, too
    assert memory.state_flops(evicted) == 2 * 63 * 129 * (3 * states + 2 * 16) * evicted


def test_seconds_only_for_a_device() -> None:
    rows, said = estimate("qwen2.5-7b", "none", 8064, 128, 128000, dtype="bfloat16")
    assert [row["name"] for row in rows] == ["full", "window"]
    assert "prefill_seconds" not in rows[0]
    assert "built-in" in said
    rows, _ = estimate("Qwen2.5-7B", "none", 8064, 128, 128000, device=Device(989, 4800))
    # the tables of an independent count: 5.22 s, 222 tokens/s
    assert rows[0]["prefill_seconds"] == pytest.approx(5.0, abs=0.3)
    assert 1e3 / rows[0]["decode_ms"] == pytest.approx(222, rel=0.01)


def test_the_table_stands_in_for_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(path: str) -> None:
        raise RetrofitError(f"there is no folder {path!r}, and the Hub cannot be reached to look for it")

    monkeypatch.setattr(bases, "load_config", unreachable)
    config, said = base_config("Qwen/Qwen2.5-14B-Instruct")
    assert (config.hidden_size, "cannot be reached" in said) == (5120, True)
    with pytest.raises(RetrofitError, match="cannot be reached"):
        base_config("Qwen/Qwen2.5-72B")
    with pytest.raises(RetrofitError, match=r"did you mean 'Qwen2.5-14B'\?"):
        built_in("Qwen2.5-15B")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory": "ahn-gnd"}, "did you mean 'ahn-gdn'"),
        ({"length": 0}, "1 or more"),
        ({"length": 2**61}, "give a whole number, 2147483647 at most"),
        ({"dtype": "int8"}, "'int8' is not one of"),
        ({"layers": [99]}, "is not a layer of this base"),
        ({"slots": 2}, "has no option 'slots'"),
    ],
)
def test_mistakes(change: dict[str, Any], said: str) -> None:
    with pytest.raises(RetrofitError, match=said):
        estimate(**{"base": "Qwen2.5-3B", "memory": "ahn-gdn", "window": 8, "sinks": 2, "length": 64, **change})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
def test_a_text_shorter_than_the_sinks_sees_itself(kind: str) -> None:
    """Nothing was evicted, so no memory has a block or a row yet."""
    memory = layer_memories(built_in("Qwen2.5-3B"), MemoryConfig(kind, 8, 128))[0]
    assert memory.seen_keys(20).tolist() == list(range(1, 21))

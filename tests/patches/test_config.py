"""The memory's configuration: JSON round trip, and a sentence that says what to do for everything it refuses."""

import json
from dataclasses import fields
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config

from patches.config import MemoryConfig, check_base, check_window
from patches.errors import RetrofitError, nearest
from patches.kinds import KINDS, find_kind, new_memory

GOOD: dict[str, Any] = {"kind": "ahn-gdn", "window": 8, "sinks": 2}


def test_json_round_trip() -> None:
    config = MemoryConfig("ahn-dn", 8, 2, [1, 0, 1], "window", {}, "user/base", "abc", "bfloat16")
    assert config.layers == [0, 1]
    assert "by_layer" not in config.to_dict()  # files of models whose layers are alike stay as they were
    assert MemoryConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_what_single_layers_have_otherwise() -> None:
    base = LlamaConfig(num_hidden_layers=6)
    by_layer = {0: {"window": 3}, "2-3": {"window": 20, "rows": 5}}
    config = MemoryConfig("expected", 8, 2, options={"rows": 9, "bits": 8}, by_layer=by_layer)
    assert MemoryConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    each = config.of_layers(base)
    assert [one and one.window for one in each] == [3, 8, 20, 20, 8, 8]
    assert [one and one.options for one in each] == [{"rows": rows, "bits": 8} for rows in (9, 9, 5, 5, 9, 9)]
    assert [one and (one.kind, one.window) for one in config.window_only().of_layers(base)][2] == ("none", 20)
    assert [one and one.window for one in config.window_only(7).of_layers(base)] == [7] * 6


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"by_layer": {"6": {"window": 3}}}, r"6 is not a layer of this base \(0 to 5\)"),
        ({"by_layer": {"1": {"window": 3}}, "layers": [0]}, "layer 1 keeps the base's own attention"),
        ({"by_layer": {"1": {"x": 3}}, "layers": [0], "others": "window"}, "layer 1 has no memory: give it a window"),
    ],
)
def test_layers_that_cannot_be_otherwise(more: dict[str, Any], says: str) -> None:
    with pytest.raises(RetrofitError, match=says):
        check_base(LlamaConfig(num_hidden_layers=6), MemoryConfig(**GOOD, **more))


def test_the_widest_window_must_fit_a_native_one() -> None:
    config = LlamaConfig(num_hidden_layers=2)
    config.sliding_window = 10
    with pytest.raises(RetrofitError, match=r"choose window \+ sinks <= 10 \(now 9 \+ 2\)"):
        check_base(config, MemoryConfig(**{**GOOD, "by_layer": {"1": {"window": 9}}}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"by_layer": [1]}, "write it as"),
        ({"by_layer": {"a": {"window": 3}}}, "is not understood: write it as"),
        ({"by_layer": {True: {"window": 3}}}, "is not understood: write it as"),
        ({"by_layer": {"5-3": {"window": 3}}}, "is not understood: write it as"),
        ({"by_layer": {"0": 3}}, "is not understood: write it as"),
        ({"by_layer": {"0": {1: 3}}}, "is not understood: write it as"),
        ({"by_layer": {"0-2": {}, "2": {"window": 3}}}, "layer 2 is named twice"),
        ({"by_layer": {0: {"window": 3}, "0": {"window": 4}}}, "layer 0 is named twice"),
        ({"window": 2**31}, "window=2147483648: give a whole number, 2147483647 at most"),
        ({"sinks": 2**70}, "give a whole number, 2147483647 at most"),
        ({"by_layer": {"0": {"window": 0}}}, "1 or more"),
        ({"window": 0}, "1 or more"),
        ({"window": -3}, "1 or more"),
        ({"window": 8.0}, "whole number"),
        ({"window": "8"}, "whole number"),
        ({"window": True}, "whole number"),
        ({"window": None}, "whole number"),
        ({"sinks": -1}, "0 or more"),
        ({"sinks": 1.5}, "whole number"),
        ({"sinks": None}, "whole number"),
        ({"others": "nothing"}, "one of full, window"),
        ({"others": []}, "one of full, window"),
        ({"layers": 1}, "give a list of layer indices"),
        ({"layers": "01"}, "give a list of layer indices"),
        ({"layers": ["a"]}, "give a list of layer indices"),
        ({"layers": [[0]]}, "give a list of layer indices"),
        ({"layers": [True]}, "give a list of layer indices"),
        ({"layers": []}, "leave it out for all of them"),
        ({"kind": 3}, "needs a name as its kind"),
        ({"options": [1]}, "a mapping as its options"),
        ({"options": None}, "a mapping as its options"),
        ({"rotary_dtype": "int8"}, "one of float16"),
        ({"windw": 3}, r"did you mean 'window'\?"),
    ],
)
def test_what_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(RetrofitError, match=says):
        MemoryConfig.from_dict({**GOOD, **change})


@pytest.mark.parametrize("missing", ["kind", "window"])
def test_what_must_be_there(missing: str) -> None:
    with pytest.raises(RetrofitError, match=f"has no '{missing}'"):
        MemoryConfig.from_dict({key: value for key, value in GOOD.items() if key != missing})


@pytest.mark.parametrize("data", [None, [], "ahn-gdn", 3])
def test_what_is_no_mapping(data: Any) -> None:
    with pytest.raises(RetrofitError, match="must be a mapping"):
        MemoryConfig.from_dict(data)


@pytest.mark.parametrize("layers", [[2], [0, -1], [99]])
def test_layers_that_the_model_has_not(layers: list[int]) -> None:
    with pytest.raises(RetrofitError, match=r"not a layer of this base \(0 to 1\)"):
        MemoryConfig(**GOOD, layers=layers).patched_layers(LlamaConfig(num_hidden_layers=2))
    assert MemoryConfig(**GOOD).patched_layers(LlamaConfig(num_hidden_layers=2)) == [0, 1]


def test_layers_that_slide_beside_others_keep_their_window() -> None:
    config = Qwen2Config(num_hidden_layers=3, use_sliding_window=True, sliding_window=4, max_window_layers=2)
    assert config.layer_types == ["full_attention", "full_attention", "sliding_attention"]
    each = (
        MemoryConfig("joint", 8).of_layers(config),
        MemoryConfig("joint", 8, layers=[0], others="window").of_layers(config),
    )
    assert [[one and one.kind for one in layers] for layers in each] == [
        ["joint", "joint", None],
        ["joint", "none", None],
    ]
    check_base(config, MemoryConfig("joint", 8))
    with pytest.raises(RetrofitError, match="layer 2 of this base has a window of its own and keeps it"):
        check_base(config, MemoryConfig("joint", 8, layers=[0, 2]))


def test_the_nearest_name_is_suggested() -> None:
    with pytest.raises(RetrofitError, match=r"one of .*ahn-dn.*did you mean 'ahn-gdn'\?"):
        find_kind("ahn-gnd")
    with pytest.raises(RetrofitError, match="memory: 'xyzzy' is not one of"):
        find_kind("xyzzy")
    assert nearest("windw", ["window", "sinks"]) == " (did you mean 'window'?)"
    assert nearest("xyzzy", ["window"]) == ""


NUMBERS = [
    (kind, field.name)
    for kind, cls in KINDS.items()
    for field in fields(cls.Options)
    if "int" in str(field.type) and "bool" not in str(field.type)
]


@pytest.mark.parametrize(("kind", "name"), NUMBERS)
def test_a_whole_number_that_torch_cannot_count_to_is_refused(kind: str, name: str) -> None:
    for value in (2**31, 2**61, 2**70):
        with pytest.raises(RetrofitError, match=f"^{name}={value}: "):
            new_memory(kind, 8, 2, options={name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_options_that_a_kind_has_not(kind: str) -> None:
    with pytest.raises(RetrofitError, match=f"memory '{kind}' has no option 'no_such_option'.*option"):
        KINDS[kind].read_options({"no_such_option": 1})
    KINDS[kind].read_options({})


def test_a_native_window_must_hold_ours() -> None:
    config = LlamaConfig()
    config.sliding_window = 10
    check_base(config, MemoryConfig("none", 8, 2))
    with pytest.raises(RetrofitError, match=r"choose window \+ sinks <= 10"):
        check_base(config, MemoryConfig("none", 9, 2))


def test_windows_are_checked_everywhere_alike() -> None:
    check_window(1, 0)
    for window, sinks in ((0, 0), (1, -1)):
        with pytest.raises(RetrofitError):
            check_window(window, sinks)

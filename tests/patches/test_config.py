"""The memory's configuration: JSON round trip, and a sentence that says what to do for everything it refuses."""

import json
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config

from patches.config import MemoryConfig, check_base, check_window
from patches.errors import RetrofitError, nearest
from patches.kinds import KINDS, find_kind

GOOD: dict[str, Any] = {"kind": "ahn-gdn", "window": 8, "sinks": 2}


def test_json_round_trip() -> None:
    config = MemoryConfig("ahn-dn", 8, 2, [1, 0, 1], "window", {}, "user/base", "abc", "bfloat16")
    assert config.layers == [0, 1]
    assert MemoryConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("change", "says"),
    [
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
    assert MemoryConfig("joint", 8).layer_kinds(config) == ["joint", "joint", None]
    assert MemoryConfig("joint", 8, layers=[0], others="window").layer_kinds(config) == ["joint", "none", None]
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

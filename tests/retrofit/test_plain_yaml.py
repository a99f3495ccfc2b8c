"""Plain values as YAML 1.2 means them, in recipes and on the command line; what is written is read as it was."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distill.config import load_recipe
from patches.errors import RetrofitError
from retrofit.options import pairs
from retrofit.plain_yaml import dump_yaml, parse_yaml

VALUES: dict[str, Any] = {
    "010": 10,
    "-07": -7,
    "08": 8,
    "0o10": 8,
    "0x1f": 31,
    "+12": 12,
    "1e-2": 0.01,
    "1.e3": 1000.0,
    ".5e3": 500.0,
    "-.5": -0.5,
    "01.5": 1.5,
    "1E+03": 1000.0,
    ".inf": math.inf,
    "-.INF": -math.inf,
    "true": True,
    "FALSE": False,
    "~": None,
    "": None,
    "Null": None,
}
TEXTS = [
    *(
        "1:04",
        "190:20:30",
        "1:04.5",
        "1_000",
        "1_0.5",
        "0b1",
        "-0x1",
        "+0o7",
        "0o8",
        "0x",
        "1e",
        ".",
        "-",
        "e5",
        "1.2.3",
    ),
    *("yes", "Yes", "no", "NO", "on", "Off", "y", "n", "tRUE", "nUll", "inf", "nan", "infinity", "=", "2001-01-01"),
]


@pytest.mark.parametrize(("text", "value"), VALUES.items(), ids=repr)
def test_numbers_and_truth_values(text: str, value: Any) -> None:
    for found in (
        parse_yaml(text, "here"),
        parse_yaml(f"a: [{text or '~'}]", "here")["a"][0],
        pairs("-", [f"a={text}"])["a"],
    ):
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize("text", TEXTS)
def test_everything_else_is_text(text: str) -> None:
    assert parse_yaml(f"a: {text}" if text != "-" else "a: '-'", "here")["a"] == text
    assert text == "-" or pairs("--set", [f"a={text}"])["a"] == text


@pytest.mark.parametrize("key", ["max_steps", "max_length", "learning_rate", "packing", "patience", "layers"])
@pytest.mark.parametrize("text", ["1:04", "1_000", "0b1", "yes", "off", "2001-01-01"])
def test_a_key_that_wants_another_value_refuses_it(key: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"{key}: {text}\n")
    with pytest.raises(RetrofitError, match=f"{key}: '{text}' is not "):
        load_recipe(tmp_path / "r.yaml")


def test_not_a_number_is_read_as_one() -> None:
    assert math.isnan(parse_yaml(".NaN", "here"))


@pytest.mark.parametrize("text", [*VALUES, *TEXTS])
def test_texts_that_look_like_values_are_quoted(text: str) -> None:
    """Also for a reader of YAML 1.1."""
    written = dump_yaml({"data": text})
    assert parse_yaml(written, "here") == {"data": text}
    assert yaml.safe_load(written) == {"data": text}


@given(st.one_of(st.integers(1 - 2**63, 2**63 - 1), st.floats(allow_nan=False), st.text(), st.booleans(), st.none()))
def test_what_is_written_is_read_as_it_was(value: Any) -> None:
    assert parse_yaml(dump_yaml([value]), "here") == [value]

"""Settings: one declaration serves recipes, flags, the trainer's arguments and the docs."""

import json
from pathlib import Path

import pytest

from distill.recipe import DistillKeys
from patches.errors import RetrofitError
from retrofit.evaluation.settings import Settings
from retrofit.settings import Setting, settings

KEYS = settings(DistillKeys)
NUMBERS = {
    f"{of.__name__}.{name}": key
    for of in (DistillKeys, Settings)
    for name, key in settings(of).items()
    if {key.kind, key.kind is tuple and key.item} & {int, float}
}


@pytest.mark.parametrize("name", KEYS)
def test_a_key_takes_its_default_and_says_what_it_is(name: str) -> None:
    key = KEYS[name]
    assert key.check(key.default) == key.default
    assert key.help.endswith(".")
    text = key.default if key.kind is str and key.default is not None else json.dumps(key.default)
    assert key.parse(text) == key.default


@pytest.mark.parametrize("key", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("text", ["1" + "0" * 30, "1e300", "-1e300", ".inf", "-.inf", ".nan", "-2", "true", "many"])
def test_no_number_is_without_limits(key: Setting, text: str) -> None:
    with pytest.raises(RetrofitError):
        key.parse(f"[{text}]" if key.kind is tuple else text)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("layers", "[0, 2]", [0, 2]),
        ("learning_rate", "1e-3", 1e-3),
        ("max_steps", "7", 7),
        ("base", "none", None),
        ("warmup_steps", "2", 2),
        ("report_to", "[wandb, trackio]", ["wandb", "trackio"]),
    ],
)
def test_flags_are_parsed(name: str, text: str, value: object) -> None:
    found = KEYS[name].parse(text)
    assert (found, type(found)) == (value, type(value))


def test_the_docs_hold_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "distillation.md"
    lines = ["| key | values | default | |", "|---|---|---|---|"]
    for key in KEYS.values():
        values = ", ".join(f"`{choice}`" for choice in key.choices) or key.range or key.words
        lines.append(f"| `{key.name}` | {values} | `{json.dumps(key.default)}` | {key.help} |")
    assert "\n".join(lines) in page.read_text(encoding="utf-8")

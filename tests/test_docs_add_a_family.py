"""docs/add-a-family.md shows the last family's file, entry and test as they are."""

import re

from tests.pages import NAMED, ROOT, blocks, text_of

SHOWN = ("patches/smollm3.py", "retrofit/families.py", "tests/conftest.py")


def test_the_blocks_are_what_there_is() -> None:
    for name, block in zip(SHOWN, blocks("docs/add-a-family.md", "python"), strict=True):
        assert block in (ROOT / name).read_text(encoding="utf-8"), name


def test_the_page_names_what_there_is() -> None:
    named = set(re.findall(r"`((?:patches|tests|retrofit)/[\w/.-]+\.\w+)`", text_of("docs/add-a-family.md")))
    assert len(named) > 5
    assert {name for name in named if not (ROOT / name).is_file()} == set()
    assert NAMED["docs/add-a-family.md"].is_file()

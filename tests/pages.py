"""README and docs as tests read them: fenced blocks, commands, links, headings."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import ROOT

PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAMED = {page.relative_to(ROOT).as_posix(): page for page in PAGES}


@dataclass(frozen=True)
class Command:
    """A line of a shell block, or of an indented one; ``words`` without the comment."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)


def text_of(page: str) -> str:
    return NAMED[page].read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page (``"docs/hub.md"``) in one language, in order."""
    return [block for found, block in FENCE.findall(text_of(page)) if found == language]


def commands(page: str) -> list[Command]:
    """Every command of a page's shell blocks and indented lines."""
    fenced = [line for block in blocks(page, "sh") for line in block.splitlines()]
    indented = re.findall(r"^    (retrofit .*)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return [Command(page, line) for line in (*fenced, *indented) if line.strip() and not line.startswith("#")]


def mentioned(page: str) -> list[list[str]]:
    """Commands named in running text, as words: ``retrofit bench run``."""
    prose = re.sub(r"\s+", " ", FENCE.sub("", text_of(page)))
    return [shlex.split(text) for text in re.findall(r"`(retrofit [^`]+)`", prose)]


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """Where the links of a page lead, those to other sites left out."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    found = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|srcset|href)="([^"]+)"', prose)
    return [link for link in found if not re.match(r"[a-z]+:", link)]

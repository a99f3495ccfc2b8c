"""Writing files: whole or not at all, and nothing of a user's is lost by accident."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from patches.errors import RetrofitError
from retrofit.files import check_file, check_output, write_folder, write_json, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".retrofit")


def fail(target: Path, error: type[BaseException]) -> None:
    """Break off while a folder is being written."""
    with write_folder(target, overwrite=True) as draft:
        (draft / "new").write_text("new")
        raise error


def test_a_new_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "down" / "out"
    with write_folder(target) as draft:
        (draft / "a").write_text("1")
        assert not target.exists()
    assert names(target) == ["a"]
    assert names(target.parent) == ["out"], "something temporary was left"
    assert target.stat().st_mode & 0o777 == 0o755


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            fail(target, error)
    assert names(tmp_path) == []


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with write_folder(target) as draft:
        (draft / "old").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        fail(target, KeyboardInterrupt)
    assert (target / "old").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_overwriting_is_asked_for_and_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    with write_folder(target) as draft:  # empty: nothing to lose
        (draft / "old").write_text("old")
    with pytest.raises(RetrofitError, match=r"already holds something.*--overwrite"), write_folder(target):
        pass
    with write_folder(target, overwrite=True) as draft:
        (draft / "new").write_text("new")
    assert names(target) == ["new"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("stranger", ["thesis.txt", "new/thesis.txt", "link"])
@pytest.mark.parametrize("ours", [False, True], ids=["a folder of theirs", "a file of theirs in ours"])
def test_only_what_was_written_here_is_replaced(stranger: str, ours: bool, tmp_path: Path) -> None:
    target = tmp_path / "out"
    if ours:
        with write_folder(target) as draft, write_folder(draft / "new") as inner:
            (inner / "a").write_text("1")
        with write_folder(target, overwrite=True) as draft:
            shutil.copytree(target, draft, dirs_exist_ok=True)
    (target / stranger).parent.mkdir(parents=True, exist_ok=True)
    if stranger == "link":
        (target / stranger).symlink_to(tmp_path)
    else:
        (target / stranger).write_text("mine")
    before = sorted(target.rglob("*"))
    with pytest.raises(RetrofitError, match=rf"holds {stranger}, which Retrofit did not write"):
        fail(target, AssertionError)
    assert sorted(target.rglob("*")) == before
    assert names(tmp_path) == ["out"]


WRITER = """
import os, signal, sys
from retrofit.files import write_folder
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup would have it ignore
with write_folder(sys.argv[1], overwrite=True) as draft:
    (draft / "a").write_text("half")
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGKILL", -9)])
def test_whoever_is_killed_leaves_nothing_for_long(number: str, status: int, tmp_path: Path) -> None:
    mine = tmp_path / ".out.mine"
    mine.mkdir()
    done = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path / "out"), number])
    assert done.returncode == status
    assert len(names(tmp_path)) == (3 if number == "SIGKILL" else 1), "what was half written stayed"
    with write_folder(tmp_path / "out"):
        pass
    assert names(tmp_path) == [".out.mine", "out"]


def test_what_was_there_outlives_who_was_killed_while_replacing_it(tmp_path: Path) -> None:
    target, left = tmp_path / "out", tmp_path / ".out.abcd_123.retrofit"
    with write_folder(target) as draft:
        (draft / "a").write_text("whole")
    left.mkdir()
    target.rename(left / "replaced")
    with pytest.raises(KeyboardInterrupt):
        fail(target, KeyboardInterrupt)
    assert (target / "a").read_text() == "whole"
    assert names(tmp_path) == ["out"]


def test_a_link_is_followed_and_kept(tmp_path: Path) -> None:
    real, link = tmp_path / "big-disk", tmp_path / "out"
    real.mkdir()
    link.symlink_to(real)
    with write_folder(link) as draft:
        (draft / "a").write_text("1")
    assert link.is_symlink()
    assert names(real) == ["a"]


def test_places_where_no_folder_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "out", tmp_path / "file" / "a" / "b"):
        with pytest.raises(RetrofitError, match="file is a file, not a folder: choose another output folder"):
            check_output(place)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    for place in (".", empty, "../empty", ".."):
        with pytest.raises(RetrofitError, match=r"current folder.*choose a folder inside it"):
            check_output(place)
    assert check_output("out") == Path("out")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    with pytest.raises(RetrofitError, match="mount point"):
        check_output("disk", overwrite=True)


def test_an_output_that_holds_an_input(tmp_path: Path) -> None:
    base = tmp_path / "runs" / "base"
    base.mkdir(parents=True)
    for place in (base, base.parent):
        with pytest.raises(RetrofitError, match=r"base, which is an input: choose another output folder"):
            check_output(place, overwrite=True, inputs=[base])
    check_output(base / "out", inputs=[base, "user/hub-id", tmp_path / "not-there"])
    check_output(tmp_path / "runs" / "other", inputs=[base])


def test_an_input_behind_a_link(tmp_path: Path) -> None:
    """A link in the output itself is no file of ours, so the folder is not replaced."""
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "text.txt").write_text("one")
    (tmp_path / "link").symlink_to(tmp_path / "far")
    for read in ("link", "link/text.txt"):
        with pytest.raises(RetrofitError, match="which is an input: choose another output folder"):
            check_output(tmp_path / "far", overwrite=True, inputs=[tmp_path / read])
    (tmp_path / "hard").mkdir()
    os.link(tmp_path / "far" / "text.txt", tmp_path / "hard" / "text.txt")
    check_output(tmp_path / "hard", overwrite=True, data=[tmp_path / "far" / "text.txt"])  # its other name stays


def test_an_output_inside_the_data(tmp_path: Path) -> None:
    """What a run writes would be read as data by the next one, or by this one while it streams."""
    data = tmp_path / "corpus"
    data.mkdir()
    for place in (data, data / "out", data / "deep" / "out"):
        with pytest.raises(RetrofitError, match=r"corpus, which is an input: choose another output folder"):
            check_output(place, overwrite=True, data=[data])
    (data / "text.txt").write_text("one")
    check_output(tmp_path / "out", data=[data, data / "text.txt", "user/hub-id"])


@pytest.mark.parametrize("check", [check_output, check_file])
def test_places_that_cannot_be_written(check: Callable[[Path], object], tmp_path: Path) -> None:
    for name, target in (("loop", "loop"), ("here", "there"), ("there", "here")):
        (tmp_path / name).symlink_to(tmp_path / target)
    (tmp_path / "file").write_text("")
    refused = [tmp_path / "loop", tmp_path / "loop" / "out", tmp_path / "here", tmp_path / ("x" * 300), Path("a\0b")]
    for place in [*refused, Path("/proc/nothing/out"), tmp_path / "file" / "out"]:
        with pytest.raises(RetrofitError, match="choose another"):
            check(place)
    assert names(tmp_path) == ["file", "here", "loop", "there"]
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    check(tmp_path / "dangling")


def test_a_file_that_would_replace_an_input(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(base)
    for place in (base / "config.json", tmp_path / "link" / "config.json"):
        for read in (base, base / "config.json"):
            with pytest.raises(RetrofitError, match=r"which is an input: choose another file"):
                check_file(place, inputs=[read])
    with pytest.raises(RetrofitError, match="is a folder"):
        check_file(base)
    check_file(base / "new.json", inputs=[base, "user/hub-id"])
    check_file(tmp_path / "deep" / "new.json", inputs=[base])
    assert names(tmp_path) == ["base", "link"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_what_is_written_is_as_readable_as_any_file(mask: int, tmp_path: Path) -> None:
    """Weights too: safetensors writes them for their owner alone."""
    before = os.umask(mask)
    try:
        with write_folder(tmp_path / "out") as draft:
            save_file({"a": torch.ones(1)}, draft / "a.safetensors")
            (draft / "inside").mkdir()
            save_file({"a": torch.ones(1)}, draft / "inside" / "b.safetensors")
        write_text(tmp_path / "text", "one")
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path


def test_text_and_json_are_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "deep" / "file.json"
    write_json(file, {"a": [1, 2.5, "\u00e4"]})
    assert json.loads(file.read_text(encoding="utf-8")) == {"a": [1, 2.5, "\u00e4"]}
    before = file.read_text()
    with pytest.raises(ValueError, match="JSON"):
        write_json(file, {"a": float("nan")})

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_text(file, "half")
    assert file.read_text() == before
    assert names(file.parent) == ["file.json"]
    assert file.stat().st_mode & 0o777 == 0o644

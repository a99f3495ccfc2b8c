"""What people and scripts do to the command and to the functions by mistake: one sentence, soon, and nothing left."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import retrofit
from distill.config import DistillConfig
from patches.errors import RetrofitError
from retrofit.files import write_folder, write_text
from retrofit.loading import load_base, load_config
from retrofit.plain_yaml import parse_yaml
from tests.helpers import ROOT, tokens
from tests.test_cli import refused, run

MakeBase = Callable[..., PreTrainedModel]
SURROGATE = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize(
    "line",
    [
        ["generate", "base", "--prompt", SURROGATE],
        ["patch", SURROGATE, "-o", "out"],
        ["patch", "base", "-o", SURROGATE],
        ["distill", "base", "--data", SURROGATE],
        ["distill", "base", "--option", f"{SURROGATE}=1"],
        ["recipes", "show", SURROGATE],
        [SURROGATE],
    ],
    ids=ascii,
)
def test_arguments_that_are_not_utf8(line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(run(*line), r"caf\udce9", "is not UTF-8")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line", [["patch", "base", "-o", ""], ["eval", "base", "--output", ""], ["estimate", "base", "--json", ""]], ids=str
)
def test_an_output_without_a_name(line: list[str]) -> None:
    refused(run(*line), f"{line[2]} is empty")


@pytest.mark.parametrize("folder", ["here", "gone"])
def test_where_nothing_can_be_printed_and_where_nobody_is(folder: str, tmp_path: Path) -> None:
    """A full device as standard output; a current folder that was removed."""
    place = tmp_path / folder
    place.mkdir()
    code = "import os, sys; sys.argv = ['retrofit', 'recipes', 'ls']; from cli import main; "
    code += "os.rmdir(os.getcwd()); main()" if folder == "gone" else "main()"
    with open(os.devnull if folder == "gone" else "/dev/full", "w") as out:
        where = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], cwd=place, stdout=out, stderr=subprocess.PIPE, env=where)
    says = b"the current folder was removed" if folder == "gone" else b"error: No space left on device"
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: ")
    assert says in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("what", ["fifo", "loop", "typo", "runs/typo"])
def test_a_base_that_is_none_is_not_asked_for_long(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("loop").symlink_to("loop")
    asked = []

    def no_network(url: str, **_: Any) -> None:
        asked.append(url)
        raise ConnectionError("no network here")

    monkeypatch.setattr("retrofit.loading.get_hf_file_metadata", no_network)
    monkeypatch.setattr("retrofit.loading.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("asked again"))
    for load in (load_config, load_base):
        with pytest.raises(RetrofitError, match=rf"^(there is no folder '{what}'|{what} is a )"):
            load(what)
    assert len(asked) == 2 * (what == "runs/typo")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_a_number_that_is_none(value: float, make_base: MakeBase) -> None:
    wanted = "a smaller number" if value == 1e300 else "a finite number"
    with pytest.raises(RetrofitError, match=f"give {wanted}"):
        retrofit.patch(make_base("Qwen2"), "expected", window=8, recency=value)


@pytest.mark.parametrize("full", ["folder", "file"])
def test_an_error_names_what_was_asked_for(full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"

    def no_room(*_: Any, **how: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", how.get("dir") and f"{how['dir']}/.out.abc")

    def write() -> None:
        if full == "folder":
            with write_folder(target) as draft:
                (draft / "none" / "weights").write_text("")
        else:
            monkeypatch.setattr("retrofit.files.tempfile.mkstemp", no_room)
            write_text(target, "")

    with pytest.raises(OSError, match=r"No (space|such)") as caught:
        write()
    assert str(caught.value.filename) == str(target / "none" / "weights" if full == "folder" else target)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ("a text", "token ids .* not a str"),
        (["a", "b"], "token ids .* not a str"),
        (None, "needs texts"),
        ([], "needs texts"),
        (tokens(1, 40), "token ids"),
        ([tokens(1, 40).float()], "torch.float32"),
        ([torch.empty(1, 0, dtype=torch.long)], "token ids"),
        ([tokens(1, 40) + 101], "embeddings for ids 0 to 100"),
        ([tokens(1, 40) - 200], "embeddings for ids 0 to 100"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["expected", "joint"])
def test_calibrating_on_what_is_no_text(kind: str, texts: Any, says: str, make_base: MakeBase) -> None:
    model = retrofit.patch(make_base("Qwen2"), kind, window=8)
    with pytest.raises(RetrofitError, match=says):
        retrofit.calibrate(model, texts)


def test_calibrating_what_has_no_memory(make_base: MakeBase) -> None:
    for model in (make_base("Qwen2"), None, "base"):
        with pytest.raises(RetrofitError, match="has no memory to calibrate"):
            retrofit.calibrate(model, [tokens(1, 40)])


@pytest.mark.parametrize("kind", ["ahn-gdn", "joint"])
def test_a_model_that_was_patched_in_inference_mode_can_learn(kind: str, make_base: MakeBase) -> None:
    base = make_base("Llama")
    with torch.inference_mode():
        model = retrofit.patch(base, kind, window=8)
    model(tokens(1, 20), labels=tokens(1, 20)).loss.backward()
    assert all(parameter.grad is not None for _, parameter in model.memory_parameters())


def test_a_key_that_is_misspelt() -> None:
    """One sentence with what was meant, without all the keys that there are, and without a file that there is not."""
    with pytest.raises(RetrofitError, match=r"^unknown key 'widow' \(did you mean 'window'\?\)$"):
        DistillConfig.from_dict({"widow": 3}, "")
    with pytest.raises(RetrofitError, match=r"^unknown key 'xyzzy': `retrofit distill --help`"):
        DistillConfig.from_dict({"xyzzy": 3}, "")
    assert "error: window: 0 is out of range" in run("distill", "base", "--window", 0).stderr
    with pytest.raises(RetrofitError, match=r"^my.yaml: not a YAML file: .* in line 2$"):
        parse_yaml("a: 1\nb: [", "my.yaml")


def test_a_file_that_is_a_package_of_ours(tmp_path: Path, byte_checkpoint: Path) -> None:
    """Files of the names of ours in the current folder are nobody's concern."""
    for name in ("cli.py", "retrofit.py", "patches.py"):
        (tmp_path / name).write_text("raise SystemExit('not me')")
    program = shutil.which("retrofit", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("the command is not installed beside this Python")
    done = subprocess.run([program, "recipes", "ls"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

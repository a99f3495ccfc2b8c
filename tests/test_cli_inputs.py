"""Nothing that a command reads is lost by it, and a command that is refused leaves nothing behind."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import retrofit
from distill.parallel.zero import find_config
from patches.errors import RetrofitError
from tests.test_cli import TEXT, refused, run


def files(folder: Path) -> dict[str, bytes]:
    """Everything that lies in ``folder``."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.fixture
def desk(tmp_path: Path, byte_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of somebody who has a base, data, an adapter, a recipe and a DeepSpeed file there.

    Whatever a test does with them, they must be the same afterwards.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copytree(byte_checkpoint, "base")
    Path("corpus").mkdir()
    Path("corpus/text.txt").write_text(TEXT)
    retrofit.save_adapter(retrofit.patch("base", "ahn-gdn", window=8, sinks=2), "run/adapter")
    Path("run/deepspeed.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    Path("run/mine.yaml").write_text(
        "data: corpus/text.txt\nbase: base\nwindow: 8\nsinks: 2\nmax_length: 32\nmax_steps: 1\n"
    )
    Path("run/memory.yaml").write_text("{memory: none, window: 8}")
    before = files(tmp_path)
    yield tmp_path
    assert files(tmp_path) == before


SMALL = ["--window", 8, "--sinks", 2, "--max-length", 32, "--max-steps", 1]


@pytest.mark.parametrize(
    ("command", "read"),
    [
        (["distill", "run/mine.yaml", "-o", "run"], "run/mine.yaml"),
        (["distill", "base", "--data", "corpus/text.txt", "--init-adapter", "run/adapter", "-o", "run"], "run/adapter"),
        (
            ["distill", "base", "--data", "corpus/text.txt", "--deepspeed", "run/deepspeed.json", "-o", "run"],
            "run/deep",
        ),
        (["distill", "base", "--data", "corpus/text.txt", "-o", "corpus"], "corpus/text.txt"),
        (["distill", "base", "--data", "corpus", "-o", "corpus/run"], "lies in corpus"),
        (["distill", "base", "--data", "corpus", "-o", "corpus"], "is or contains corpus"),
        (["distill", "base", "--data", "run/mine.yaml", "-o", "run"], "run/mine.yaml"),
        (["distill", "base", "--data", "corpus/text.txt", "-o", "out", "--json", "corpus/text.txt"], "corpus/text.txt"),
        (["distill", "run/mine.yaml", "-o", "out", "--json", "corpus/text.txt"], "corpus/text.txt"),
        (["distill", "run/mine.yaml", "-o", "out", "--json", "run/mine.yaml"], "run/mine.yaml"),
        (["distill", "run/mine.yaml", "--dry-run", "--json", "base/config.json"], "base/config.json"),
        (["estimate", "base", "--json", "base/config.json"], "base/config.json"),
        (["bench", "run", "--model", "base", "--json", "base/config.json"], "base/config.json"),
        (["patch", "base", "--recipe", "run/memory.yaml", "-o", "run"], "run/memory.yaml"),
        (["recipes", "cp", "run/mine.yaml", "run/mine.yaml", "--overwrite"], "run/mine.yaml"),
        (["eval", "base", "--data", "corpus", "--window", 8, "-o", "corpus/eval"], "lies in corpus"),
        (["patch", "base", "-o", "base/../base"], "base"),
        (["merge", "base", "run/adapter", "-o", "run"], "run/adapter"),
        (["convert", "base", "run/adapter", "-o", "run"], "run/adapter"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_is_read_is_never_replaced(command: list[object], read: str, desk: Path) -> None:
    verb = command[0]
    more = [
        *(SMALL if verb == "distill" else []),
        *(["--overwrite"] if verb not in ("estimate", "bench", "recipes") else []),
    ]
    refused(run(*command, *more), "an input", read)


def test_what_is_read_at_home_is_never_replaced(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data and DeepSpeed's file may be given with a ~, which the shell leaves alone in --data=~/corpus."""
    monkeypatch.setenv("HOME", str(desk))
    start = ["distill", "run/mine.yaml", *SMALL, "--overwrite"]
    refused(run(*start, "--data=~/corpus", "-o", "corpus"), "an input", "corpus")
    refused(run(*start, "--data=~/corpus", "-o", "corpus/run"), "an input", "corpus")
    start = ["distill", "base", "--data", "corpus", *SMALL, "--overwrite"]
    refused(run(*start, "--deepspeed=~/run/deepspeed.json", "-o", "run"), "an input", "deepspeed.json")
    with pytest.raises(RetrofitError, match=r"there is no file ~nobody-here/x\.json"):
        find_config("~nobody-here/x.json")  # the verb starts a process of its own, which asks this
    refused(run("distill", "base", "--data=~nobody-here/x.txt", *SMALL, "-o", "out"), "no file or folder")
    refused(run(*start, "--data=~/corpus/text.txt", "-o", "out", "--json", "corpus/text.txt"), "an input", "text.txt")


@pytest.mark.parametrize("place", ["loop", "base/config.json/out", "/proc/nothing/out", "x" * 300])
@pytest.mark.parametrize("verb", ["distill", "patch", "merge", "eval", "demo"])
def test_an_output_that_cannot_be_written(verb: str, place: str, desk: Path) -> None:
    Path("loop").symlink_to("loop")
    commands: dict[str, list[object]] = {
        "distill": ["run/mine.yaml"],
        "patch": ["base"],
        "merge": ["base", "run/adapter"],
        "eval": ["base", "--window", 8, "--probe", "identity"],
        "demo": [],
    }
    refused(run(verb, *commands[verb], "-o", place), "choose another")
    Path("loop").unlink()


@pytest.mark.parametrize(
    "command",
    [
        ["demo"],
        ["distill", "run/mine.yaml", "-o", "out"],
        ["estimate", "base", "--window", 8],
        ["doctor"],
        ["bench", "run", "--length", 8],
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_a_json_file_that_cannot_be_written_is_said_first(command: list[str], desk: Path) -> None:
    said = run(*command, "--json", "base/config.json/rows.json")
    refused(said, "config.json is a file, not a folder")
    assert not said.stdout


def test_a_start_that_is_refused_late_leaves_nothing(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the trainer, when the base is loaded and patched: the same command with one value changed has to work."""

    def refuse(*_: object, **__: object) -> None:
        raise RetrofitError("not like that: do it otherwise")

    for where in ("distill.trainer.DistillTrainer.__init__", "distill.trainer.DistillTrainer.create_optimizer"):
        with monkeypatch.context() as patched:
            patched.setattr(where, refuse)
            refused(run("distill", "run/mine.yaml", "-o", "deep/down/out"), "not like that")
        assert not Path("deep").exists()
    assert run("distill", "run/mine.yaml", "-o", "out").exit_code == 0
    before = files(Path("out"))
    with monkeypatch.context() as patched:
        patched.setattr("distill.trainer.DistillTrainer.create_optimizer", refuse)
        refused(run("distill", "run/mine.yaml", "-o", "out", "--overwrite"), "not like that")
    assert files(Path("out")) == before, "the earlier run was removed, but nothing has taken its place"
    shutil.rmtree("out")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_base_with_a_nan_is_named(value: float, desk: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained("base")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = value
    model.save_pretrained("broken")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"base/{name}", "broken")
    small: list[Any] = ["--window", 8, "-o", "out"]
    for command in (
        ["distill", "broken", "--data", "corpus", *SMALL, "-o", "out"],
        ["patch", "broken", *small],
        ["merge", "broken", "run/adapter", "-o", "out"],
        ["eval", "broken", *small],
        ["generate", "broken", "--prompt", "x"],
    ):
        refused(run(*command), "broken: model.layers.1.mlp.up_proj.weight holds NaN or infinite values")
    assert not Path("out").exists()
    shutil.rmtree("broken")


def test_a_tokenizer_with_more_ids_than_embeddings_is_named(desk: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained("base")
    tokenizer.add_tokens(["<one>", "<two>"])
    shutil.copytree("base", "grown")
    tokenizer.save_pretrained("grown")
    for command in (
        ["distill", "grown", "--data", "corpus", *SMALL, "-o", "out"],
        ["eval", "grown", "--window", 8, "--data", "corpus/text.txt", "-o", "out"],
        ["generate", "grown", "--prompt", "<two>"],
        ["patch", "grown", "--window", 8, "-o", "out"],
        ["merge", "grown", "run/adapter", "-o", "out"],
    ):
        refused(run(*command), "the tokenizer has ids up to", "the base has embeddings for")
    assert not Path("out").exists()
    shutil.rmtree("grown")

"""Never done with somebody else's files: no pickle is read, no code beside weights is run, no token is shown."""

import ast
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import retrofit
from cli import app
from distill.checkpoint import write_checksums
from patches.errors import RetrofitError
from retrofit.loading import load_base, load_config, load_tokenizer
from tests.helpers import ROOT
from tests.hub_server import HubServer

SOURCES = [
    ROOT / "cli.py",
    *(file for part in ("distill", "patches", "retrofit") for file in (ROOT / part).rglob("*.py")),
]
TOKEN = "hf_" + "t" * 34
TEXT = "the quick brown fox jumps over the lazy dog. " * 40


class PickleRead(BaseException):
    """Not an Exception: a loader that catches everything must not catch this."""


class Trojan:
    """Unpickled, it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def calls(file: Path) -> list[tuple[str, ast.Call]]:
    """Every call in a source file, under the name it is called by."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


# ---- pickle ----


def test_no_source_reads_a_pickle() -> None:
    unpicklers = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
    reads = ("torch.load", "np.load", "numpy.load", "read_pickle", "load_state_dict_from_url")
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not unpicklers & {alias.name for alias in node.names}, file
            if isinstance(node, ast.ImportFrom) and node.module in unpicklers:
                assert [alias.name for alias in node.names] == ["UnpicklingError"], file
        assert not [name for name, _ in calls(file) if name.endswith(reads)], file


@pytest.mark.parametrize("place", ["instead of the weights", "in the weights' file", "beside the weights"])
def test_a_pickle_is_never_read(
    place: str, base: Any, copy_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "unpickled"
    planted = {}
    for name in ("base", "adapter", "export", "ahn"):
        planted[name] = folder = copy_of(name)
        (weights,) = folder.glob("*.safetensors")
        if place == "instead of the weights":
            weights.unlink()
        elif place == "in the weights' file":
            weights.unlink()
            torch.save({"a": Trojan(marker)}, weights)
        for file in ("pytorch_model.bin", "adapter_model.bin", "adapter_model.pt", "training_args.bin", "optimizer.pt"):
            torch.save({"a": Trojan(marker)}, folder / file)
        (folder / "model.pkl").write_bytes(pickle.dumps(Trojan(marker)))

    def read(*_: Any, **__: Any) -> None:
        raise PickleRead

    for where in ("torch.load", "torch.serialization.load", "pickle.load", "transformers.modeling_utils.torch.load"):
        monkeypatch.setattr(where, read)
    loads: list[Callable[[], Any]] = [
        lambda: load_base(str(planted["base"])),
        lambda: load_base(str(planted["export"])),
        lambda: retrofit.patch(str(planted["base"]), "none", 8),
        lambda: retrofit.load_adapter(base, planted["adapter"]),
        lambda: retrofit.convert_ahn(base, planted["ahn"], 8, 2),
        lambda: retrofit.push_folder(planted["adapter"], "user/x") if place == "instead of the weights" else None,
    ]
    for load in loads:
        if place == "beside the weights":
            load()
        else:
            try:
                load()
            except RetrofitError:
                continue
            assert place == "in the weights' file"
            assert load is loads[-1]
    assert not marker.exists()


def test_the_trojan_bites(tmp_path: Path) -> None:
    """Read as a pickle it would have shown."""
    torch.save({"a": Trojan(tmp_path / "unpickled")}, tmp_path / "x.bin")
    torch.load(tmp_path / "x.bin", weights_only=False)
    assert (tmp_path / "unpickled").exists()


@pytest.fixture(scope="module")
def finished(byte_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, its checkpoints in it; made with a token in the environment."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    flags = ["--window", 8, "--max-length", 48, "--max-steps", 2, "--save-steps", "1", "--eval-rows", "2"]
    before, os.environ["HF_TOKEN"] = os.environ.get("HF_TOKEN"), TOKEN
    try:
        done = run("distill", byte_checkpoint, "--data", folder / "text.txt", *flags, "-o", folder / "run")
    finally:
        del os.environ["HF_TOKEN"]
        if before is not None:
            os.environ["HF_TOKEN"] = before
    assert done.exit_code == 0, done.output
    (folder / "said.txt").write_text(done.output)
    return folder


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_with_a_trojan_is_not_gone_on_from(file: str, finished: Path, tmp_path: Path) -> None:
    """The Trainer reads these three with ``weights_only``: tensors, numbers and names, no objects."""
    output = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    shutil.rmtree(output / "checkpoint-2")
    torch.save({"a": Trojan(tmp_path / "unpickled")}, output / "checkpoint-1" / file)
    (output / "checkpoint-1" / "checksums.json").unlink()
    write_checksums(output / "checkpoint-1")  # whoever plants one can count it too
    again = run("distill", output / "recipe.yaml", "--resume", "-o", output)
    assert again.exit_code == 2, again.output
    assert "checkpoint-1 holds objects other than tensors" in again.stderr
    assert not (tmp_path / "unpickled").exists()


def test_data_with_a_pickle_or_a_script_in_its_folder(tmp_path: Path, byte_checkpoint: Path) -> None:
    marker = tmp_path / "ran"
    for name, content in {
        "train.pkl": pickle.dumps(Trojan(marker)),
        "data.py": f"open({str(marker)!r}, 'w')".encode(),
    }.items():
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_bytes(content)
        if name.endswith(".py"):
            (folder / f"{folder.name}.py").write_bytes(content)
        done = run("distill", byte_checkpoint, "--data", folder, "-o", tmp_path / "out")
        assert done.exit_code == 2, done.output
        assert "cannot be read: " in done.stderr
    assert not marker.exists()


# ---- code ----


def test_no_source_trusts_remote_code() -> None:
    """But the demo, in its process without this package, with the export that it has just made itself."""
    trusting = []
    for file in SOURCES:
        for name, call in calls(file):
            for keyword in call.keywords:
                distrusted = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "trust_remote_code" and not distrusted:
                    trusting.append((file.relative_to(ROOT).as_posix(), name))
        assert '"trust_remote_code": True' not in file.read_text(encoding="utf-8"), file
    assert trusting == [("distill/demo/reload.py", "AutoModelForCausalLM.from_pretrained")]


@pytest.mark.parametrize("model_type", ["qwen2", "evil", None])
def test_code_beside_weights_is_not_run(
    model_type: str | None, copy_of: Callable[[str], Path], whole: dict[str, Path], tmp_path: Path
) -> None:
    """By any verb that opens a folder: a known family is loaded by its own code, another is refused."""
    folder, marker = copy_of("base"), tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nraise SystemExit")
    tokenizer = ["evil.Tokenizer", "evil.Tokenizer"]
    auto_map = {
        "AutoConfig": "evil.C",
        "AutoModelForCausalLM": "evil.M",
        "AutoModel": "evil.M",
        "AutoTokenizer": tokenizer,
    }
    for name, change in (("config.json", {"auto_map": auto_map}), ("tokenizer_config.json", {"auto_map": auto_map})):
        old = json.loads((folder / name).read_text())
        if name == "config.json":
            old["model_type"] = model_type
            old = {key: value for key, value in old.items() if value is not None}
        (folder / name).write_text(json.dumps({**old, **change}))
    status = 0 if model_type == "qwen2" else 2
    (tmp_path / "text.txt").write_text(TEXT)
    commands = [
        ["patch", folder, "--window", 8, "-o", tmp_path / "patched"],
        ["merge", folder, whole["adapter"], "-o", tmp_path / "merged"],
        ["convert", folder, whole["ahn"], "-o", tmp_path / "converted"],
        ["generate", folder, "--prompt", "a", "--max-new-tokens", 1],
        ["estimate", folder, "--memory", "kvm", "--window", 8, "--length", 64],
        ["eval", folder, "--window", 8, "--probe", "identity", "--samples", 1, "-o", tmp_path / "eval"],
        ["distill", folder, "--data", tmp_path / "text.txt", "--dry-run", "--max-length", 64],
    ]
    for command in commands:
        done = run(*command)
        assert done.exit_code == status, (command, done.output)
    for load in (load_config, load_base, load_tokenizer):
        try:
            load(str(folder))
        except RetrofitError:
            assert model_type != "qwen2"
    assert not marker.exists()


# ---- tokens ----


def test_a_run_with_a_token_in_the_environment_shows_it_nowhere(finished: Path) -> None:
    """DistillConfig, metrics, log, cards, checkpoints, weights, output."""
    files = [file for file in finished.rglob("*") if file.is_file()]
    names = {file.name for file in files}
    assert {"said.txt", "recipe.yaml", "metrics.json", "log.jsonl", "README.md", "trainer_state.json"} <= names
    for file in files:
        assert TOKEN.encode() not in file.read_bytes(), file


def test_push_and_load_show_no_token(
    hub: HubServer, finished: Path, base: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What arrives, what is said, what goes wrong: a refusal that quotes the token included."""
    hub.users[TOKEN] = "user"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("retrofit.hub.WAITS", (0.0,))
    said, pushed = [], []
    for command in (
        ["push", finished / "run" / "adapter", "user/first"],
        ["push", finished / "run" / "model", "user/model", "--private"],
        ["push", finished / "run" / "adapter", "somebody/else"],
        ["push", finished / "run" / "adapter", TOKEN],
        ["merge", finished / "run" / "model", "user/nothing", "-o", finished / "nothing"],
        ["generate", TOKEN, "--prompt", "a"],
    ):
        done = run(*command)
        said.append(done.output + done.stderr)
        pushed.append(done.stdout)
    assert pushed[0].startswith("http"), said[0]
    retrofit.load_adapter(base, "user/first", check_base=False)
    with pytest.raises(RetrofitError) as error:
        retrofit.load_adapter(base, "user/nothing")
    # the last two commands were given the token where a name belongs: only there is it repeated
    shown = "".join([*said[:3], said[4], str(error.value), *capfd.readouterr()])
    assert TOKEN not in shown
    for repo in hub.repos.values():
        for files in repo.commits.values():
            assert not [name for name, data in files.items() if TOKEN.encode() in data]

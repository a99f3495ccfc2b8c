"""The Hub, through its real client against a small server: what arrives, what comes back, what is refused and how."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

import retrofit
from cli import app
from patches.errors import RetrofitError
from retrofit.export import export_model
from retrofit.hub import WAITS
from tests.helpers import ROOT, awake, logits, tokens
from tests.hub_server import HubServer, Repo
from tests.pages import blocks, commands

MakeBase = Callable[..., PreTrainedModel]
IDS = tokens(2, 30)
MINE, READER = "hf_" + "m" * 34, "hf_" + "r" * 34


@pytest.fixture
def hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The Hub with two users, the first of them logged in here."""
    hub.users.update({MINE: "user", READER: "reader"})
    monkeypatch.setenv("HF_TOKEN", MINE)
    monkeypatch.setattr("retrofit.hub.WAITS", tuple(0.0 for _ in WAITS))
    return hub


@pytest.fixture
def model(make_base: MakeBase) -> Any:
    return awake(make_base("Qwen2"), "ahn-gdn")


@pytest.fixture
def adapter(model: Any, tmp_path: Path) -> Path:
    retrofit.save_adapter(model, tmp_path / "run" / "adapter", details="## How it was made\n\nBy hand.")
    return tmp_path / "run" / "adapter"


def test_an_adapter_there_and_back(hub: HubServer, model: Any, adapter: Path, make_base: MakeBase) -> None:
    (adapter / "notes.txt").write_text("not for others")
    before = (adapter / "README.md").read_text()
    address = retrofit.push_folder(adapter, "user/first", message="the first")
    repo = hub.repos["user/first"]
    assert address == f"{hub.endpoint}/user/first/commit/{repo.branches['main']}"
    assert repo.messages[-1] == "the first"
    assert not repo.private
    assert repo.files().keys() == {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert (adapter / "README.md").read_text() == before, "the folder is not ours to change"
    again = retrofit.load_adapter(make_base("Qwen2"), "user/first")
    assert torch.equal(logits(again, IDS), logits(model, IDS))


def test_a_model_there_and_back(hub: HubServer, make_base: MakeBase, tmp_path: Path, byte_tokenizer: Any) -> None:
    model = awake(make_base("Qwen2", vocab_size=len(byte_tokenizer)), "ahn-gdn")
    export_model(model, tmp_path / "model", byte_tokenizer)
    (tmp_path / "model" / "checkpoint-3").mkdir()
    (tmp_path / "model" / "optimizer.pt").write_bytes(b"pickle")
    retrofit.push_folder(tmp_path / "model", "user/model")
    sent = hub.repos["user/model"].files().keys()
    assert {"config.json", "model.safetensors", "tokenizer.json", "qwen2.py", "README.md"} <= sent
    assert "optimizer.pt" not in sent
    again = AutoModelForCausalLM.from_pretrained("user/model")
    assert torch.equal(logits(again, IDS), logits(model, IDS))
    with pytest.raises(RetrofitError, match="has a memory already"):
        retrofit.patch("user/model", "none", 8, 2)


def test_a_tokenizer_that_does_not_fit_is_not_pushed(
    hub: HubServer, model: Any, tmp_path: Path, byte_tokenizer: Any
) -> None:
    export_model(model, tmp_path / "model")
    byte_tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(RetrofitError, match="the tokenizer has ids up to"):
        retrofit.push_folder(tmp_path / "model", "user/model")
    assert not hub.requests


def test_branches(hub: HubServer, model: Any, make_base: MakeBase) -> None:
    retrofit.push_adapter(model, "user/first", revision="v1")
    with torch.no_grad():
        for _, parameter in model.memory_parameters():
            parameter.add_(0.1)
    retrofit.push_adapter(model, "user/first", revision="v1")
    repo = hub.repos["user/first"]
    assert "adapter_config.json" not in repo.files("main")
    newest = retrofit.load_adapter(make_base("Qwen2"), "user/first", revision="v1")
    assert torch.equal(logits(newest, IDS), logits(model, IDS))
    first = next(oid for oid, files in repo.commits.items() if "adapter_config.json" in files)
    earlier = retrofit.load_adapter(make_base("Qwen2"), "user/first", revision=first)
    assert not torch.equal(logits(earlier, IDS), logits(model, IDS))
    with pytest.raises(
        RetrofitError, match="no adapter of that name could be fetched from the Hub: it has no such branch"
    ):
        retrofit.load_adapter(make_base("Qwen2"), "user/first", revision="v2")


def test_a_private_repository(
    hub: HubServer, model: Any, make_base: MakeBase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    retrofit.push_adapter(model, "user/secret", private=True)
    assert hub.repos["user/secret"].private
    for token, says in [
        (READER, "it does not exist, or the token may not see it"),
        ("hf_wrong", "the token is wrong or expired: run `hf auth login` or set HF_TOKEN to a valid one"),
    ]:
        with pytest.raises(RetrofitError, match=says):
            retrofit.load_adapter(make_base("Qwen2"), "user/secret", token=token)
    retrofit.load_adapter(make_base("Qwen2"), "user/secret", token=MINE)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "another-cache"))
    with pytest.raises(RetrofitError, match="is private or does not exist, and there is no token: run `hf auth login`"):
        retrofit.load_adapter(make_base("Qwen2"), "user/secret")


def test_private_is_not_promised_of_a_public_repository(hub: HubServer, adapter: Path) -> None:
    retrofit.push_folder(adapter, "user/first")
    commits = len(hub.repos["user/first"].commits)
    with pytest.raises(RetrofitError, match="user/first exists and is public"):
        retrofit.push_folder(adapter, "user/first", private=True)
    assert len(hub.repos["user/first"].commits) == commits


@pytest.mark.parametrize(
    ("repo", "token", "says"),
    [
        ("user/first", "hf_wrong", "the token is wrong or expired: run `hf auth login` or set HF_TOKEN"),
        ("user/first", READER, "the token may not do that: .* write access"),
        ("user/first/x", MINE, "is not a Hub id: write it as user/name"),
        ("user/first", None, "there is no token: run `hf auth login` or set HF_TOKEN"),
    ],
)
def test_who_may_push(
    hub: HubServer, adapter: Path, repo: str, token: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RetrofitError, match=says) as refusal:
        retrofit.push_folder(adapter, repo, token=token)
    assert not hub.repos
    assert token is None or token not in str(refusal.value)


def test_what_the_hub_says_is_passed_on_without_tokens(hub: HubServer, adapter: Path) -> None:
    hub.fail("/commit/", 400, said=f"you sent {READER} and secret-of-mine")
    hub.users["secret-of-mine"] = "user"
    with pytest.raises(RetrofitError, match=r"refused user/first: .*you sent hf_\*\*\* and hf_\*\*\*"):
        retrofit.push_folder(adapter, "user/first", token="secret-of-mine")


@pytest.mark.parametrize("part", ["/api/repos/create", "/preupload/", "PUT /lfs/", "/commit/"])
def test_a_failure_is_tried_again(
    hub: HubServer, adapter: Path, part: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    hub.fail(part, 503)
    retrofit.push_folder(adapter, "user/first")
    assert "adapter_model.safetensors" in hub.repos["user/first"].files()
    assert sum(part in request for request in hub.requests) == 2
    # the client tries some requests again by itself, and says so in its log
    assert "the Hub answered 503: trying again in" in capfd.readouterr().err or "Retrying in" in caplog.text


def test_it_does_not_try_for_ever(hub: HubServer, adapter: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hub.fail("/commit/", 500, times=10**6)
    with pytest.raises(RetrofitError, match="refused user/first: the Hub answered 500: try again later"):
        retrofit.push_folder(adapter, "user/first")
    assert capfd.readouterr().err.count("trying again") == len(WAITS)


def test_nobody_there(hub: HubServer, adapter: Path, make_base: MakeBase) -> None:
    hub.stop()
    with pytest.raises(RetrofitError, match=r"refused user/first: the Hub cannot be reached \(\w+\): try again"):
        retrofit.push_folder(adapter, "user/first")
    with pytest.raises(
        RetrofitError, match=r"no adapter of that name could be fetched from the Hub: the Hub cannot be reached"
    ):
        retrofit.load_adapter(make_base("Qwen2"), "user/first")


def test_what_is_no_adapter_and_no_model(hub: HubServer, adapter: Path, make_base: MakeBase, tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match=f"neither an adapter nor an exported model: push {adapter}"):
        retrofit.push_folder(adapter.parent, "user/first")
    make_base("Qwen2").save_pretrained(tmp_path / "base")
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / "config.json").write_text("[")
    for folder in (tmp_path / "base", tmp_path / "garbage", tmp_path / "nowhere"):
        with pytest.raises(RetrofitError, match="neither an adapter nor an exported model: give DIR/adapter"):
            retrofit.push_folder(folder, "user/first")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(RetrofitError, match="save the whole adapter again"):
        retrofit.push_folder(adapter, "user/first")
    assert not hub.requests


@pytest.mark.parametrize(("name", "word"), [("README.md", "frozen"), ("adapter_config.json", "CAUSAL_LM")])
def test_a_token_is_not_pushed(hub: HubServer, adapter: Path, name: str, word: str) -> None:
    text = (adapter / name).read_text()
    for token in (READER, MINE):
        (adapter / name).write_text(text.replace(word, token))
        with pytest.raises(RetrofitError, match=f"{name} holds a Hub token") as refusal:
            retrofit.push_folder(adapter, "user/first")
        assert token not in str(refusal.value)
    assert not hub.requests


def test_the_card_is_completed(
    hub: HubServer, make_base: MakeBase, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = make_base("Qwen2")
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: other\nlicense_name: my-own\n---\n# A base\n")
    local = awake(str(tmp_path / "base"), "ahn-gdn")
    retrofit.push_adapter(local, "user/first")
    card = ModelCard(hub.repos["user/first"].files()["README.md"].decode())
    assert (card.data.license, card.data.to_dict()["license_name"]) == ("other", "my-own")
    assert "That of the base: my-own." in card.text
    assert card.text.count('"user/first"') == 2, "load_adapter and PeftModel"
    assert "path/or/repo" not in card.text
    said = f"the card names the base by a folder, {tmp_path / 'base'}: write the Hub id of the base into README.md"
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ("license: mine", r'Invalid metadata in README.md. - "license" must be one of a list'),
        ("license: [", "README.md, between its --- lines: not a YAML file"),
        ("- a list", "write only keys and plain values between its --- lines"),
    ],
)
def test_a_card_with_faults(hub: HubServer, adapter: Path, metadata: str, says: str) -> None:
    (adapter / "README.md").write_text(f"---\n{metadata}\n---\n# Mine\n")
    with pytest.raises(RetrofitError, match=says):
        retrofit.push_folder(adapter, "user/first")


@pytest.mark.parametrize("known", [True, False])
def test_the_licence_of_a_base_on_the_hub(
    hub: HubServer, known: bool, model: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    model.config.memory.update(base="someone/a-model", base_revision=None)
    if known:
        hub.repos["someone/a-model"] = Repo(private=False)
        hub.repos["someone/a-model"].commit("main", {"README.md": b"---\nlicense: apache-2.0\n---\n"}, "a card")
    retrofit.push_adapter(model, "user/first")
    card = ModelCard(hub.repos["user/first"].files()["README.md"].decode())
    assert card.data.license == ("apache-2.0" if known else None)
    assert card.data.base_model == "someone/a-model"
    assert card.data.to_dict()["base_model_relation"] == "adapter"
    assert ("see the base's card" in card.text) is not known
    said = capfd.readouterr().err
    assert ("licence of someone/a-model could not be found" in said) is not known
    assert "the base is named" not in said


def test_a_folder_without_a_card_gets_one(hub: HubServer, model: Any, adapter: Path, tmp_path: Path) -> None:
    (adapter / "README.md").unlink()
    retrofit.push_folder(adapter, "user/first")
    model.save_pretrained(tmp_path / "model")
    retrofit.push_folder(tmp_path / "model", "user/model")
    assert b"memory-ahn-gdn" in hub.repos["user/first"].files()["README.md"]
    assert b'from_pretrained("user/model", trust_remote_code=True)' in hub.repos["user/model"].files()["README.md"]


def test_the_command_and_a_process_of_its_own(
    hub: HubServer, model: Any, adapter: Path, tmp_path: Path, make_base: MakeBase
) -> None:
    """What a user does: push by the command, load in Python; the token shows nowhere."""
    make_base("Qwen2").save_pretrained(tmp_path / "base")
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": str(ROOT),
    }

    def process(*command: object) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert MINE not in done.stdout + done.stderr
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    hub.fail("/commit/", 502)
    said = process(ROOT / "cli.py", "push", adapter, "user/first", "--private", "--revision", "v1", "--message", "hi")
    assert said.startswith(f"{hub.endpoint}/user/first/commit/")
    repo = hub.repos["user/first"]
    assert (repo.private, repo.messages[-1]) == (True, "hi")
    assert not any(MINE.encode() in data for files in repo.commits.values() for data in files.values())
    code = (
        "import json, torch, retrofit\n"
        "model = retrofit.load_adapter('base', 'user/first', revision='v1')\n"
        f"ids = torch.tensor({IDS.tolist()})\n"
        "print(json.dumps(model(ids).logits[:, -1].tolist()))"
    )
    last = torch.tensor(json.loads(process("-c", code).splitlines()[-1]))
    torch.testing.assert_close(last, logits(model, IDS)[:, -1])
    assert not any(MINE in file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file())


def test_the_page_in_the_docs_does_what_it_says(
    hub: HubServer, tmp_path: Path, make_base: MakeBase, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands and its Python, as they stand, with a tiny model under the base's name."""
    pytest.importorskip("peft", minversion="0.21")
    monkeypatch.chdir(tmp_path)
    base = make_base("Qwen2", vocab_size=len(byte_tokenizer))
    base.save_pretrained("base")
    hub.repos["Qwen/Qwen2.5-0.5B"] = Repo(private=False)
    files = {file.name: file.read_bytes() for file in Path("base").iterdir()}
    hub.repos["Qwen/Qwen2.5-0.5B"].commit("main", files, "a base")
    model = awake(base, "ahn-gdn")
    retrofit.save_adapter(model, "runs/first/adapter")
    export_model(model, "runs/first/model", byte_tokenizer)
    for command in commands("docs/hub.md")[1:]:  # the first one logs in
        done = CliRunner().invoke(app, command.words[1:])
        assert done.exit_code == 0, done.output
    assert (hub.repos["user/first-model"].private, hub.repos["user/first"].messages[-1]) == (True, "600 more steps")
    names = {"ids": IDS}
    code = blocks("docs/hub.md", "python")
    assert len(code) == 2
    for block in code:
        exec(block, names)
    assert "v3" in hub.repos["user/first"].branches
    assert torch.equal(names["teacher"], base(IDS).logits)
    assert torch.equal(logits(retrofit.load_adapter(base, "again"), IDS), logits(names["model"], IDS))

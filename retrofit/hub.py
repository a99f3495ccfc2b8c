"""Pushing to the Hub: one upload for adapters and exported models, tried again where the Hub stumbles."""

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HFValidationError, HTTPError

from patches.errors import RetrofitError, first_line

from .adapter import CONFIG, WEIGHTS, read_adapter_config, save_adapter
from .card import adapter_card, card_metadata, complete_card, is_hub_id, model_card
from .families import PREFIX
from .hub_errors import TOKEN, reason, redact, transient
from .loading import check_tokenizer, load_config, load_tokenizer

CARD = "README.md"
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")  # user/name
# what an exported model consists of; checkpoints, logs and notes that lie beside it stay where they are
SHIPPED = (".json", ".safetensors", ".py", ".jinja", ".txt", ".model")
WAITS = (1.0, 4.0, 16.0)  # seconds before each further try; most single requests were then tried for 20 s already


def push_folder(
    path: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    token: str | None = None,
) -> str:
    """Upload an adapter or an exported model to the Hub repository ``repo_id``, which is made if need be.

    Of an adapter its three files are sent, of an export the weights, configuration, tokenizer, code and card, nothing
    else that lies in the folder. The card is completed: the repository's name, and the licence of the base if it can
    be found out. The folder itself is not changed.

    Args:
        path: folder written by :func:`retrofit.save_adapter`, by ``model.save_pretrained`` or by a run.
        repo_id: ``user/name``.
        private: make a new repository private (default: as the account is set).
        revision: branch to write to, made from main if it is not there (default: main).
        message: of the commit.
        token: default: the one of ``hf auth login`` or ``HF_TOKEN``.

    Returns:
        The address of the commit.

    Raises:
        RetrofitError: neither an adapter nor an export, a token in one of its files, a tokenizer that does not fit the
            model, or the Hub refused, with its reason, or still failed after further tries.
    """
    folder = Path(path)
    kind, memory, names = _contents(folder)
    _refuse_tokens(folder, names, token)
    if kind == "model" and any(name.startswith("tokenizer") for name in names):
        check_tokenizer(load_tokenizer(str(folder)), load_config(str(folder)))
    api = HfApi(token=token)
    file = folder / CARD
    make = adapter_card if kind == "adapter" else model_card
    card = file.read_text(encoding="utf-8") if file.is_file() else make(memory)
    base, at = memory.get("base"), memory.get("base_revision")
    if not (base and is_hub_id(base)):
        where = f"names the base by a folder, {base}" if base else "does not name the base"
        print(f"note: the card {where}: write the Hub id of the base into {CARD}", file=sys.stderr)
    contents: dict[str, Path | bytes] = {name: folder / name for name in sorted(names - {CARD})}
    contents[CARD] = complete_card(card, repo_id, _licence(api, base, at, token)).encode()

    def upload() -> str:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise RetrofitError(
                f"{repo_id} exists and is public: make it private on the Hub, or push without --private"
            )
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        files = [CommitOperationAdd(name, content) for name, content in contents.items()]
        commit = api.create_commit(repo_id, files, commit_message=message or f"Upload {kind}", revision=revision)
        return str(commit.commit_url)

    return _persist(upload, repo_id, token)


def push_adapter(
    model: Any,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    token: str | None = None,
    details: str = "",
) -> str:
    """Upload the adapter of a retrofitted model; see :func:`retrofit.save_adapter` and :func:`push_folder`.

    Raises:
        RetrofitError: as those two.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "adapter"
        save_adapter(model, folder, details=details)
        return push_folder(folder, repo_id, private=private, revision=revision, message=message, token=token)


def _persist(upload: Callable[[], str], repo_id: str, token: str | None) -> str:
    """``upload()``, tried again after each of ``WAITS`` seconds while the Hub only stumbles."""
    for wait in (*WAITS, None):
        try:
            return upload()
        except RetrofitError:
            raise
        except HFValidationError:
            raise RetrofitError(f"{repo_id!r} is not a Hub id: write it as user/name") from None
        except (HTTPError, OSError, RuntimeError, ValueError) as error:  # the last for a card the Hub finds faults with
            stumbled = transient(error)
            if not stumbled or wait is None:
                raise RetrofitError(f"the Hub refused {repo_id}: {reason(error, token)}") from None
            print(f"{stumbled}: trying again in {wait:.0f} s", file=sys.stderr)
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def _contents(folder: Path) -> tuple[str, dict[str, Any], set[str]]:
    """What a folder holds (adapter or model), its memory's configuration with the base's name, and the files to send.

    Raises:
        RetrofitError: it is neither.
    """
    if (folder / CONFIG).is_file():
        config = read_adapter_config(folder)
        if not (folder / WEIGHTS).is_file():
            raise RetrofitError(f"{folder} has no {WEIGHTS}: save the whole adapter again")
        base = {"base": config.get("base_model_name_or_path"), "base_revision": config.get("revision")}
        return "adapter", {**config["memory"], **base}, {CONFIG, WEIGHTS, CARD}
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        exported = str(config["model_type"]).startswith(PREFIX) and isinstance(config["memory"], dict)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        exported = False
    if not exported:
        inside = [name for name in ("adapter", "model") if (folder / name).is_dir()]
        instead = f"push {folder / inside[0]}" if inside else "give DIR/adapter or DIR/model of a run"
        raise RetrofitError(f"{folder} is neither an adapter nor an exported model: {instead}")
    names = {file.name for file in folder.iterdir() if file.is_file() and file.suffix in SHIPPED}
    if not any(name.endswith(".safetensors") for name in names):
        raise RetrofitError(f"{folder} has no weights in safetensors: export the whole model again")
    return "model", config["memory"], names | {CARD}


def _refuse_tokens(folder: Path, names: set[str], token: str | None) -> None:
    """Refuse a file with a Hub token in it: what is pushed can be read by others."""
    mine = token or get_token()
    for name in sorted(names):
        if name.endswith(".safetensors") or not (folder / name).is_file():
            continue
        text = (folder / name).read_text(encoding="utf-8", errors="replace")
        if TOKEN.search(text) or (mine and mine in text):
            raise RetrofitError(f"{folder / name} holds a Hub token: remove it, and revoke the token if others saw it")


def _licence(api: HfApi, base: str | None, revision: str | None, token: str | None) -> dict[str, str]:
    """The licence keys of the base's card, from its folder or from the Hub; empty where they cannot be found out."""
    try:
        if base and (Path(base) / CARD).is_file():
            data = card_metadata((Path(base) / CARD).read_text(encoding="utf-8"), str(Path(base) / CARD))
        elif base and is_hub_id(base):
            found = api.model_info(base, revision=revision, timeout=10).card_data
            data = found.to_dict() if found is not None else {}
        else:
            data = {}
    except (HTTPError, OSError, ValueError) as error:
        print(f"note: the licence of {base} could not be found: {redact(first_line(error), token)}", file=sys.stderr)
        data = {}
    return {key: data[key] for key in ("license", "license_name", "license_link") if isinstance(data.get(key), str)}

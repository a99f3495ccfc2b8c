"""A small server that speaks the part of the Hub's HTTP API which pushing and loading use, for the real client.

It keeps repositories in memory, asks for tokens as the Hub does, takes regular files in the commit and large ones over
LFS, and fails when it is told to.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass
class Repo:
    """A repository: commits by id, each all of its files, and branches that point at them."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        oid = hashlib.sha1(f"{branch}{len(self.commits)}{message}".encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        self.messages.append(message)
        return oid

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, code: str | None = None, **said: Any):
        self.status, self.message, self.code, self.said = status, message, code, said


class HubServer:
    """The server, running from construction to :meth:`stop`.

    Attributes:
        users: name by token. A user may write below that name only.
        repos: by id.
        requests: ``"METHOD /path"`` of everything asked, in order.
    """

    def __init__(self) -> None:
        self.users: dict[str, str] = {}
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self._blobs: dict[str, bytes] = {}
        self._failures: list[list[Any]] = []
        self.stopped = False
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def fail(self, part: str, status: int, times: int = 1, said: str = "told to fail") -> None:
        """Answer ``status``, and ``said``, to the next ``times`` requests with ``part`` in "METHOD /path"."""
        self._failures.append([part, status, times, said])

    def stop(self) -> None:
        """Close the port and what connections are open: from now on nobody answers."""
        self.stopped = True
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, url: str, token: str | None, body: bytes) -> tuple[bytes, dict[str, str]]:
        """Body and headers of the answer.

        Raises:
            Refusal: with another status than 200.
        """
        path, query = urlsplit(url).path, parse_qs(urlsplit(url).query)
        self.requests.append(f"{method} {path}")
        for failure in self._failures:
            if failure[0] in f"{method} {path}" and failure[2] > 0:
                failure[2] -= 1
                raise Refusal(failure[1], failure[3])
        user = None
        if token is not None and not path.startswith("/lfs/"):
            if token not in self.users:
                raise Refusal(401, "Invalid credentials in Authorization header")
            user = self.users[token]
        for wanted, pattern, act in self._routes():
            match = re.fullmatch(pattern, path)
            if match and method in wanted.split("|"):
                values = {key: unquote(value) for key, value in match.groupdict().items() if value}
                found = act(user=user, body=body, query=query, **values)
                return found if isinstance(found, tuple) else (json.dumps(found).encode(), {})
        raise Refusal(404, f"no route for {method} {path}")

    def _routes(self) -> list[tuple[str, str, Callable[..., Any]]]:
        api = f"/api/models/{REPO}"
        return [
            ("GET", "/api/whoami-v2", self._whoami),
            ("POST", "/api/repos/create", self._create),
            ("POST", "/api/validate-yaml", self._validate),
            ("POST", f"{api}/preupload/(?P<revision>[^/]+)", self._preupload),
            ("POST", f"/{REPO}.git/info/lfs/objects/batch", self._batch),
            ("PUT", "/lfs/(?P<oid>[0-9a-f]+)", self._upload),
            ("POST", f"{api}/commit/(?P<revision>[^/]+)", self._commit),
            ("POST", f"{api}/branch/(?P<branch>[^/]+)", self._branch),
            ("GET", f"{api}(/revision/(?P<revision>[^/]+))?", self._info),
            ("GET", f"{api}/tree/(?P<revision>[^/]+)", self._tree),
            ("GET|HEAD", f"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", self._resolve),
        ]

    def _readable(self, name: str, user: str | None) -> Repo:
        repo = self.repos.get(name)
        if repo is None or (repo.private and user != name.split("/")[0]):
            # the Hub does not tell a stranger which of the two it is
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        return repo

    def _writable(self, name: str, user: str | None) -> Repo:
        repo = self._readable(name, user)
        if user != name.split("/")[0]:
            raise Refusal(403, "you may not write here")
        return repo

    def _at(self, repo: Repo, revision: str) -> str:
        oid = repo.branches.get(revision, revision)
        if oid not in repo.commits:
            raise Refusal(404, "Revision not found", "RevisionNotFound")
        return oid

    def _whoami(self, user: str | None, **_: Any) -> dict[str, Any]:
        if user is None:
            raise Refusal(401, "who are you?")
        return {"type": "user", "name": user, "orgs": [], "auth": {"accessToken": {"role": "write"}}}

    def _create(self, user: str | None, body: bytes, **_: Any) -> dict[str, Any]:
        asked = json.loads(body)
        if user is None:
            raise Refusal(401, "who are you?")
        owner = asked.get("organization") or user
        name = f"{owner}/{asked['name']}"
        if owner != user:
            raise Refusal(403, "you may not make repositories there")
        if name in self.repos:
            raise Refusal(409, "You already created this model repo", url=f"{self.endpoint}/{name}")
        self.repos[name] = Repo(private=asked.get("private") is True or asked.get("visibility") == "private")
        self.repos[name].commit("main", {".gitattributes": b""}, "initial commit")
        return {"url": f"{self.endpoint}/{name}"}

    def _validate(self, body: bytes, **_: Any) -> dict[str, Any]:
        if "license: mine" in json.loads(body)["content"]:
            raise Refusal(400, "Invalid metadata", errors=[{"message": '"license" must be one of a list'}])
        return {"errors": [], "warnings": []}

    def _preupload(self, repo: str, user: str | None, body: bytes, revision: str, **_: Any) -> dict[str, Any]:
        self._at(self._writable(repo, user), revision)
        files = json.loads(body)["files"]
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
        }

    def _batch(self, repo: str, user: str | None, body: bytes, **_: Any) -> dict[str, Any]:
        self._writable(repo, user)
        objects = [
            {**asked, "actions": {"upload": {"href": f"{self.endpoint}/lfs/{asked['oid']}"}}}
            for asked in json.loads(body)["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def _upload(self, oid: str, body: bytes, **_: Any) -> dict[str, Any]:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, "not the content announced")
        self._blobs[oid] = body
        return {}

    def _commit(self, repo: str, user: str | None, body: bytes, revision: str, **_: Any) -> dict[str, Any]:
        found = self._writable(repo, user)
        files, message = dict(found.commits[self._at(found, revision)]), ""
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self._blobs[value["oid"]]
        oid = found.commit(revision, files, message)
        return {"commitUrl": f"{self.endpoint}/{repo}/commit/{oid}", "commitOid": oid, "success": True}

    def _branch(self, repo: str, user: str | None, branch: str, **_: Any) -> dict[str, Any]:
        found = self._writable(repo, user)
        if branch in found.branches:
            raise Refusal(409, "that branch exists")
        found.branches[branch] = found.branches["main"]
        return {}

    def _info(self, repo: str, user: str | None, revision: str = "main", **_: Any) -> dict[str, Any]:
        found = self._readable(repo, user)
        oid = self._at(found, revision)
        card = found.commits[oid].get("README.md", b"").decode()
        licence = re.search(r"^license: (.+)$", card, re.MULTILINE)
        return {
            "id": repo,
            "sha": oid,
            "private": found.private,
            "tags": [],
            "downloads": 0,
            "cardData": {"license": licence[1]} if licence else {},
            "siblings": [{"rfilename": name} for name in found.commits[oid]],
        }

    def _tree(self, repo: str, user: str | None, revision: str, **_: Any) -> list[dict[str, Any]]:
        found = self._readable(repo, user)
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in found.commits[self._at(found, revision)].items()
        ]

    def _resolve(self, repo: str, user: str | None, revision: str, file: str, **_: Any) -> tuple[bytes, dict[str, str]]:
        found = self._readable(repo, user)
        oid = self._at(found, revision)
        if file not in found.commits[oid]:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        data = found.commits[oid][file]
        return data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": oid}


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.hub.stopped:
            self.close_connection = True
            return
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        try:
            data, headers = self.hub.answer(self.command, self.path, token, body)
            status = 200
        except Refusal as refusal:
            status, data = refusal.status, json.dumps({"error": refusal.message, **refusal.said}).encode()
            headers = {"X-Error-Message": refusal.message}
            if refusal.code:
                headers["X-Error-Code"] = refusal.code
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_HEAD = _handle

    def log_message(self, format: str, *args: Any) -> None:
        pass

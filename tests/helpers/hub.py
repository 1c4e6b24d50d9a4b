"""A hub on the loopback interface: creates repositories, accepts files by LFS, commits, and refuses as the real hub
does."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_the_secret_of_this_test"
OWNER = "me"
LARGE_BYTES = 4096
"""Files of this size go by LFS; the hub itself decides by kind, too."""


@dataclass
class Repository:
    """The contents of a repository."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """The contents of the hub, and the requests that it received."""

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    failing: str = ""
    """Requests whose path contains this text are answered with 500."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Runs a hub on a free port of the loopback interface."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _RefusedError(Exception):
    def __init__(self, status: int, error: str) -> None:
        self.status, self.error = status, error


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def _answer(self, act: Any) -> None:
        body = self._body()
        self.hub.requests.append(f"{self.command} {self.path}")
        status, answer = 200, {}
        try:
            if self.hub.failing and self.hub.failing in self.path:
                raise _RefusedError(500, "planted")
            if not self.path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise _RefusedError(401, "Invalid credentials in Authorization header")
            answer = act(self.path.partition("?")[0], body)
        except _RefusedError as refused:
            status, answer = refused.status, {"error": refused.error}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status >= 400:
            self.send_header("X-Error-Message", str(answer["error"]))
        self.end_headers()
        self.wfile.write(content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _get(self, path: str, _: bytes) -> Any:
        name = path.removeprefix("/api/models/")
        repository = self._repository(name)
        return {"id": name, "private": repository.private, "sha": "0" * 40, "siblings": [], "tags": []}

    def _post(self, path: str, body: bytes) -> Any:
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            return {"errors": [], "warnings": []}
        if path.endswith(".git/info/lfs/objects/batch"):
            self._repository(path.removeprefix("/").removesuffix(".git/info/lfs/objects/batch"))
            return {"transfer": "basic", "objects": [self._object(one) for one in json.loads(body)["objects"]]}
        owner, model, action, revision = path.removeprefix("/api/models/").split("/")
        assert revision == "main"
        repository = self._repository(f"{owner}/{model}")
        if action == "preupload":
            return {"files": [_mode(one) for one in json.loads(body)["files"]]}
        assert action == "commit"
        return self._commit(f"{owner}/{model}", repository, [json.loads(line) for line in body.splitlines()])

    def _put(self, path: str, body: bytes) -> Any:
        oid = path.removeprefix("/lfs/")
        if hashlib.sha256(body).hexdigest() != oid:
            raise _RefusedError(400, "another content was promised")
        self.hub.objects[oid] = body
        return {}

    def _create(self, asked: dict[str, Any]) -> Any:
        name = f"{asked['organization'] or OWNER}/{asked['name']}"
        if not name.startswith(f"{OWNER}/"):
            raise _RefusedError(
                403, f"You don't have the rights to create a model under the namespace {name.split('/')[0]}"
            )
        if name in self.hub.repositories:
            raise _RefusedError(409, "You already created this model repo")
        private = asked.get("private", asked.get("visibility") == "private")
        self.hub.repositories[name] = Repository(private)
        return {"url": f"{self.hub.endpoint}/{name}", "id": name}

    def _repository(self, name: str) -> Repository:
        if name not in self.hub.repositories:
            raise _RefusedError(404, "Repository not found")
        return self.hub.repositories[name]

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        known = asked["oid"] in self.hub.objects
        upload = {"upload": {"href": f"{self.hub.endpoint}/lfs/{asked['oid']}", "header": {}}}
        return asked | ({} if known else {"actions": upload})

    def _commit(self, name: str, repository: Repository, lines: list[dict[str, Any]]) -> Any:
        [header, *operations] = lines
        added = {}
        for one in operations:
            value = one["value"]
            if one["key"] == "lfsFile":
                added[value["path"]] = self.hub.objects[value["oid"]]
            else:
                assert one["key"] == "file"
                added[value["path"]] = base64.b64decode(value["content"])
        repository.files |= added
        repository.commits.append(header["value"]["summary"])
        oid = f"{len(repository.commits):040x}"
        return {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{oid}", "commitOid": oid, "success": True}


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if file["size"] >= LARGE_BYTES else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}

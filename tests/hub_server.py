"""A Hub on loopback: what huggingface_hub asks of it when a model is pushed without xet, answered from memory.

Which paths it asks for was read in huggingface_hub 2.4 (`HfApi`, `_commit_api`, `lfs`): who asks, create a repository,
look at it, create a branch, validate a card, where files go (preupload), the LFS batch with its uploads and their
verification, and the commit, which may open a pull request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

TOKENS = {"hf_writer": ("me", "write"), "hf_reader": ("me", "read"), "hf_other": ("other", "write")}
SMALL = (".json", ".md", ".yml", ".txt", ".jinja")
PART = 10_000
"""Bytes of one part of an upload."""
NO_CODE = ""

Files = dict[str, bytes]


@dataclass
class Repo:
    """A repository: its branches and pull requests by the names of their revisions."""

    private: bool
    branches: dict[str, Files] = field(default_factory=lambda: {"main": {}})
    commits: list[str] = field(default_factory=list)


@dataclass
class Fault:
    """What goes wrong, once for each of `times`, with requests like `request` (method and path, a pattern).

    `status` is an answer; without one the connection breaks after `after` bytes of the request were read.
    """

    request: str
    status: int | None = None
    times: int = 1
    after: int = 0
    code: str = NO_CODE


@dataclass
class Hub:
    """What the server holds, and what it was asked."""

    address: str
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: Files = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    multipart: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def files(self, repo_id: str, revision: str = "main") -> Files:
        return self.repos[repo_id].branches[revision]

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, request) is not None for request in self.requests)


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str = NO_CODE, **more: str) -> None:
        super().__init__(message)
        self.status, self.code, self.more = status, code, more


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A Hub on a port that was free."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def log_message(self, *arguments: object) -> None:
        """Nothing: tests look at `Hub.requests`."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        request = f"{self.command} {unquote(url.path)}" + (f"?{url.query}" if url.query else "")
        with self.hub.lock:
            self.hub.requests.append(request)
            fault = next(
                (fault for fault in self.hub.faults if fault.times and re.search(fault.request, request)), None
            )
            if fault is not None:
                fault.times -= 1
        if fault is not None and fault.status is None:
            self.rfile.read(min(fault.after, int(self.headers.get("Content-Length", 0))))
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.body = self._body()
        try:
            if fault is not None:
                raise _Refused(fault.status or 0, "as the test wants", fault.code)
            for pattern, method in _ROUTES.items():
                match = re.fullmatch(pattern, f"{self.command} {unquote(url.path)}")
                if match is not None:
                    with self.hub.lock:
                        content = method(self, *match.groups(), parse_qs(url.query))
                    self._send(200, content)
                    return
            raise _Refused(404, f"this Hub has no {request}")
        except _Refused as refused:
            self._send(refused.status, {"error": str(refused), **refused.more}, str(refused), refused.code)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, content: Any, message: str = "", code: str = NO_CODE) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if message:
            self.send_header("X-Error-Message", message)
        if code:
            self.send_header("X-Error-Code", code)
        if self.command == "PUT":
            self.send_header("ETag", hashlib.md5(self.body).hexdigest())
        self.end_headers()
        self.wfile.write(data)

    def _who(self) -> tuple[str, str]:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in TOKENS:
            raise _Refused(401, "Invalid credentials in Authorization header")
        return TOKENS[token]

    def _repo(self, repo_id: str, write: bool = False) -> Repo:
        user, role = self._who()
        repo, owner = self.hub.repos.get(repo_id), repo_id.split("/")[0]
        if repo is None or (repo.private and owner != user):
            raise _Refused(404, "Repository not found", "RepoNotFound")
        if write and (owner != user or role != "write"):
            raise _Refused(403, "you can't write here")
        return repo

    def whoami(self, query: dict[str, list[str]]) -> Any:
        user, role = self._who()
        return {"type": "user", "name": user, "orgs": [], "auth": {"accessToken": {"displayName": "t", "role": role}}}

    def create(self, query: dict[str, list[str]]) -> Any:
        user, role = self._who()
        asked = json.loads(self.body)
        repo_id = f"{asked['organization'] or user}/{asked['name']}"
        if repo_id.split("/")[0] != user or role != "write":
            raise _Refused(403, "you can't create a repository there")
        if repo_id in self.hub.repos:
            raise _Refused(409, "You already created this model repo", url=f"{self.hub.address}/{repo_id}")
        self.hub.repos[repo_id] = Repo(private=asked.get("visibility") == "private")
        return {"url": f"{self.hub.address}/{repo_id}", "name": repo_id}

    def info(self, repo_id: str, query: dict[str, list[str]]) -> Any:
        repo = self._repo(repo_id)
        return {"id": repo_id, "private": repo.private, "sha": (["0" * 40, *repo.commits])[-1], "siblings": []}

    def branch(self, repo_id: str, name: str, query: dict[str, list[str]]) -> Any:
        repo = self._repo(repo_id, write=True)
        if name in repo.branches:
            raise _Refused(409, "Reference already exists")
        repo.branches[name] = dict(repo.branches["main"])
        return {}

    def validate(self, query: dict[str, list[str]]) -> Any:
        block = REGEX_YAML_BLOCK.search(json.loads(self.body)["content"])
        data = yaml.safe_load(block[2]) if block else None
        if not isinstance(data, dict) or any(value is None for value in data.values()):
            raise _Refused(400, "Invalid metadata")
        return {"errors": [], "warnings": []}

    def preupload(self, repo_id: str, revision: str, query: dict[str, list[str]]) -> Any:
        repo = self._repo(repo_id, write="create_pr" not in query)
        if revision not in repo.branches:
            raise _Refused(404, "Invalid rev id", "RevisionNotFound")
        there = repo.branches[revision]
        answers = []
        for file in json.loads(self.body)["files"]:
            small = file["path"].endswith(SMALL)
            content = there.get(file["path"])
            oid = None if content is None else _git_hash(content) if small else hashlib.sha256(content).hexdigest()
            mode = "regular" if small else "lfs"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def batch(self, repo_id: str, query: dict[str, list[str]]) -> Any:
        self._repo(repo_id)
        objects = []
        for asked in json.loads(self.body)["objects"]:
            oid, size = asked["oid"], asked["size"]
            if oid not in self.hub.objects:
                upload: dict[str, Any] = {"href": f"{self.hub.address}/lfs/{oid}"}
                if self.hub.multipart:
                    numbers = range(1, -(-size // PART) + 1)
                    header = {f"{number:05}": f"{self.hub.address}/lfs/{oid}/{number}" for number in numbers}
                    upload = {"href": f"{self.hub.address}/lfs/{oid}", "header": header | {"chunk_size": str(PART)}}
                asked |= {"actions": {"upload": upload, "verify": {"href": f"{self.hub.address}/lfs/{oid}/verify"}}}
            objects.append(asked)
        return {"transfer": "multipart" if self.hub.multipart else "basic", "objects": objects}

    def put(self, oid: str, query: dict[str, list[str]]) -> Any:
        self._store(oid, self.body)

    def put_part(self, oid: str, number: str, query: dict[str, list[str]]) -> Any:
        self.hub.parts.setdefault(oid, {})[int(number)] = self.body

    def join(self, oid: str, query: dict[str, list[str]]) -> Any:
        parts = self.hub.parts.pop(oid)
        self._store(oid, b"".join(parts[part["partNumber"]] for part in json.loads(self.body)["parts"]))

    def verify(self, oid: str, query: dict[str, list[str]]) -> Any:
        if json.loads(self.body) != {"oid": oid, "size": len(self.hub.objects.get(oid, b""))}:
            raise _Refused(422, "the object isn't there")

    def _store(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            raise _Refused(422, "the bytes are not those of the object")
        self.hub.objects[oid] = content

    def commit(self, repo_id: str, revision: str, query: dict[str, list[str]]) -> Any:
        opens = "create_pr" in query
        repo = self._repo(repo_id, write=not opens)
        files = dict(repo.branches[revision])
        summary = ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                summary = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise _Refused(400, f"{value['path']} was not uploaded")
                files[value["path"]] = self.hub.objects[value["oid"]]
            else:
                raise _Refused(400, f"a push deletes nothing: {entry['key']}")
        number = sum(name.startswith("refs/pr/") for name in repo.branches) + 1
        repo.branches[f"refs/pr/{number}" if opens else revision] = files
        repo.commits.append(hashlib.sha1(f"{len(repo.commits)} {summary}".encode()).hexdigest())
        return {
            "success": True,
            "commitOid": repo.commits[-1],
            "commitUrl": f"{self.hub.address}/{repo_id}/commit/{repo.commits[-1]}",
            "pullRequestUrl": f"{self.hub.address}/{repo_id}/discussions/{number}" if opens else None,
        }


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


_ID, _REVISION = "([^/]+/[^/]+)", "(.+)"
_ROUTES: dict[str, Callable[..., Any]] = {
    "GET /api/whoami-v2": _Handler.whoami,
    "POST /api/repos/create": _Handler.create,
    f"GET /api/models/{_ID}": _Handler.info,
    f"GET /api/models/{_ID}/revision/.+": _Handler.info,
    f"POST /api/models/{_ID}/branch/{_REVISION}": _Handler.branch,
    "POST /api/validate-yaml": _Handler.validate,
    f"POST /api/models/{_ID}/preupload/{_REVISION}": _Handler.preupload,
    f"POST /{_ID}.git/info/lfs/objects/batch": _Handler.batch,
    "PUT /lfs/([0-9a-f]+)": _Handler.put,
    "PUT /lfs/([0-9a-f]+)/([0-9]+)": _Handler.put_part,
    "POST /lfs/([0-9a-f]+)": _Handler.join,
    "POST /lfs/([0-9a-f]+)/verify": _Handler.verify,
    f"POST /api/models/{_ID}/commit/{_REVISION}": _Handler.commit,
}

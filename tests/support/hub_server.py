"""A Hub on loopback: the few endpoints that huggingface_hub calls to fetch a model.

It serves model info, the file tree, HEAD and GET of a file (weights redirect to another host name, as on the
Hub), branches, private and gated repositories, and a failing Hub. Every request is recorded with its token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

LARGE_SUFFIXES = (".safetensors", ".bin")  # the Hub keeps these in large file storage


@dataclass
class Repo:
    """A model repository: the files of each commit, and the commit of each branch.

    token: the one that may see it at all (None: everybody). gated_to: the token that may fetch its files.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    gated_to: str | None = None

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit that holds exactly these files and move the branch to it."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode() + branch.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    token: str | None


class FakeHub:
    """`with FakeHub() as hub:` serves `hub.repos` at `hub.endpoint` until the block ends."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.failing = False  # answer everything with 501: after a 503, clients try for 23 seconds
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self.port = self.server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    def __enter__(self) -> FakeHub:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def add(self, name: str, files: Mapping[str, bytes], **options: str) -> Repo:
        self.repos[name] = Repo(**options)
        self.repos[name].commit(files)
        return self.repos[name]

    def fetched(self) -> set[str]:
        """Return the names of the files whose bytes were requested."""
        paths = [request.path for request in self.requests if request.method == "GET"]
        return {path.split("/", 5)[5] for path in paths if "/resolve/" in path} | {
            path.rsplit("/", 1)[1] for path in paths if path.startswith("/cdn/")
        }

    def blob(self, digest: str) -> bytes | None:
        blobs = (
            data for repo in self.repos.values() for files in repo.commits.values() for data in files.values()
        )
        return next((data for data in blobs if hashlib.sha256(data).hexdigest() == digest), None)


def handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.serve()

        def do_GET(self) -> None:
            self.serve()

        def serve(self) -> None:
            path = unquote(urlsplit(self.path).path)
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            hub.requests.append(Request(self.command, path, token))
            if hub.failing:
                return self.answer(501)
            if match := re.fullmatch(r"/cdn/(\w+)/.+", path):
                data = hub.blob(match[1])
                return self.answer(404) if data is None else self.answer(200, data)
            for pattern, serve in (
                (r"/api/models/([^/]+/[^/]+)()()", self.info),
                (r"/api/models/([^/]+/[^/]+)/revision/([^/]+)()", self.info),
                (r"/api/models/([^/]+/[^/]+)/tree/([^/]+)()", self.tree),
                (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.file),
            ):
                if match := re.fullmatch(pattern, path):
                    name, revision, file = match.groups()
                    return self.in_repo(serve, name, revision or "main", file, token)
            return self.answer(404)

        def in_repo(
            self, serve: Callable[..., None], name: str, revision: str, file: str, token: str | None
        ) -> None:
            repo = hub.repos.get(name)
            if repo is None or (repo.token is not None and repo.token != token):
                # The Hub does not say whether a repository is missing or private.
                return self.refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            sha = repo.branches.get(revision, revision)
            if sha not in repo.commits:
                return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            if serve == self.file:
                if repo.gated_to is not None and repo.gated_to != token:
                    return self.refuse(
                        403 if token else 401, "GatedRepo", f"Access to model {name} is restricted"
                    )
                return self.file(sha, repo.commits[sha], file)
            return serve(name, sha, repo.commits[sha])

        def info(self, name: str, sha: str, files: dict[str, bytes]) -> None:
            siblings = [{"rfilename": path} for path in files]
            self.answer_json(
                {"id": name, "modelId": name, "sha": sha, "private": False, "siblings": siblings}
            )

        def tree(self, name: str, sha: str, files: dict[str, bytes]) -> None:
            entries = []
            for path, data in files.items():
                entry = {
                    "type": "file",
                    "path": path,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                if path.endswith(LARGE_SUFFIXES):
                    entry["lfs"] = {
                        "oid": hashlib.sha256(data).hexdigest(),
                        "size": len(data),
                        "pointerSize": 134,
                    }
                entries.append(entry)
            self.answer_json(entries)

        def file(self, sha: str, files: dict[str, bytes], path: str) -> None:
            commit = {"X-Repo-Commit": sha}
            if path not in files:
                return self.refuse(404, "EntryNotFound", "Entry not found", commit)
            data = files[path]
            digest = hashlib.sha256(data).hexdigest()
            if path.endswith(LARGE_SUFFIXES):
                # Another host name, as the Hub's storage is: the client must not send its token there.
                location = f"http://localhost:{hub.port}/cdn/{digest}/{path}"
                linked = {
                    "X-Linked-Etag": f'"{digest}"',
                    "X-Linked-Size": str(len(data)),
                    "Location": location,
                }
                return self.answer(302, b"", commit | linked)
            return self.answer(200, data, commit | {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

        def answer_json(self, value: object) -> None:
            self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def refuse(
            self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
        ) -> None:
            self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})})

        def answer(self, status: int, data: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    return Handler

"""A local server that speaks the Hub's HTTP interface for datasets, and misbehaves on demand.

What ``huggingface_hub`` uses to create, list, push and pull: repositories, branches and commits
(in memory, each commit a whole tree), upload modes, LFS batches and uploads, and files by redirect
to signed addresses with ranges. Parquet goes through LFS, as on the Hub. There is no Xet.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_lfs(path: str, size: int) -> bool:
    return path.endswith(".parquet") or size > 10_000_000


@dataclasses.dataclass(frozen=True)
class Blob:
    """A file of a commit."""

    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        if not self.lfs:
            return git_blob(self.content)
        return git_blob(f"lfs {self.sha256} {len(self.content)}".encode())

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid


@dataclasses.dataclass
class Repo:
    """A dataset repository: every commit is a whole tree."""

    private: bool
    commits: dict[str, dict[str, Blob]] = dataclasses.field(default_factory=dict)
    branches: dict[str, str] = dataclasses.field(default_factory=dict)

    def commit(self, branch: str, tree: dict[str, Blob]) -> str:
        """Put a tree on a branch; equal histories have equal commits."""
        parent = self.branches.get(branch, "")
        listing = [parent, sorted((path, blob.oid) for path, blob in tree.items())]
        sha = hashlib.sha1(json.dumps(listing).encode()).hexdigest()
        self.commits[sha] = tree
        self.branches[branch] = sha
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Contents at a branch or commit, but for the file that the Hub makes."""
        tree = self.commits[self.branches.get(revision, revision)]
        return {p: blob.content for p, blob in tree.items() if p != ".gitattributes"}

    def replace(self, path: str, content: bytes) -> str:
        """Commit another content of a file."""
        tree = self.commits[self.branches["main"]]
        return self.commit("main", tree | {path: Blob(content, is_lfs(path, len(content)))})

    def publish(self, folder: Path) -> str:
        """Commit a folder as it is."""
        tree = dict(self.commits[self.branches["main"]])
        for path in folder.rglob("*"):
            if path.is_file():
                name, content = path.relative_to(folder).as_posix(), path.read_bytes()
                tree[name] = Blob(content, is_lfs(name, len(content)))
        return self.commit("main", tree)


@dataclasses.dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong with a request.

    Attributes:
        status: Answer this status instead.
        message: With this error message.
        drop_after: Close the connection after so many bytes of the body.
        reset: Close it with a reset instead of an end.
        content: Serve this content instead of the file's.
        hold: Before anything else, wait until this is set; the request came in when ``held`` is.
        held: Set as the request comes in.
    """

    status: int | None = None
    message: str = "injected"
    drop_after: int | None = None
    reset: bool = False
    content: bytes | None = None
    hold: threading.Event | None = None
    held: threading.Event | None = None


Script = Callable[[Seen], Fault | None]


class HubServer:
    """Serves dataset repositories.

    Attributes:
        repos: Repositories by id.
        uploads: Contents uploaded to LFS by SHA-256, committed or not.
        seen: Requests so far.
        script: Chooses faults.
        token: The only token it accepts.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.repos: dict[str, Repo] = {}
        self.uploads: dict[str, bytes] = {}
        self.seen: list[Seen] = []
        self.script: Script = lambda seen: None
        self.lock = threading.RLock()
        handler = type("Handler", (_Handler,), {"hub": self})

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # clients are killed on purpose

        self._server = Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # Files lie on another host, as on the Hub: the token must not be sent there.
        self.store = f"http://localhost:{self._server.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[HubServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def count(self, method: str, part: str) -> int:
        """Number of requests with this method and this in their path."""
        return sum(s.method == method and part in s.path for s in self.seen)

    def create(self, repo_id: str, private: bool = False) -> Repo:
        repo = self.repos[repo_id] = Repo(private)
        repo.commit("main", {".gitattributes": Blob(b"*.parquet filter=lfs\n", False)})
        return repo


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    fault: Fault | None

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization")
        token = authorization.removeprefix("Bearer ") if authorization else None
        seen = Seen(self.command, path, self.headers.get("Range"), token)
        with self.hub.lock:
            self.hub.seen.append(seen)
        self.fault = self.hub.script(seen)
        if self.fault is not None and self.fault.held is not None:
            self.fault.held.set()
        if self.fault is not None and self.fault.hold is not None:
            self.fault.hold.wait()
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(length)
            if len(body) < length:  # the client is gone
                self.close_connection = True
                return
        try:
            if self.fault is not None and self.fault.status is not None:
                raise _Refused(self.fault.status, self.fault.message)
            if token is not None and token != self.hub.token:
                raise _Refused(401, "Invalid credentials in Authorization header")
            for pattern, method in _ROUTES:
                found = re.fullmatch(pattern, f"{self.command} {path}")
                if found is not None:
                    with self.hub.lock:
                        answer = method(self, token, body, **found.groupdict())
                    self._send(*answer)
                    return
            raise _Refused(404, f"no route {self.command} {path}")
        except _Refused as refusal:
            content = json.dumps({"error": str(refusal)}).encode()
            headers = {"X-Error-Message": str(refusal)}
            if refusal.code:
                headers["X-Error-Code"] = refusal.code
            self._send(content, headers, refusal.status)

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815

    def _send(
        self, content: bytes, headers: dict[str, str] | None = None, status: int = 200
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = self.fault.drop_after if self.fault is not None else None
        self.wfile.write(content[:limit])
        self.wfile.flush()
        if limit is not None and limit < len(content):
            self.close_connection = True
            if self.fault is not None and self.fault.reset:
                option = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
                self.wfile.close()
                self.rfile.close()
                self.connection.close()

    def log_message(self, *args: Any) -> None:
        pass

    # -------------------------------------------------------------- routes
    def _repo(self, token: str | None, repo_id: str) -> Repo:
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and token is None):
            raise _Refused(404 if token else 401, "Repository not found", "RepoNotFound")
        return repo

    def _writable(self, token: str | None, repo_id: str) -> Repo:
        repo = self._repo(token, repo_id)
        if token is None:
            raise _Refused(401, "a token is needed to write")
        return repo

    def _tree(self, token: str | None, repo_id: str, rev: str) -> tuple[str, dict[str, Blob]]:
        repo = self._repo(token, repo_id)
        commit = repo.branches.get(rev, rev)
        if commit not in repo.commits:
            raise _Refused(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        return commit, repo.commits[commit]

    def info(self, token: str | None, body: bytes, repo_id: str, rev: str | None = None) -> Any:
        commit, _ = self._tree(token, repo_id, rev or "main")
        private = self.hub.repos[repo_id].private
        return (json.dumps({"id": repo_id, "sha": commit, "private": private}).encode(),)

    def new_repo(self, token: str | None, body: bytes) -> Any:
        if token is None:
            raise _Refused(401, "a token is needed to create a repository")
        asked = json.loads(body)
        if asked["type"] != "dataset":
            raise _Refused(400, f"no repositories of type {asked['type']}")
        repo_id = f"{asked['organization']}/{asked['name']}"
        answer = (json.dumps({"url": f"{self.hub.url}/datasets/{repo_id}"}).encode(),)
        if repo_id in self.hub.repos:
            raise _Refused(409, "You already created this dataset repo")
        self.hub.create(repo_id, asked.get("visibility") == "private")
        return answer

    def new_branch(self, token: str | None, body: bytes, repo_id: str, branch: str) -> Any:
        repo = self._writable(token, repo_id)
        if branch in repo.branches:
            raise _Refused(409, "Reference already exists")
        repo.branches[branch] = repo.branches["main"]
        return (b"{}",)

    def yaml(self, token: str | None, body: bytes) -> Any:
        return (json.dumps({"errors": [], "warnings": []}).encode(),)

    def preupload(self, token: str | None, body: bytes, repo_id: str, rev: str) -> Any:
        self._writable(token, repo_id)
        _, tree = self._tree(token, repo_id, rev)
        files = []
        for file in json.loads(body)["files"]:
            known = tree.get(file["path"])
            files.append(
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if is_lfs(file["path"], file["size"]) else "regular",
                    "shouldIgnore": False,
                    "oid": None if known is None else known.etag,
                }
            )
        return (json.dumps({"files": files}).encode(),)

    def batch(self, token: str | None, body: bytes, repo_id: str) -> Any:
        self._writable(token, repo_id)
        objects = []
        for item in json.loads(body)["objects"]:
            if item["oid"] not in self.hub.uploads:
                upload = {"href": f"{self.hub.store}/lfs/{item['oid']}"}
                item["actions"] = {"upload": upload}
            objects.append(item)
        return (json.dumps({"transfer": "basic", "objects": objects}).encode(),)

    def upload(self, token: str | None, body: bytes, oid: str) -> Any:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refused(400, "the content does not have this hash")
        self.hub.uploads[oid] = body
        return (b"",)

    def commit(self, token: str | None, body: bytes, repo_id: str, rev: str) -> Any:
        repo = self._writable(token, repo_id)
        if rev not in repo.branches:
            raise _Refused(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        tree = dict(repo.commits[repo.branches[rev]])
        for item in map(json.loads, body.splitlines()):
            value = item["value"]
            if item["key"] == "header":
                if value.get("parentCommit", repo.branches[rev]) != repo.branches[rev]:
                    raise _Refused(412, "A commit has happened since. Please refresh")
            elif item["key"] == "file":
                tree[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.uploads:
                    raise _Refused(400, "the LFS object was not uploaded")
                tree[value["path"]] = Blob(self.hub.uploads[value["oid"]], True)
            elif item["key"] == "deletedFile":
                del tree[value["path"]]
        sha = repo.commit(rev, tree)
        url = f"{self.hub.url}/datasets/{repo_id}/commit/{sha}"
        return (json.dumps({"commitUrl": url, "commitOid": sha}).encode(),)

    def tree(self, token: str | None, body: bytes, repo_id: str, rev: str) -> Any:
        _, tree = self._tree(token, repo_id, rev)
        entries: list[dict[str, Any]] = []
        for path, blob in sorted(tree.items()):
            size = len(blob.content)
            entry = {"type": "file", "path": path, "size": size, "oid": blob.oid}
            if blob.lfs:
                entry["lfs"] = {"oid": blob.sha256, "size": size, "pointerSize": 130}
            entries.append(entry)
        folders = {path.rpartition("/")[0] for path in tree} - {""}
        entries += [{"type": "directory", "path": f, "oid": "0" * 40} for f in sorted(folders)]
        return (json.dumps(entries).encode(),)

    def resolve(self, token: str | None, body: bytes, repo_id: str, rev: str, path: str) -> Any:
        commit, tree = self._tree(token, repo_id, rev)
        if path not in tree:
            raise _Refused(404, "Entry not found", "EntryNotFound")
        blob = tree[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
        if not blob.lfs:
            return self._ranged(blob.content, headers)
        headers |= {
            "Location": f"{self.hub.store}/signed/{blob.sha256}",
            "X-Linked-Size": str(len(blob.content)),
            "X-Linked-ETag": f'"{blob.sha256}"',
        }
        return b"", headers, 302

    def signed(self, token: str | None, body: bytes, oid: str) -> Any:
        trees = [t for r in self.hub.repos.values() for t in r.commits.values()]
        blobs = {blob.sha256: blob for tree in trees for blob in tree.values()}
        return self._ranged(blobs[oid].content, {"ETag": f'"{oid}"'})

    def _ranged(self, content: bytes, headers: dict[str, str]) -> Any:
        if self.fault is not None and self.fault.content is not None:
            content = self.fault.content
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked is None:
            return content, headers
        begin, whole = int(asked[1]), len(content)
        if begin >= whole:
            return b"", headers | {"Content-Range": f"bytes */{whole}"}, 416
        headers = headers | {"Content-Range": f"bytes {begin}-{whole - 1}/{whole}"}
        return content[begin:], headers, 206


_ID = r"(?P<repo_id>[\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, Callable[..., Any]]] = [
    (rf"GET /api/datasets/{_ID}", _Handler.info),
    (rf"GET /api/datasets/{_ID}/revision/(?P<rev>[^/]+)", _Handler.info),
    (rf"GET /api/datasets/{_ID}/tree/(?P<rev>[^/]+)", _Handler.tree),
    (r"POST /api/repos/create", _Handler.new_repo),
    (r"POST /api/validate-yaml", _Handler.yaml),
    (rf"POST /api/datasets/{_ID}/branch/(?P<branch>[^/]+)", _Handler.new_branch),
    (rf"POST /api/datasets/{_ID}/preupload/(?P<rev>[^/]+)", _Handler.preupload),
    (rf"POST /api/datasets/{_ID}/commit/(?P<rev>[^/]+)", _Handler.commit),
    (rf"POST /datasets/{_ID}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"PUT /lfs/(?P<oid>[0-9a-f]{64})", _Handler.upload),
    (rf"(GET|HEAD) /datasets/{_ID}/resolve/(?P<rev>[^/]+)/(?P<path>.+)", _Handler.resolve),
    (r"(GET|HEAD) /signed/(?P<oid>[0-9a-f]{64})", _Handler.signed),
]

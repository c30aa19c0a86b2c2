"""A local HTTP server that speaks ``/v1/chat/completions`` and misbehaves on demand."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclasses.dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    index: int
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def opening(self) -> str:
        return self.body["messages"][-1]["content"]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What goes back.

    Attributes:
        body: Bytes of the body.
        status: HTTP status.
        headers: Further headers.
        declared: Length declared in the header; a larger one than the body's breaks the
            connection in the middle of the body.
    """

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    declared: int | None = None


def completion(text: str | None, finish: str = "stop", **message: Any) -> Answer:
    """A well-formed chat completion."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, **message},
        "finish_reason": finish,
    }
    usage = {"prompt_tokens": 17, "completion_tokens": 5, "total_tokens": 22}
    whole = {"id": "c", "object": "chat.completion", "created": 0, "model": "toy"}
    whole |= {"choices": [choice], "usage": usage}
    return Answer(json.dumps(whole).encode())


def failure(status: int, message: str = "injected", **headers: str) -> Answer:
    """An error in the form OpenAI uses; ``retry_after="3"`` sets ``Retry-After``."""
    body = json.dumps({"error": {"message": message, "type": "injected", "code": None}}).encode()
    return Answer(body, status, {k.replace("_", "-").title(): v for k, v in headers.items()})


class FakeServer:
    """Answers requests with ``script(seen)`` and keeps what it saw.

    Args:
        script: Chooses the answer; runs in the request's own thread and may block.
        model: The only model it serves; others get 404.
        key: Key it insists on; others get 401. ``None`` lets everybody in.
    """

    def __init__(
        self, script: Callable[[Seen], Answer], model: str = "toy", key: str | None = None
    ) -> None:
        self.script = script
        self.model = model
        self.key = key
        self.seen: list[Seen] = []
        self.max_in_flight = 0
        self.closing = threading.Event()
        self._in_flight = 0
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                with contextlib.suppress(ConnectionError):  # a client that gave up waiting
                    self._send(owner._answer(self.path, dict(self.headers), raw))

            def _send(self, answer: Answer) -> None:
                whole = len(answer.body)
                declared = whole if answer.declared is None else answer.declared
                self.send_response(answer.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(declared))
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.body)
                self.wfile.flush()
                self.close_connection |= declared != whole

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

        self._server = Server(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def _answer(self, path: str, headers: dict[str, str], raw: bytes) -> Answer:
        with self._lock:
            seen = Seen(len(self.seen), path, headers, json.loads(raw))
            self.seen.append(seen)
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
        try:
            if path != "/v1/chat/completions":
                return failure(404, f"no route {path}")
            if self.key is not None and headers.get("Authorization") != f"Bearer {self.key}":
                return failure(401, f"bad credentials: {headers.get('Authorization')}")
            if seen.body["model"] != self.model:
                return failure(404, f"The model `{seen.body['model']}` does not exist")
            return self.script(seen)
        finally:
            with self._lock:
                self._in_flight -= 1

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeServer]:
        """Serve in a thread until the block ends."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self.closing.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()

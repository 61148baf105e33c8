"""An S3 server that answers some requests wrongly, as a proxy, a cache or a broken store does.

with serve_s3({"lab": folder}), serve_lies() as store:      s3:// is reached through it
    store.lie = lambda request: "html" if request.number == 3 else None
    store.requests                                          what was asked for since `forget`
"""

import http.client
import os
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

import s3fs

HTML = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body><p>Sign in to the network</p></body></html>"
EMPTY = b'<?xml version="1.0"?><ListBucketResult><Name>lab</Name><KeyCount>0</KeyCount></ListBucketResult>'
ABSENT = b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>'
KINDS = ("html", "empty list", "old list", "cut", "endless", "another run", "absent")
PAGE = "<Contents><Key>{key}</Key><Size>1</Size></Contents>"


@dataclass(frozen=True)
class Asked:
    """A request: its number since `forget`, and whether it is for a listing."""

    number: int
    method: str
    path: str
    is_list: bool


class LyingStore:
    """Answers by a real S3 server, but for what `lie` names.

    Attributes:
        lie: Kind of the wrong answer to a request; None for the right one.
        old_list: Body of an earlier listing.
        names: Prefix of the run that is asked for, and of another one.
        num_sent: Bytes of answers without end.
    """

    def __init__(self, behind: str) -> None:
        self.lie: Callable[[Asked], str | None] = lambda request: None
        self.old_list = EMPTY
        self.names = (b"runs/run/", b"runs/other/")
        self.num_sent = 0
        self.requests: list[Asked] = []
        self.lock = threading.Lock()
        self.behind = urllib.parse.urlsplit(behind).netloc
        self._server = _LyingServer(self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.005,), daemon=True).start()

    def forget(self) -> None:
        """Counts requests from 0 again."""
        self.requests = []

    def close(self) -> None:
        """Ends."""
        self._server.shutdown()
        self._server.server_close()


class _LyingServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, owner: LyingStore) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", 0), _LyingHandler)

    def handle_error(self, request, client_address) -> None:
        """Clients that go away are part of the tests."""


class _LyingHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _LyingServer

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""

    def _answer(self) -> None:
        owner = self.server.owner
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with owner.lock:
            asked = Asked(len(owner.requests), self.command, self.path, "list-type" in self.path)
            owner.requests.append(asked)
        kind = owner.lie(asked)
        reads = self.command in ("GET", "HEAD")
        if kind in (None, "cut", "another run") and (kind is None or reads):
            self._pass_on(kind, body, asked)
        elif kind == "absent":
            self._send(404, {"Content-Type": "application/xml"}, ABSENT)
        elif kind == "endless":
            self._send_without_end()
        elif kind == "endless list":
            page = PAGE.format(key=f"runs/run/step-{asked.number:08d}/manifest.json")
            more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{asked.number}</NextContinuationToken>"
            self._send(200, {}, f"<ListBucketResult><Name>lab</Name>{more}{page}</ListBucketResult>".encode())
        else:  # with status 200, and nothing is done
            bodies = {"empty list": EMPTY, "old list": owner.old_list}
            self._send(200, {"Content-Type": "text/html"}, bodies.get(kind or "", HTML))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _pass_on(self, kind: str | None, body: bytes, asked: Asked) -> None:
        ours, others = self.server.owner.names
        path = self.path
        if kind == "another run":
            for quoted in (ours.decode(), urllib.parse.quote(ours, safe="")):
                path = path.replace(quoted, others.decode())
        connection = http.client.HTTPConnection(self.server.owner.behind)
        connection.request(self.command, path, body, dict(self.headers))
        response = connection.getresponse()
        content = response.read()
        headers = {name: value for name, value in response.getheaders() if name.lower() not in _OWN}
        if kind == "another run":
            content = content.replace(others, ours)
        elif kind == "cut" and asked.is_list:
            found = re.findall(rb"<Contents>.*?</Contents>", content, re.DOTALL)
            for entry in found[len(found) // 2 :]:
                content = content.replace(entry, b"")
        elif kind == "cut":
            content = content[: len(content) // 2]
        self._send(response.status, headers, content)
        connection.close()

    def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        length = headers.pop("Content-Length", "0") if self.command == "HEAD" else str(len(content))
        for name, value in {**headers, "Content-Length": length}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_without_end(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        piece = b"10000\r\n" + b"x" * 2**16 + b"\r\n"
        with suppress(OSError):
            while self.command != "HEAD":
                self.wfile.write(piece)
                self.server.owner.num_sent += 2**16


_OWN = ("transfer-encoding", "connection", "date", "server")


@contextmanager
def serve_lies() -> Iterator[LyingStore]:
    """Stands before the server of `serve_s3`, within it."""
    store = LyingStore(os.environ["AWS_ENDPOINT_URL"])
    try:
        with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": store.url}):
            s3fs.S3FileSystem.clear_instance_cache()
            yield store
    finally:
        store.close()
        s3fs.S3FileSystem.clear_instance_cache()

"""Real servers on the loopback: files over HTTP with faults on demand, and S3.

with serve_folder(folder) as server:
    server.faults.append(Fault(status=500, times=2))      the next two requests fail
    server.faults.append(Fault(hold_after=100))           100 bytes, the rest when server.go is set
    server.stop(); server.start()                         it dies, connections and all, and comes back
    server.requests                                       what was asked for, in order

with serve_s3({"bucket": folder}):                        s3://bucket/... is reached through the environment
"""

import logging
import os
import re
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

from pretrain.utils.net import reserved_port
from tests.helpers.waiting import LIMIT_S

PIECE_BYTES = 4096


@dataclass
class Fault:
    """What goes wrong with some of the next requests.

    Attributes:
        path: Only requests whose path contains this.
        times: So many requests.
        status: The answer is this status.
        drop: The connection is closed without an answer.
        cut_after: It is closed after so many bytes of the body.
        hold_after: After so many bytes of the body nothing more comes until `go` of the server is set.
        flip: The first byte of the body is another.
        whole: The range that was asked for is ignored.
        headers: Headers of the answer, in place of its own.
    """

    path: str = ""
    times: int = 1
    status: int | None = None
    drop: bool = False
    cut_after: int | None = None
    hold_after: int | None = None
    flip: bool = False
    whole: bool = False
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """What was asked for: the first and the last byte are None where no range was."""

    method: str
    path: str
    first: int | None = None
    last: int | None = None
    authorization: str | None = None


class FolderServer:
    """An HTTP/1.1 server of one folder with ranges, in threads of this process, at a port that is kept for it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.go = threading.Event()
        self.lock = threading.Lock()
        self._port = port
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        """Of the folder, without a slash at the end."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listens."""
        self._server = _Server(("127.0.0.1", self._port), self)
        threading.Thread(target=self._server.serve_forever, args=(0.005,), daemon=True).start()

    def stop(self) -> None:
        """Dies: refuses connections, and breaks those that there are."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            server.break_connections()

    def paths(self, method: str = "GET") -> list[str]:
        """The paths that were asked for, in order."""
        with self.lock:
            return [request.path for request in self.requests if request.method == method]

    def note(self, request: Request) -> Fault:
        """Remembers a request; returns what shall go wrong with it."""
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times and fault.path in request.path:
                    fault.times -= 1
                    return fault
        return Fault()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], owner: FolderServer) -> None:
        self.owner = owner
        self._connections: list[socket.socket] = []
        super().__init__(address, _Handler)

    def get_request(self):
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def break_connections(self) -> None:
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address) -> None:
        """Clients that go away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""

    def _answer(self) -> None:
        owner = self.server.owner
        path = urllib.parse.unquote(self.path.partition("?")[0])
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else None
        last = int(asked[2]) if asked and asked[2] else None
        fault = owner.note(Request(self.command, path, first, last, self.headers.get("Authorization")))
        file = owner.folder / path.lstrip("/")
        if fault.drop:
            self.close_connection = True
        elif fault.status:
            self._refuse(fault.status, fault.headers)
        elif not file.is_file():
            self._refuse(404, {})
        else:
            content = file.read_bytes()
            if first is None or fault.whole:
                self._send(200, content, {}, fault)
            elif first >= len(content):
                self._refuse(416, {})
            else:
                end = min(len(content), len(content) if last is None else last + 1)
                place = {"Content-Range": f"bytes {first}-{end - 1}/{len(content)}"}
                self._send(206, content[first:end], place, fault)

    def _refuse(self, status: int, headers: Mapping[str, str]) -> None:
        self._head(status, {"Content-Length": "0", **headers})

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status: int, body: bytes, headers: dict[str, str], fault: Fault) -> None:
        self._head(status, {"Content-Length": str(len(body)), "Accept-Ranges": "bytes", **headers, **fault.headers})
        if self.command == "HEAD":
            return
        if fault.flip:
            body = bytes([body[0] ^ 1]) + body[1:]
        if fault.cut_after is not None:
            body, self.close_connection = body[: fault.cut_after], True
        held = len(body) if fault.hold_after is None else fault.hold_after
        self._write(body[:held])
        if held < len(body):
            self.server.owner.go.wait(LIMIT_S)
            self._write(body[held:])

    def _write(self, body: bytes) -> None:
        for start in range(0, len(body), PIECE_BYTES):
            self.wfile.write(body[start : start + PIECE_BYTES])
        self.wfile.flush()


@contextmanager
def serve_folder(folder: Path) -> Iterator[FolderServer]:
    """Serves a folder over HTTP."""
    # A proxy of the machine that runs the tests stands before no loopback.
    no_proxy = mock.patch.dict(os.environ, {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"})
    with reserved_port(None) as port, no_proxy:
        server = FolderServer(folder, port)
        server.start()
        try:
            yield server
        finally:
            server.go.set()
            server.stop()


@cache
def _start_s3() -> str:
    """Starts the one server of this process, which takes a second and ends with it; returns its address."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"


@contextmanager
def serve_s3(buckets: dict[str, Path]) -> Iterator[None]:
    """Has folders served as S3 buckets; until it ends, the environment of this process and its children leads there.

    Args:
        buckets: Folder by name of its bucket, three letters or more.
    """
    import s3fs

    environment = {
        "AWS_ENDPOINT_URL": _start_s3(),
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "no_proxy": "127.0.0.1",
        "NO_PROXY": "127.0.0.1",
    }
    with mock.patch.dict(os.environ, environment):
        try:
            s3fs.S3FileSystem.clear_instance_cache()  # those of earlier tests know what was there then
            files = s3fs.S3FileSystem(skip_instance_cache=True)
            for bucket, folder in buckets.items():
                files.mkdir(bucket)
                for path in sorted(folder.rglob("*")):
                    if path.is_file():
                        files.pipe_file(f"{bucket}/{path.relative_to(folder).as_posix()}", path.read_bytes())
            yield
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            urllib.request.urlopen(f"{environment['AWS_ENDPOINT_URL']}/moto-api/reset", b"").close()

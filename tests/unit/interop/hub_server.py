"""The Hugging Face hub on the loopback, as far as fetching a snapshot needs it: real HTTP, real status codes."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves repositories, `{"owner/name": {"file": b"content"}}`; `gated` ones are listed, but not given.

    Attributes:
        url: For HF_ENDPOINT.
        asked: Paths of every file that was downloaded.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]], gated: tuple[str, ...] = ()) -> None:
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def do_GET(self) -> None:
                path = self.path.partition("?")[0].removeprefix("/")
                api = path.startswith("api/models/")
                owner, name, *rest = path.removeprefix("api/models/").split("/")
                files = repositories.get(f"{owner}/{name}")
                if files is None:
                    self.answer(404, X_Error_Code="RepoNotFound")
                elif api and rest[:1] == ["tree"]:
                    tree = [
                        {"type": "file", "path": file, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                        for file, body in files.items()
                    ]
                    self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
                elif api:
                    listed = [{"rfilename": file} for file in files]
                    facts = {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": listed}
                    self.answer(200, json.dumps(facts).encode(), Content_Type="application/json")
                elif f"{owner}/{name}" in gated:
                    self.answer(403, X_Error_Code="GatedRepo")
                else:
                    file = "/".join(rest[2:])
                    if self.command == "GET":
                        hub.asked.append(file)
                    etag = f'"{hashlib.sha1(files[file]).hexdigest()}"'
                    self.answer(200, files[file], ETag=etag, X_Repo_Commit=COMMIT)

            do_HEAD = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

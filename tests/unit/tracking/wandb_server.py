"""As much of wandb's server as its client asks for in a run: runs, their history, their branch points, in memory."""

import contextlib
import gzip
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """What runs have sent, by id."""

    def __init__(self) -> None:
        self.address = ""
        self.branch_points: dict[str, dict[str, Any] | None] = {}
        self.history: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def answer(self, path: str, query: dict[str, Any]) -> dict[str, Any]:
        if not path.endswith("/graphql"):
            run = path.removesuffix("/file_stream").rpartition("/")[2]
            for line in query.get("files", {}).get("wandb-history.jsonl", {}).get("content", []):
                self.history[run].append(json.loads(line))
            return {"limits": {}}
        match = re.search(r"(?:query|mutation)\s+(\w+)", query.get("query", ""))
        answer = getattr(self, f"_{match[1] if match else ''}", None)
        return {"data": answer(query["variables"]) if answer else {}}

    def _UpsertBucket(self, given: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        project = {"id": "P", "name": given["project"], "entity": {"id": "E", "name": "me"}}
        is_new = given["name"] not in self.branch_points
        config = json.loads(given["config"] or "{}")
        point = config.get("_wandb", {}).get("value", {}).get("branch_point")
        self.branch_points.setdefault(given["name"], point)  # that of its first start
        names = {"id": given["name"], "name": given["name"], "displayName": given["displayName"]}
        lines = len(self.history[given["name"]])
        return {
            "upsertBucket": {"bucket": {**names, "project": project, "historyLineCount": lines}, "inserted": is_new}
        }

    def _RunResumeStatus(self, given: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        model = {"id": "P", "name": given["project"], "entity": {"id": "E", "name": "me"}, "bucket": None}
        if rows := self.history.get(given["name"]):
            tail = json.dumps([json.dumps(rows[-1])])
            counts = {"logLineCount": 0, "historyLineCount": len(rows), "eventsLineCount": 0}
            texts = {"summaryMetrics": json.dumps(rows[-1]), "historyTail": tail, "eventsTail": "[]", "config": "{}"}
            names = {"id": given["name"], "name": given["name"], "displayName": "name", "tags": [], "notes": ""}
            model["bucket"] = {**names, **counts, **texts, "wandbConfig": json.dumps({"t": 1})}
        return {"model": model}

    def _CreateRunFiles(self, given: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        files = [{"name": name, "uploadUrl": f"{self.address}/upload"} for name in given["files"]]
        return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}


@contextlib.contextmanager
def serve() -> Iterator[WandbServer]:
    """Runs a server on the loopback."""
    state, lock = WandbServer(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            self.close_connection = True  # a client that ends keeps none open
            query: dict[str, Any] = {}
            with contextlib.suppress(ValueError):
                query = json.loads(body)
            with lock:
                content = json.dumps(state.answer(self.path, query)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        state.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()

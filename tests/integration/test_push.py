"""`pretrain export --push`: huggingface_hub against a hub on the loopback; killed, continued, refused in one line.

The server keeps files as the hub does: large ones by LFS, each under its hash, and a commit that names them all. Xet,
the hub's other way, is turned off.
"""

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.helpers.cli import SOURCE_PATH
from tests.helpers.waiting import LIMIT_S
from tests.integration.test_runtimes import write_release

TOKEN = "hf_good"
READER = "hf_reader"
LARGE = 400
"""Bytes from which a file goes by LFS."""


class UploadHub:
    """A hub that models are uploaded to.

    Attributes:
        url: For HF_ENDPOINT.
        repositories: Files of each repository by its name, after commits.
        sent: How often each object was sent whole.
        held: With `hold`, set when one object has arrived and the others wait for ever.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.sent: Counter[str] = Counter()
        self.commits = 0
        self.hold = False
        self.held = threading.Event()
        self._lock = threading.Lock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def answer(self, status: int, value: object) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def body(self) -> bytes:
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def do_PUT(self) -> None:
                oid, content = self.path.rpartition("/")[2], self.body()
                with hub._lock:
                    is_first = not hub.held.is_set()
                    if not hub.hold or is_first:
                        hub.objects[oid] = content
                        hub.sent[oid] += 1
                        hub.held.set()
                if hub.hold and not is_first:
                    self.rfile.read()  # until the client is gone
                else:
                    self.answer(200, {})

            def do_POST(self) -> None:
                content = self.body()
                path = self.path.partition("?")[0].strip("/").split("/")
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                if token not in (TOKEN, READER):
                    self.answer(401, {"error": "Invalid username or password."})
                elif path[-1] == "validate-yaml":
                    self.answer(200, {"errors": [], "warnings": []})
                elif path[-2:] == ["repos", "create"]:
                    asked = json.loads(content)
                    name = f"{asked['organization']}/{asked['name']}"
                    if token == READER or asked["organization"] != "lab":
                        self.answer(403, {"error": "You don't have the rights to create a model under this namespace"})
                        return
                    hub.repositories.setdefault(name, {})
                    assert asked.get("private") or asked.get("visibility") == "private"
                    self.answer(200, {"url": f"{hub.url}/{name}", "id": name, "name": name})
                elif path[-2] == "preupload":
                    files = json.loads(content)["files"]
                    modes = {True: "lfs", False: "regular"}
                    found = [
                        {"path": one["path"], "uploadMode": modes[one["size"] >= LARGE], "shouldIgnore": False}
                        for one in files
                    ]
                    self.answer(200, {"files": found})
                elif path[-2:] == ["objects", "batch"]:
                    objects = [
                        {"oid": one["oid"], "size": one["size"]}
                        | (
                            {}
                            if one["oid"] in hub.objects
                            else {"actions": {"upload": {"href": hub.place(one["oid"])}}}
                        )
                        for one in json.loads(content)["objects"]
                    ]
                    self.answer(200, {"transfer": "basic", "objects": objects})
                elif path[-2] == "commit":
                    hub.commit("/".join(path[2:4]), [json.loads(line) for line in content.splitlines()])
                    address = f"{hub.url}/{'/'.join(path[2:4])}/commit/{'0' * 40}"
                    self.answer(200, {"commitUrl": address, "commitOid": "0" * 40, "success": True})
                else:
                    self.answer(404, {"error": self.path})

            def do_GET(self) -> None:
                self.answer(404, {"error": self.path})

            do_HEAD = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def place(self, oid: str) -> str:
        return f"{self.url}/lfs/{oid}"

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        self.commits += 1
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.repositories[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.repositories[name][value["path"]] = self.objects[value["oid"]]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hub():
    server = UploadHub()
    yield server
    server.close()


def start(hub, home, *arguments, token=TOKEN):
    environment = {
        **os.environ, "PYTHONPATH": SOURCE_PATH, "OMP_NUM_THREADS": "1", "HF_HOME": str(home), "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_TOKEN": token, "NO_PROXY": "127.0.0.1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "pretrain", "export", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_a_killed_upload_is_continued_and_ends_in_one_commit(hub, tmp_path):
    release, out = write_release(tmp_path / "release", "gpt2"), tmp_path / "out"
    arguments = (release, out, "--push", "lab/tiny", "--json")
    hub.hold = True
    process = start(hub, tmp_path / "home", *arguments)
    try:
        assert hub.held.wait(LIMIT_S), process.stderr.read()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert hub.commits == 0 and hub.repositories == {"lab/tiny": {}} and hub.sent.total() == 1
    hub.hold = False
    again = start(hub, tmp_path / "home", *arguments)
    shown, notes = again.communicate(timeout=LIMIT_S)
    assert again.returncode == 0, notes
    assert json.loads(shown)["pushed"] == f"{hub.url}/lab/tiny"
    assert f"note: {out} is an export of it, and is uploaded as it is" in notes
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert hub.commits == 1 and hub.repositories["lab/tiny"] == files
    assert files["README.md"].startswith(b"---\nlibrary_name: transformers\n")
    large = {hashlib.sha256(content).hexdigest() for content in files.values() if len(content) >= LARGE}
    assert len(large) > 1 and hub.sent == dict.fromkeys(large, 1)  # what had arrived was not sent again


REFUSED = [
    ("lab/tiny", "", "lab/tiny: the hub needs a token; set HF_TOKEN to one that may write, or run: hf auth login"),
    ("lab/tiny", "hf_unknown", "lab/tiny: the hub does not accept the token; set HF_TOKEN to a valid one"),
    ("lab/tiny", READER, "lab/tiny: the token may not write to this repository; check the owner, or take a token"),
    ("other/tiny", TOKEN, "other/tiny: the token may not write to this repository; check the owner, or take a token"),
    ("lab/ti ny", TOKEN, "--push: 'lab/ti ny' is not the name of a repository; give OWNER/NAME"),
    ("lab/ti--ny", TOKEN, "--push: Cannot have -- or .. in repo_id: 'lab/ti--ny'."),
]
OPEN = """
import json, os, sys
from pretrain.errors import PretrainError
from pretrain.utils.hub import open_repository
for name, os.environ["HF_TOKEN"] in json.loads(sys.argv[1]):
    try:
        open_repository(name)
    except PretrainError as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_what_may_not_be_written_is_one_line(hub, tmp_path):
    plain = {**os.environ, "PYTHONPATH": SOURCE_PATH, "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url}
    plain |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", OPEN, json.dumps([[name, token] for name, token, _ in REFUSED])]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=LIMIT_S)
    lines = done.stdout.splitlines()
    for line, (_, _, message) in zip(lines, REFUSED, strict=True):
        assert line.startswith(f"ConfigError: {message}"), done.stderr
    assert hub.repositories == {}


@pytest.mark.long
def test_another_folder_is_not_uploaded_in_place_of_the_model(hub, tmp_path):
    release = write_release(tmp_path / "release", "gpt2")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("---\nlibrary_name: transformers\n---\n\nMade from another.\n")
    refused = start(hub, tmp_path / "home", release, tmp_path / "out", "--push", "lab/tiny")
    _, notes = refused.communicate(timeout=LIMIT_S)
    assert refused.returncode == 64 and "exists and is not an empty folder" in notes
    assert hub.repositories == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "ctranslate2"), "decoder.rope_scaling.kind=linear: CTranslate2 computes null in a llama"),
        (("--family", "qwen3"), "qwen3 does not represent this model exactly"),
    ],
)
def test_no_repository_is_made_for_a_model_that_is_refused(options, message, hub, tmp_path):
    pytest.importorskip("ctranslate2")
    release = write_release(tmp_path / "release", "llama, linear")
    refused = start(hub, tmp_path / "home", release, tmp_path / "out", "--push", "lab/tiny", *options)
    _, notes = refused.communicate(timeout=LIMIT_S)
    assert refused.returncode == 64 and message in notes
    assert hub.repositories == {} and not (tmp_path / "out").exists()

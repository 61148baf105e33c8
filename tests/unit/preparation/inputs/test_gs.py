"""Inputs on Google Cloud Storage: the real client, and as much of the server as it asks for."""

import json
import os
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

from pretrain.config.prepare import InputConfig
from pretrain.errors import DataError
from pretrain.preparation.input_parts import plan_parts
from tests.helpers.reading import listing, read, texts

pytestmark = pytest.mark.long
LINES = b"".join(b'{"text": "%d"}\n' % number for number in range(500))


class Bucket(BaseHTTPRequestHandler):
    """The objects of one bucket: what they are, what is in them, and which there are."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    generation = 1

    def log_message(self, format, *arguments):
        """Says nothing."""

    def do_GET(self):
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        key = unquote(url.path.partition("/b/corpus/o")[2].lstrip("/"))
        if not key:
            prefix = query.get("prefix", "")
            rest = {name: name[len(prefix) :] for name in self.objects if name.startswith(prefix)}
            here = [name for name in rest if not query.get("delimiter") or "/" not in rest[name]]
            folders = {prefix + rest[name].partition("/")[0] + "/" for name in rest if name not in here}
            self.answer_json({"items": [self.describe(name) for name in here], "prefixes": sorted(folders)})
        elif key not in self.objects:
            self.answer(404, b"{}")
        elif query.get("alt") == "media":
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
            self.answer(206, self.objects[key][int(asked[1]) : int(asked[2]) + 1])
        else:
            self.answer_json(self.describe(key))

    def describe(self, name):
        size = len(self.objects[name])
        return {"bucket": "corpus", "name": name, "size": str(size), "generation": str(self.generation), "etag": "C=="}

    def answer_json(self, value):
        self.answer(200, json.dumps(value).encode())

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serve(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda request, address: None  # the client drops what it has no use for
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    environment = {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{server.server_address[1]}",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # which would ask Google itself
        "no_proxy": "127.0.0.1",
        "NO_PROXY": "127.0.0.1",
    }
    anonymous = mock.patch.dict("fsspec.config.conf", {"gs": {"token": "anon"}})  # asks nobody for credentials
    with mock.patch.dict(os.environ, environment), anonymous:
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()


@pytest.fixture
def bucket():
    objects = {"t/1.txt": b"one", "t/u/2.txt": b"two", "t/3.log": b"no", "a.jsonl": LINES}
    handler = type("Handler", (Bucket,), {"objects": objects})
    with serve(handler):
        import gcsfs

        gcsfs.GCSFileSystem.clear_instance_cache()
        yield handler
        gcsfs.GCSFileSystem.clear_instance_cache()


def test_files_folders_and_globs_are_read(bucket, monkeypatch):
    monkeypatch.setattr("pretrain.preparation.inputs.remote_files.BLOCK_BYTES", 4000)
    assert texts("gs://corpus/t") == ["one", "two"]
    assert texts("gs://corpus/t/*.txt") == ["one"]
    assert texts("gs://corpus/a.jsonl", part_bytes=3000) == [str(number) for number in range(500)]
    with pytest.raises(DataError, match=r"gs://corpus/none\.txt: no such file or folder; correct the path"):
        listing("gs://corpus/none.txt")


def test_a_file_that_is_replaced_by_one_of_equal_size_is_refused(bucket):
    parts = plan_parts(listing("gs://corpus/a.jsonl"), 1 << 20)
    found = read(parts[0].slices, [InputConfig()])
    next(found)
    bucket.generation = 2
    with pytest.raises(DataError, match=r"gs://corpus/a\.jsonl: the file changed while it was being prepared"):
        list(found)

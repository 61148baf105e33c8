"""Inputs over HTTP, from a real server on the loopback with faults on demand."""

import gzip
import json
import logging
import random
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pyarrow
import pyarrow.parquet
import pytest

from pretrain.config.prepare import InputConfig
from pretrain.errors import DataError
from pretrain.preparation.input_parts import plan_parts
from pretrain.preparation.inputs.opening import zstd
from pretrain.preparation.prepare import prepare
from pretrain.utils import remote
from pretrain.utils.remote import Waits
from tests.helpers.clock import FakeClock
from tests.helpers.corpus import digests
from tests.helpers.prepare_config import prepare_config
from tests.helpers.reading import documents, listing, read, texts
from tests.helpers.servers import Fault, serve_folder
from tests.helpers.waiting import LIMIT_S, make_old
from tests.unit.preparation.readers.test_webdataset import pack

ROWS = ["".join(random.Random(number).choices("abc\u00e9", k=100)) for number in range(60)]
LINES = "".join(json.dumps({"text": row}) + "\n" for row in ROWS).encode()
ALWAYS = 10**9
PATIENT = Waits(0.01, 0.02, LIMIT_S)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "c.jsonl.zst").write_bytes(zstd.compress(LINES))
    (tmp_path / "d.json").write_bytes(b"[" + LINES.rstrip().replace(b"\n", b",") + b"]")
    (tmp_path / "e.tar").write_bytes(pack([(f"{number}.txt", row.encode()) for number, row in enumerate(ROWS[:15])]))
    (tmp_path / "f.txt").write_bytes(LINES)
    pyarrow.parquet.write_table(pyarrow.table({"text": ROWS}), tmp_path / "g.parquet", row_group_size=30)
    (tmp_path / "h.txt").write_bytes(b"")
    return tmp_path


@pytest.fixture
def server(folder, monkeypatch):
    monkeypatch.setattr("pretrain.preparation.inputs.remote_files.WAITS", Waits(0.01, 0.02, 0.1))
    monkeypatch.setattr(remote, "time", FakeClock())  # it is the attempts that count
    monkeypatch.setattr("pretrain.preparation.inputs.remote_files.BLOCK_BYTES", 5000)
    with serve_folder(folder) as server:
        yield server


def ranges(server):
    """The first bytes of the ranges that were asked for."""
    return [request.first for request in server.requests if request.method == "GET" and request.first is not None]


FILES = ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.json", "e.tar", "f.txt", "g.parquet", "h.txt"]


@pytest.mark.parametrize("name", FILES)
def test_every_format_reads_as_it_does_from_a_disk(server, folder, name):
    read = partial(documents, part_bytes=7000)
    assert read(f"{server.url}/{name}") == read(folder / name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "fault", [{"drop": True, "times": 6}, {"status": 503, "times": 3}, {"status": 429}, {"cut_after": 1000, "times": 3}]
)
def test_what_fails_now_and_then_is_read_all_the_same(server, folder, name, fault, monkeypatch):
    monkeypatch.setattr("pretrain.preparation.inputs.remote_files.WAITS", PATIENT)
    files = listing(f"{server.url}/{name}")
    part = plan_parts(files, 1 << 20)[0]
    server.faults.append(Fault(**fault))
    assert [document.text for document in read(part.slices, [InputConfig()])] == texts(folder / name)
    assert server.faults[0].times == 0 or name == "h.txt"  # which has no bytes to cut


def test_a_block_that_breaks_off_is_asked_for_again_and_no_other(server, caplog, monkeypatch):
    monkeypatch.setattr("pretrain.preparation.inputs.remote_files.WAITS", PATIENT)

    def note(request):
        server.requests.append(request)
        return Fault(cut_after=3000) if ranges(server).count(5000) == 1 and request.first == 5000 else Fault()

    server.note = note
    with caplog.at_level(logging.WARNING, "pretrain.utils.remote"):
        assert texts(f"{server.url}/f.txt") == [LINES.decode()]
    assert ranges(server) == [0, 5000, 5000, 10_000]
    assert f"{server.url}/f.txt: ConnectionResetError: broken off after 8000 of" in caplog.text
    assert "; trying again" in caplog.text


def test_blocks_in_a_row_take_two_connections(server):
    assert texts(f"{server.url}/f.txt") == [LINES.decode()]
    assert ranges(server) == [0, 5000]


class Return(FakeClock):
    """A server comes back when it has been waited for so many times."""

    def __init__(self, server, waits):
        super().__init__()
        self._server, self._waits = server, waits

    def sleep(self, seconds):
        super().sleep(seconds)
        self._waits -= 1
        if self._waits == 0:
            self._server.start()


def test_a_server_that_dies_and_returns_is_waited_for(server, monkeypatch):
    monkeypatch.setattr("pretrain.preparation.inputs.remote_files.WAITS", PATIENT)
    monkeypatch.setattr(remote, "time", Return(server, waits=3))
    url = f"{server.url}/a.jsonl"
    found = read(plan_parts(listing(url), 1 << 20)[0].slices, [InputConfig()])
    rows = [next(found).text]
    server.stop()
    rows += [document.text for document in found]
    assert rows == ROWS


def test_a_server_that_stays_away_is_one_error_that_names_the_file(server, monkeypatch):
    url = f"{server.url}/a.jsonl"
    found = read(plan_parts(listing(url), 1 << 20)[0].slices, [InputConfig()])
    next(found)
    server.stop()
    with pytest.raises(OSError, match=r"URLError: .*refused, and no answer for 0\.1 s") as caught:
        list(found)
    assert caught.value.filename == url and caught.value.errno
    with pytest.raises(
        DataError, match=r"a\.jsonl: cannot be read: .*, and no answer for 0\.1 s; fix the access problem and retry"
    ):
        listing(url)


@pytest.mark.parametrize("name", [name for name in FILES if name != "g.parquet"])
def test_a_server_without_ranges_is_read_as_one_stream(server, folder, name):
    server.faults.append(Fault(whole=True, times=ALWAYS))
    (file,) = listing(f"{server.url}/{name}")
    assert not file.is_cuttable
    assert documents(f"{server.url}/{name}", part_bytes=7000) == documents(folder / name)


def test_a_server_without_ranges_that_breaks_off_is_read_again_from_the_beginning(server, folder, monkeypatch):
    monkeypatch.setattr("pretrain.preparation.inputs.remote_files.WAITS", PATIENT)
    server.faults += [
        Fault(path="none"),
        Fault(whole=True, times=1),  # the question whether there are ranges
        Fault(whole=True, cut_after=7000),  # one stream, of which the first block is whole
        Fault(whole=True, cut_after=12_000),
        Fault(whole=True, times=ALWAYS),
    ]
    server.note, original = lambda request: original(request) if request.method == "GET" else Fault(), server.note
    assert texts(f"{server.url}/a.jsonl") == ROWS
    assert sum(fault.times for fault in server.faults[1:-1]) == 0


def test_parquet_over_a_server_without_ranges_is_read_too(server, folder):
    server.faults.append(Fault(whole=True, times=ALWAYS))
    assert texts(f"{server.url}/g.parquet") == ROWS


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (404, "no such file or folder; correct the URL"),
        (410, "no such file or folder"),
        (403, "cannot be read: the server answers 403 Forbidden; fix the access problem and retry"),
        (400, "cannot be read: the server answers 400 Bad Request"),
    ],
)
def test_what_will_not_pass_is_refused_at_once(server, status, message):
    server.faults.append(Fault(status=status, times=ALWAYS))
    with pytest.raises(DataError, match=rf"/a\.jsonl: {message}"):
        listing(f"{server.url}/a.jsonl")
    # HEAD, and GET in case the server knows no HEAD
    assert len(server.requests) == (1 if status in (404, 410) else 2)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/a.jsonl", "a.jsonl", "data:,x"])
def test_a_redirect_that_leads_nowhere_is_refused_at_once(server, target):
    server.faults.append(Fault(path="a.jsonl", status=302, times=ALWAYS, headers={"Location": target}))
    with pytest.raises(
        DataError, match=r"/a\.jsonl: cannot be read: [^\n]*; fix the access problem and retry"
    ) as caught:
        listing(f"{server.url}/a.jsonl")
    assert "no answer for" not in str(caught.value)


@pytest.mark.parametrize("length", ["-5", "x", "9" * 5000, "\u0663".encode().decode("latin-1"), ""])
def test_a_length_that_is_no_number_is_none(server, length):
    server.faults.append(Fault(path="a.jsonl", times=ALWAYS, headers={"Content-Length": length}))
    with pytest.raises(DataError, match=r"/a\.jsonl: the server does not say how large the file is"):
        listing(f"{server.url}/a.jsonl")


def test_a_range_whose_numbers_have_no_end_is_not_the_one_asked_for(server):
    huge = f"bytes 5000-{'9' * 5000}/{'9' * 5000}"
    files = listing(f"{server.url}/f.txt")
    server.faults.append(Fault(path="f.txt", times=ALWAYS, headers={"Content-Range": huge}))
    with pytest.raises(OSError, match="answers with another range than the one asked for"):
        list(read(plan_parts(files, 1 << 20)[0].slices, [InputConfig()]))


def test_many_files_are_asked_for_at_once_and_come_in_order(server, folder):
    names = [f"{number}.jsonl" for number in range(40)]
    for name in names:
        (folder / name).write_text(json.dumps({"text": name}) + "\n")
    urls = [f"{server.url}/{name}" for name in names]
    assert [file.path for file in listing(*urls)] == urls
    server.faults.append(Fault(path="/17.jsonl", status=403, times=ALWAYS))
    with pytest.raises(DataError, match=r"/17\.jsonl: cannot be read: the server answers 403"):
        listing(*urls)


def test_secrets_in_a_url_are_sent_and_not_told(server):
    host = server.url.removeprefix("http://")
    url = f"http://user:hunter2@{host}/a.jsonl?X-Signature=hunter3"
    (file,) = listing(url)
    assert (file.format, file.shown) == ("jsonl", f"{server.url}/a.jsonl")
    assert texts(url) == ROWS
    assert all(request.authorization for request in server.requests)
    server.faults.append(Fault(status=403, times=ALWAYS))
    with pytest.raises(DataError) as caught:
        listing(url)
    assert "hunter" not in str(caught.value)
    server.faults[0].status = 500
    with pytest.raises(DataError, match="the server answers 500") as caught:
        listing(url)
    assert "hunter" not in str(caught.value)


def test_a_file_that_changes_size_is_refused(server, folder):
    found = read(plan_parts(listing(f"{server.url}/a.jsonl"), 1 << 20)[0].slices, [InputConfig()])
    next(found)
    (folder / "a.jsonl").write_bytes(LINES + LINES)
    with pytest.raises(DataError, match=r"/a\.jsonl: the file changed while it was being prepared"):
        list(found)


def test_a_paired_file_may_be_elsewhere(server, folder):
    (folder / "a.en").write_text("one\ntwo\n")
    (folder / "a.de").write_text("eins\nzwei\n")
    found = documents(folder / "a.en", paired_path=f"{server.url}/a.de", kind="pairs")
    assert [(document.source, document.text) for document in found] == [("one", "eins"), ("two", "zwei")]


def test_a_bad_line_of_a_later_part_is_named_by_its_byte(server, folder):
    (folder / "a.jsonl").write_bytes(LINES + b"{}\n")
    with pytest.raises(DataError, match=rf"/a\.jsonl, byte {len(LINES)}: field 'text' is absent"):
        texts(f"{server.url}/a.jsonl", part_bytes=10_000)
    with pytest.raises(DataError, match=rf"/a\.jsonl:{len(ROWS) + 1}: field 'text' is absent"):
        texts(f"{server.url}/a.jsonl")


def test_prepared_shards_are_those_of_the_files_on_a_disk_though_the_server_fails_for_a_while(server, folder):
    names = ["a.jsonl", "b.jsonl.gz", "e.tar"]
    options = {"vocab_size": 300, "split": "hash:0.2", "part_bytes": 3000}
    prepare(prepare_config(folder / "disk", [folder / name for name in names], **options), processes=1)
    tokenizer = str(folder / "disk/tokenizer.json")

    def run(name, root, processes):
        inputs = [f"{root}/{name}" for name in names]
        given = {**options, "vocab_size": None, "tokenizer": tokenizer}
        prepare(prepare_config(folder / name, inputs, **given), processes=processes)

    server.faults += [Fault(path="e.tar", times=1, cut_after=ALWAYS), Fault(path="e.tar", status=500, times=ALWAYS)]
    with pytest.raises(DataError, match=r"/e\.tar: cannot be read: the server answers 500 .*; finished parts are kept"):
        run("web", server.url, 1)
    assert len(list((folder / "web/parts").iterdir())) > 2
    server.faults.clear()
    run("web", server.url, 2)
    found, expected = digests(folder / "web"), digests(folder / "disk")
    assert found.pop("prepare.json") != expected.pop("prepare.json")
    assert found == expected


# The server of the standard library: no ranges, times of change, and bodies whose length is not told.


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder; under /unsized, without lengths."""

    def log_message(self, format, *arguments):
        """Says nothing."""

    def end_headers(self):
        if self.path.startswith("/unsized"):
            self._headers_buffer = [line for line in self._headers_buffer if not line.startswith(b"Content-Length")]
        super().end_headers()


@contextmanager
def standard_server(folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_time_of_change_tells_versions_apart(server, folder):
    with standard_server(folder) as url:
        found = read(plan_parts(listing(f"{url}/a.jsonl"), 1 << 20)[0].slices, [InputConfig()])
        assert next(found).text == ROWS[0]
        (folder / "a.jsonl").write_bytes(LINES[::-1])
        make_old(folder / "a.jsonl", 100)
        with pytest.raises(DataError, match=r"/a\.jsonl: the file changed while it was being prepared"):
            list(found)


def test_a_file_of_unknown_size_is_refused(server, folder):
    (folder / "unsized").mkdir()
    (folder / "unsized/a.jsonl").write_bytes(LINES)
    with (
        standard_server(folder) as url,
        pytest.raises(DataError, match=r"/unsized/a\.jsonl: the server does not say how large the file is; download"),
    ):
        listing(f"{url}/unsized/a.jsonl")

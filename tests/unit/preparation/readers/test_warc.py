"""Web archives: their pages, and what in them is no page, as Common Crawl and wget write them."""

import gzip
import io

import pytest

from pretrain.errors import ConfigError, DataError, LaunchError
from pretrain.preparation.inputs import listing as listing_module
from pretrain.preparation.inputs.opening import zstd
from tests.helpers.reading import documents, listing

BODY = "<p>A paragraph that is long enough to be the content of a page, as it has some words.</p>"


def page(text):
    """An HTML page with a menu and a footer around its content."""
    menu = "<nav><ul><li><a href='/'>Home</a></li></ul></nav>"
    return f"<html><head><title>T</title></head><body>{menu}<main>{text}</main><footer>Imprint</footer></body></html>"


def record(kind, content, target="http://a.example/x", **headers):
    """The bytes of a record."""
    fields = {"WARC-Type": kind, "WARC-Target-URI": target, "WARC-Date": "2026-01-02T03:04:05Z", **headers}
    lines = "".join(f"{key.replace('_', '-')}: {value}\r\n" for key, value in fields.items())
    head = f"WARC/1.0\r\n{lines}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content + b"\r\n\r\n"


def response(body, media_type="text/html", status="200 OK", more="", **options):
    """A record of an answer of a server."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {media_type}\r\n{more}\r\n".encode()
    return record("response", head + body, Content_Type="application/http; msgtype=response", **options)


def write(path, records):
    """Writes an archive, a member a record if its name says gzip."""
    path.write_bytes(b"".join(map(gzip.compress, records) if path.suffix == ".gz" else records))
    return path


def kept(path, **options):
    """The texts of the pages."""
    return [one.text for one in documents(path, **options) if one.refused is None]


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz", "a.warc.zst"])
def test_pages_of_an_archive_are_its_main_content_in_order_with_their_addresses(tmp_path, name):
    records = [
        record("warcinfo", b"software: a crawler\r\n"),
        record("request", b"GET / HTTP/1.1\r\n\r\n"),
        response(page("<h1>One</h1>" + BODY).encode(), target="<http://a.example/1>"),
        record("metadata", b"fetchTimeMs: 12\r\n"),
        response(page("<h1>Two</h1>" + BODY).encode(), target="http://a.example/2"),
    ]
    path = write(tmp_path / name, records)
    if name.endswith("zst"):
        path.write_bytes(zstd.compress(b"".join(records)))
    found = documents(path, fields=("url", "date", "media_type"))
    assert [one.text.splitlines()[0] for one in found] == ["One", "Two"]
    assert all("Home" not in one.text and "Imprint" not in one.text for one in found)
    assert found[0].fields == {
        "url": "http://a.example/1",
        "date": "2026-01-02T03:04:05Z",
        "media_type": "text/html",
    }
    assert sum(one.consumed_bytes for one in found) <= path.stat().st_size


def test_what_is_no_page_of_text_is_counted_and_not_read(tmp_path):
    path = write(
        tmp_path / "a.warc.gz",
        [
            response(b"\x89PNG", "image/png"),
            response(page(BODY).encode(), status="404 Not Found"),
            response(b"%PDF", "application/pdf"),
            record("response", b"a.example. 300 IN A 127.0.0.1", Content_Type="text/dns"),
            response(b"x" * 5000),
            response(b"plain words", "text/plain; charset=utf-8"),
            record("revisit", b"HTTP/1.1 200 OK\r\n\r\n"),
        ],
    )
    found = documents(path, max_document_bytes=2000)
    assert [one.refused for one in found] == ["not_a_page"] * 5 + [None]
    assert found[-1].text == "plain words"


def test_plain_text_of_a_wet_file_is_kept_as_it_is(tmp_path):
    text = "Two lines,\nas they are.\n"
    path = write(tmp_path / "a.warc.wet.gz", [record("conversion", text.encode(), Content_Type="text/plain")])
    assert kept(path) == [text]


@pytest.mark.parametrize(
    ("media_type", "body"),
    [
        ("text/html; charset=iso-8859-1", page(f"<h1>caf\u00e9</h1>{BODY}").encode("latin-1")),
        ("text/html", page(f"<meta charset='windows-1252'><h1>caf\u00e9</h1>{BODY}").encode("cp1252")),
        ("text/html; charset=latin1", b"\xef\xbb\xbf" + page(f"<h1>caf\u00e9</h1>{BODY}").encode()),
        ("text/html; charset=utf-8", page(f"<h1>caf\u00e9</h1>{BODY}\xff").encode("utf-8", "surrogateescape")),
        *(
            (f"text/html; charset={name}", page(f"<meta charset='utf-8'><h1>caf\u00e9</h1>{BODY}").encode())
            for name in ("foo", "utf8mb4", "punycode", "zlib", "idna", "u\x7ft\\f-8")
        ),
        ("text/html", ("\ufeff" + page(f"<h1>caf\u00e9</h1>{BODY}")).encode("utf-16-le")),
    ],
)
def test_a_page_is_decoded_by_its_mark_its_server_or_itself(tmp_path, media_type, body):
    assert kept(write(tmp_path / "a.warc", [response(body, media_type)]))[0].startswith("caf\u00e9\n")


def test_a_page_nested_deeper_than_browsers_keep_is_none(tmp_path):
    bodies = [
        "<div><p>x" * 50_000,
        "<div>" * 600 + BODY + "</div>" * 600,
        "<div>" * 400 + BODY + "</div>" * 400,
        BODY + "<script>" + "'<div>'" * 3000 + "</script>",
        "<div><br>" + BODY + "</div>" * 3 + ("<div><b>x</b></div>" * 1000),
    ]
    found = documents(write(tmp_path / "a.warc", [response(page(body).encode()) for body in bodies]))
    assert [one.refused for one in found] == ["not_a_page", "not_a_page", None, None, None]


def test_bodies_that_were_sent_in_chunks_or_compressed_are_put_together(tmp_path):
    body = page(BODY).encode()
    packed = gzip.compress(body)
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (packed[:40], packed[40:])) + b"0\r\n\r\n"
    more = "Transfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n"
    texts = kept(write(tmp_path / "a.warc", [response(body), response(chunks, more=more)]))
    assert texts[0] == texts[1] and texts[0].startswith("A paragraph")


def test_a_body_that_unpacks_to_more_than_the_limit_is_no_page(tmp_path):
    packed = gzip.compress(b"<p>" + b"a " * 2**20)
    path = write(tmp_path / "a.warc", [response(packed, more="Content-Encoding: gzip\r\n")])
    assert [one.refused for one in documents(path, max_document_bytes=2**16)] == ["not_a_page"]


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
@pytest.mark.parametrize("left", [1, 30, 400])
def test_an_archive_that_was_cut_off_is_refused_with_the_place_of_the_record(tmp_path, name, left):
    first = response(page(BODY).encode())
    path = write(tmp_path / name, [first, response(page(" ".join(map(str, range(500)))).encode())])
    second = len(gzip.compress(first)) if name.endswith("gz") else len(first)
    path.write_bytes(path.read_bytes()[: second + left])
    with pytest.raises(DataError, match=r"cut off|truncated|no record begins") as caught:
        documents(path)
    place = int(caught.value.where.partition("byte ")[2].split()[0])
    assert caught.value.where.startswith(str(path)) and place >= len(first)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n<p>no archive</p>", "not a WARC: no record begins here"),
        (b"WARC/1.0\r\nContent-Length: x\r\n\r\n", "a record whose Content-Length is 'x'"),
        (b"WARC/1.0\r\nWARC-Type: response\r\n\r\n", "a record whose Content-Length is ''"),
        (b"WARC/1.0\r\nWARC-Type: resp", "cut off in the headers"),
        (b"WARC/1.0\r\nA: " + b"b" * 2**20, "headers without an end"),
    ],
)
def test_what_is_no_archive_is_refused_with_its_place(tmp_path, content, what):
    good = response(page(BODY).encode())
    path = write(tmp_path / "a.warc", [good, content])
    with pytest.raises(DataError, match=what) as caught:
        documents(path)
    assert caught.value.where == f"{path}, byte {len(good)}"


def test_archives_hold_text_and_need_their_package(tmp_path, monkeypatch):
    path = write(tmp_path / "a.warc", [response(page(BODY).encode())])
    with pytest.raises(ConfigError, match="format=warc holds no pairs"):
        listing(path, kind="pairs")
    monkeypatch.setattr(listing_module, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"web archives are read by resiliparse, .*install -e '\.\[web\]'"):
        listing(path)


def test_an_archive_by_another_writer_is_read_alike(tmp_path):
    from fastwarc.warc import WarcRecord

    stream = io.BytesIO()
    raw = response(page(BODY).encode())
    WarcRecord.from_bytes(raw).write(stream)
    path = tmp_path / "b.warc"
    path.write_bytes(stream.getvalue())
    assert kept(path) == kept(write(tmp_path / "a.warc", [raw]))

import gzip
import io
import json
import os
import tarfile

import pytest
import webdataset

from pretrain.errors import DataError
from pretrain.preparation.readers.webdataset import split_name
from tests.helpers.reading import documents, texts

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def pack(members, form=tarfile.PAX_FORMAT):
    """Makes a tar of (name, content); a content of None makes a folder."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            info.size = len(content or b"")
            tar.addfile(info, io.BytesIO(content or b""))
    return sink.getvalue()


def write(path, members, form=tarfile.PAX_FORMAT):
    path.write_bytes(pack(members, form))
    return path


SAMPLES = [
    ("./", None),
    ("a/1.txt", b"one\r\n"),
    ("a/1.json", b'{"language": "en"}'),
    ("a/1.jpg", bytes(100_000)),
    ("a/2.json", b'{"text": "two", "language": "de"}'),
    ("a/.hidden.txt", b"no"),
    ("README", b"no"),
    ("b/1.jsonl", b'{"text": "three"}\n\n{"text": "four"}'),
    ("b/3.txt", b""),
]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_samples_are_documents_in_order(tmp_path, form, compress):
    path = tmp_path / ("a.tar" if compress is bytes else "a.tar.gz")
    path.write_bytes(compress(pack(SAMPLES, form)))
    found = [(document.text, document.fields) for document in documents(path, fields=("language",))]
    assert found == [
        ("one\r\n", {"language": "en"}),
        ("two", {"language": "de"}),
        ("three", {}),
        ("four", {}),
        ("", {}),
    ]


def test_what_webdataset_writes_is_read(tmp_path):
    rows = [{"__key__": f"{number:05d}", "json": {"text": f"\u00e9 {number}"}} for number in range(50)]
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as sink:
        for row in rows:
            sink.write(row)
    assert texts(tmp_path / "a.tar") == [row["json"]["text"] for row in rows]


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_long_and_foreign_names_are_keys_like_others(tmp_path, form):
    names = [f"{'d' * 90}/{'e' * 90}/\u00e9{number}" for number in range(3)]
    members = [(f"{name}.{kind}", b'{"n": 1}') for name in names for kind in ("txt", "json")]
    assert texts(write(tmp_path / "a.tar", members, FORMATS[form])) == ['{"n": 1}'] * 3


def test_pairs_and_records_come_from_json(tmp_path):
    record = {"source": "a", "target": "b", "prompt": "p", "response": "r"}
    content = json.dumps(record).encode()
    path = write(tmp_path / "a.tar", [("1.json", content), ("2.jsonl", content + b"\n" + content)])
    assert [(document.source, document.text) for document in documents(path, kind="pairs")] == [("a", "b")] * 3
    assert [document.text for document in documents(path, kind="records")] == ["pr"] * 3


def test_nothing_but_text_and_json_is_decoded(tmp_path):
    mark = tmp_path / "was-run"
    evil = f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()
    path = write(tmp_path / "a.tar", [("1.pyd", evil), ("1.pickle", evil), ("1.npy", evil), ("1.txt", b"text")])
    assert texts(path) == ["text"]
    assert not mark.exists()


def test_consumed_bytes_add_up_to_the_members(tmp_path):
    content = pack([(f"{number}.txt", bytes(number)) for number in range(100)])
    (tmp_path / "a.tar").write_bytes(content)
    consumed = sum(document.consumed_bytes for document in documents(tmp_path / "a.tar"))
    assert 0 <= len(content) - consumed <= tarfile.RECORDSIZE + tarfile.BLOCKSIZE
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(1000))
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(pack([("1.jsonl", lines), ("2.jsonl", lines)])))
    found = documents(tmp_path / "b.tar.gz")
    assert len(found) == 2000
    assert sum(document.consumed_bytes for document in found) <= (tmp_path / "b.tar.gz").stat().st_size


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a/b.tar.gz", ("a/b", "tar.gz")),
        ("a.b/c.TXT", ("a.b/c", "txt")),
        ("a/c", ("", "")),
        ("a/.c.txt", ("", "")),
    ],
)
def test_a_key_ends_at_the_first_dot_of_the_last_part(name, parts):
    assert split_name(name) == parts


@pytest.mark.parametrize(
    ("members", "kind", "message"),
    [
        (
            [("1.txt", b"a"), ("2.jpg", b"b"), ("2.cls", b"1")],
            "text",
            r"byte 1024: sample '2' has no text \(it has \.jpg",
        ),
        ([("1.txt", b"a"), ("1.txt", b"b")], "text", r"byte 0: sample '1' has two members \.txt; give each"),
        ([("1.txt", b"a"), ("1.jsonl", b"{}")], "text", r"a\.tar/1\.jsonl:1: field 'text' is absent"),
        ([("1.jsonl", b""), ("1.txt", b"b")], "text", r"byte 0: sample '1' has two texts \(it has \.txt, \.jsonl\)"),
        ([("1.txt", b"a\xff")], "text", r"a\.tar/1\.txt, byte 1: invalid UTF-8: byte 0xff"),
        ([("1.txt", b"a"), ("1.json", b"{")], "text", r"byte 0: sample '1': not JSON"),
        ([("1.json", b"[]")], "text", r"byte 0: sample '1': not a JSON object"),
        ([("1.json", b'{"text": 1}')], "text", r"byte 0: sample '1': field 'text' is a number, not a string"),
        ([("1.txt", b"a")], "pairs", r"byte 0: sample '1': a \.txt member holds no pairs; give \.json"),
    ],
)
def test_a_malformed_sample_is_named_with_its_place(tmp_path, members, kind, message):
    with pytest.raises(DataError, match=rf"a\.tar{message}|{message}"):
        documents(write(tmp_path / "a.tar", members), kind=kind)


def test_a_tar_that_is_cut_off_anywhere_is_refused(tmp_path):
    content = pack([("1.txt", b"a" * 700), ("1.jpg", b"b" * 700), ("2.txt", b"c" * 512)], tarfile.USTAR_FORMAT)
    end = 1536 + 1536 + 1024
    assert not any(content[end:])
    for size in (0, 100, 512, 513, 1536, 2048, 3000, 3072, 4000, end, end + 500):
        (tmp_path / "a.tar").write_bytes(content[:size])
        with pytest.raises(DataError, match=r"a\.tar, byte \d+: the tar is cut off: it has no end mark; copy"):
            texts(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(content[: end + 512])
    assert len(texts(tmp_path / "a.tar")) == 2


def damaged_at(content, offset, replacement):
    return content[:offset] + replacement + content[offset + len(replacement) :]


def linked(kind):
    info = tarfile.TarInfo("1.txt")
    info.type, info.linkname = kind, os.devnull
    return info.tobuf()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a tar" * 100, "byte 0: damaged, or not a tar: "),
        (
            damaged_at(pack([("1.txt", b"a"), ("2.txt", b"b")]), 1030, b"x"),
            "byte 1024: damaged, or not a tar: bad checksum",
        ),
        (
            pack([("1.txt", b"a")]) + pack([("2.txt", b"b")]),
            "data after the end of the tar; give joined tars one by one",
        ),
        (linked(tarfile.SYMTYPE), "byte 0: member '1.txt' is not a regular file; make the tar without links"),
        (linked(tarfile.LNKTYPE), "byte 0: member '1.txt' is not a regular file"),
        (linked(tarfile.CHRTYPE), "byte 0: member '1.txt' is not a regular file"),
        (linked(tarfile.GNUTYPE_SPARSE), "byte 0: member '1.txt' is not a regular file"),
    ],
)
def test_a_tar_that_is_not_what_it_should_be_is_refused(tmp_path, content, message):
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / "a.tar")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (b"20 GNU.sparse.major=", "damaged: malformed attributes"),
        (b"nonsense\n", "damaged: malformed attributes"),
        (b"22 GNU.sparse.major=1\n", "a sparse member; make the tar without --sparse"),
        (b"14 size=many!\n", "damaged: malformed attributes"),
        (b"0 size=many!\n", "damaged: malformed attributes"),
        (b"12 size=-99\n", "damaged: malformed attributes"),
        (b"8 a=bcd\n-8 a=bcd\n", "damaged: malformed attributes"),
        (b"9" * 30 + b" a=b\n", "damaged: malformed attributes"),
    ],
)
def test_malformed_attributes_are_refused(tmp_path, attributes, message):
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, len(attributes)
    content = header.tobuf(tarfile.USTAR_FORMAT) + attributes.ljust(512, b"\0") + pack([("1.txt", b"a")])
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / "a.tar")

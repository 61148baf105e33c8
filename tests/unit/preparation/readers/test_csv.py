"""CSV and TSV: what Python's csv wrote is read back, and what is none is named with its line."""

import bz2
import csv
import gzip
import io
import lzma

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.errors import DataError
from tests.helpers.reading import documents, texts

FIELDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ['"', '","', "a\r\nb", "\n", "'"]
)


@given(rows=st.lists(st.tuples(FIELDS, FIELDS), max_size=5), delimiter=st.sampled_from(",;\t|"), bom=st.booleans())
def test_what_was_written_is_read(tmp_path_factory, rows, delimiter, bom):
    rows = [row for row in rows if any(row) and row != ("text", "label")]
    written = io.StringIO()
    csv.writer(written, delimiter=delimiter).writerows([("text", "label"), *rows])
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_bytes(b"\xef\xbb\xbf" * bom + written.getvalue().encode())
    found = documents(path, fields=("label",), part_bytes=7)
    assert [(one.text, one.fields["label"]) for one in found] == rows
    assert sum(one.consumed_bytes for one in found) <= path.stat().st_size


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_tables_of_tabs_and_compressed_ones(tmp_path, compress):
    suffix = {gzip.compress: ".gz", bz2.compress: ".bz2", lzma.compress: ".xz"}.get(compress, "")
    content = b'label\ttext\n1\tone, "two"\n\n0\t"three\nfour"\nlabel\ttext\n1\tfive'
    (tmp_path / f"a.tsv{suffix}").write_bytes(compress(content))
    found = documents(tmp_path, kind="classes")
    assert [(one.text, one.labels[0].name) for one in found] == [
        ('one, "two"', "1"),
        ("three\nfour", "0"),
        ("five", "1"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text,text\na,b\n", r"a\.csv: 2 columns have the name 'text'; rename one"),
        (b"body,id\na,b\n", r"a\.csv: there is no column 'text'; columns: body, id; choose another with --text-field"),
        (b"text,id\na,1\nb\n", r"a\.csv:3: a row of 1 fields, where the header has 2; put the field in quotes"),
        (b"text,id\na,1\nb,c,2\n", r"a\.csv:3: a row of 3 fields"),
        (b'text,id\n"a,1\nb,2\n', r"a\.csv:2: not CSV: unexpected end of data"),
        (b'text,id\n"a"b,1\n', r"a\.csv:2: not CSV: ',' expected after '\"'"),
        (b'text,id\n"a\nsch\xf6n",1\n', r"a\.csv, byte 14: invalid UTF-8: byte 0xf6"),
        (b"text,id\n" + b"x" * 60 + b",1\n", r"a\.csv:2: a row is longer than max_document_bytes=50"),
        (b'text,id\n"' + b"x\n" * 60 + b'",1\n', r"a\.csv:2: a row is longer than max_document_bytes=50"),
        ("text,id\na,1\n".encode("utf-16"), r"a\.csv, byte 0: UTF-16 by its byte-order mark"),
    ],
)
def test_what_is_no_table_is_named_with_its_line(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / "a.csv", max_document_bytes=50)


def test_bad_rows_are_left_out_on_request(tmp_path):
    rows = [
        b"good 0,1",
        b"bad",
        b'"bad"x,1',
        b"good 1,2",
        b"b\xf6d,3",
        b"x" * 60 + b",4",
        b'"good\n2",5',
        b'"open,6',
        b"",
    ]
    (tmp_path / "a.csv").write_bytes(b"text,id\n" + b"\n".join(rows))
    found = documents(tmp_path / "a.csv", max_document_bytes=50, on_error="skip")
    assert [one.text for one in found if not one.refused] == ["good 0", "good 1", "good\n2"]
    reasons = ["bad_field", "bad_field", "undecodable", "too_large", "bad_field"]
    assert [one.refused for one in found if one.refused] == reasons


def test_an_empty_file_has_no_documents_and_a_field_of_megabytes_is_one(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"")
    (tmp_path / "b.csv").write_bytes(b'text\n"' + b"x" * 2**20 + b'"\n')
    assert list(map(len, texts(tmp_path))) == [2**20]

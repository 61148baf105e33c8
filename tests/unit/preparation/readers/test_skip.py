"""Bad items with `on_error: skip`: what stays, and how each is counted; and the same items with `stop`."""

import gzip
import json
import random
import tarfile

import pyarrow
import pyarrow.parquet
import pytest

from pretrain.errors import DataError
from pretrain.preparation.inputs.opening import zstd
from tests.helpers.reading import documents
from tests.unit.preparation.readers.test_warc import page, response
from tests.unit.preparation.readers.test_webdataset import pack

BAD_LINES = [
    (b'{"text": "a"', "not_json"),
    (b"[1]", "not_json"),
    (b'{"text": null}', "bad_field"),
    (b'{"id": 1}', "bad_field"),
    (b'{"text": ["a"]}', "bad_field"),
    (b'{"text": "\\ud83d"}', "unpaired_surrogate"),
    (b'{"text": "sch\xf6n"}', "undecodable"),
    (b'{"text": "' + b"x" * 100 + b'"}', "too_large"),
]
GOOD = [f'{{"text": "good {number}"}}'.encode() for number in range(len(BAD_LINES) + 1)]
JSONL = b"\n".join(line for good, (bad, _) in zip(GOOD, BAD_LINES, strict=False) for line in (good, bad))
JSONL += b"\n" + GOOD[-1]
REASONS = [reason for _, reason in BAD_LINES]
LONG = "".join(random.Random(0).choices("abcdefgh ", k=400_000))


def read_both(path, reasons, **options):
    """Returns the texts that stay; each of the others is an error where errors stop."""
    found = documents(path, on_error="skip", max_document_bytes=80, **options)
    assert [document.refused for document in found if document.refused] == reasons
    with pytest.raises(DataError) as caught:
        documents(path, max_document_bytes=80, **options)
    bad = next(document for document in found if document.refused)
    assert bad.error == f"{caught.value.where}: {caught.value.what}"
    return [document.text for document in found if not document.refused]


def good_texts(number):
    return [f"good {number}" for number in range(number)]


@pytest.mark.parametrize("part_bytes", [40, 1 << 20])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_lines_that_are_no_records(tmp_path, name, part_bytes):
    path = tmp_path / name
    path.write_bytes({"gz": gzip.compress, "zst": zstd.compress}.get(name.rpartition(".")[2], bytes)(JSONL))
    assert read_both(path, REASONS, part_bytes=part_bytes) == good_texts(len(GOOD))
    found = documents(path, part_bytes=part_bytes, on_error="skip", max_document_bytes=80)
    assert sum(document.consumed_bytes for document in found) == path.stat().st_size
    bad = [document for document in found if document.refused and document.refused != "undecodable"]
    places = [document.error.partition(": ")[0] for document in bad]
    if name == "a.jsonl":
        assert places == [f"{path}:{2 * number}" for number, reason in enumerate(REASONS, 1) if reason != "undecodable"]


def test_records_of_a_list(tmp_path):
    path = tmp_path / "a.json"
    kept = [index for index, (_, reason) in enumerate(BAD_LINES) if reason != "not_json"]
    items = [line for index in kept for line in (GOOD[index], BAD_LINES[index][0])]
    path.write_bytes(b"[" + b",\n".join(items) + b"]")
    # A wrong byte is a surrogate there.
    reasons = [REASONS[index].replace("undecodable", "unpaired_surrogate") for index in kept]
    found = documents(path, on_error="skip", max_document_bytes=80)
    assert [document.refused for document in found if document.refused] == reasons
    assert [document.text for document in found if not document.refused] == [f"good {index}" for index in kept]
    path.write_bytes(b"[" + GOOD[0] + b", {oops}, " + GOOD[1] + b"]")
    assert read_both(path, ["not_json"]) == ["good 0"]


def test_rows_of_parquet_and_a_damaged_row_group(tmp_path):
    path = tmp_path / "a.parquet"
    rows = ["a", None, "b", "x" * 100, "c", "d"]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path, row_group_size=2, use_dictionary=False)
    assert read_both(path, ["bad_field", "too_large"]) == ["a", "b", "c", "d"]
    content = bytearray(path.read_bytes())
    start = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content[start : start + 20] = bytes(20)
    path.write_bytes(content)
    for part_bytes in (40, 1 << 20):
        found = documents(path, part_bytes=part_bytes, on_error="skip")
        assert [document.text for document in found if not document.refused] == ["a", "c", "d"]
        assert [(one.refused, one.num_records) for one in found if one.refused] == [("bad_field", 1), ("damaged", 2)]
    path.write_bytes(content[:-10])
    (item,) = [one for one in documents(path, part_bytes=40, on_error="skip") if one.num_records]
    assert item.refused == "damaged" and "damaged, or not Parquet" in item.error


def test_a_file_without_the_column_is_as_many_bad_records(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"] * 7}), tmp_path / "a.parquet", row_group_size=2)
    found = documents(tmp_path / "a.parquet", part_bytes=100, on_error="skip")
    assert {one.refused for one in found} == {"bad_field"} and sum(one.num_records for one in found) == 7


def test_what_comes_before_a_damage_stays(tmp_path):
    lines = b"".join(b'{"text": "good %d"}\n' % number for number in range(1000))
    tail = json.dumps({"text": LONG}).encode()
    for name, compress in (("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstd.compress)):
        path = tmp_path / name
        path.write_bytes(compress(lines) + compress(tail)[:-100])
        found = documents(path, on_error="skip")
        assert [one.text for one in found[:-1]] == [f"good {number}" for number in range(1000)], name
        assert found[-1].refused == "damaged"
        path.write_bytes(compress(lines) + b"garbage!" * 25_000)
        lost = documents(path, on_error="skip")[-1].lost_bytes
        assert 200_000 - 2**14 <= lost <= 200_000
        assert f"truncated or damaged {'gzip' if name.endswith('gz') else 'zstd'}" in found[-1].error


def test_samples_and_the_rest_of_a_damaged_tar(tmp_path):
    members = [
        ("0.txt", b"good 0"),
        ("1.txt", b"sch\xf6n"),
        ("2.json", b"{"),
        ("3.txt", b"x" * 100),
        ("4.json", GOOD[1]),
        ("5.png", b"x"),
        ("6.txt", b"a"),
        ("6.txt", b"b"),
        ("7.jsonl", GOOD[2] + b"\n" + b'{"text": 1}\n' + GOOD[3]),
        ("8.txt", b"good 4"),
        ("9.txt", b"lost"),
    ]
    path = tmp_path / "a.tar"
    path.write_bytes(pack(members, tarfile.GNU_FORMAT))
    reasons = ["undecodable", "not_json", "too_large", "damaged", "damaged", "bad_field"]
    assert read_both(path, reasons) == [*good_texts(5), "lost"]
    content = bytearray(path.read_bytes())
    at = content.index(b"9.txt")
    content[at : at + 200] = b"x" * 200
    path.write_bytes(content)
    # The sample before the damage may have had more members.
    assert read_both(path, [*reasons, "damaged"]) == good_texts(4)


def test_the_rest_of_a_damaged_archive(tmp_path):
    first, second = (response(page(f"<p>{'good words ' * 20}</p>").encode()) for _ in range(2))
    path = tmp_path / "a.warc"
    path.write_bytes(first + b"garbage" + second)
    found = documents(path, on_error="skip")
    assert [one.refused for one in found] == [None, "damaged"] and found[0].text.startswith("good words")


def test_lines_of_pairs_are_left_out_together(tmp_path):
    (tmp_path / "a.en").write_bytes(b"one\nx\xff\nthree\n" + b"y" * 100 + b"\nfive\n")
    (tmp_path / "a.de").write_bytes(b"eins\nzwei\n\xff\nvier\nf\xc3\xbcnf\n")
    found = documents(
        tmp_path / "a.en", paired_path=str(tmp_path / "a.de"), kind="pairs", on_error="skip", max_document_bytes=80
    )
    kept = [(one.source, one.text) for one in found if not one.refused]
    assert kept == [("one", "eins"), ("five", "f\u00fcnf")]
    assert [one.refused for one in found if one.refused] == ["undecodable", "undecodable", "too_large"]
    # Which lines belong together is not known then.
    (tmp_path / "a.de").write_bytes(b"eins\n")
    with pytest.raises(DataError, match="this line has no pair"):
        documents(tmp_path / "a.en", paired_path=str(tmp_path / "a.de"), kind="pairs", on_error="skip")


def test_conversations_that_cannot_be(tmp_path):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    bad = [{"messages": "a"}, {"messages": [{"role": "king", "content": "a"}]}, {"messages": [{"role": "user"}]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (*bad, good)))
    found = documents(tmp_path / "a.jsonl", kind="records", messages_field="messages", on_error="skip")
    assert [one.refused for one in found] == ["bad_field", "bad_record", "bad_record", None]

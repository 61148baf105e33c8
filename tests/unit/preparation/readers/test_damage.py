"""Whatever becomes of a file's bytes, reading it gives documents or one DataError, and ends."""

import bz2
import gzip
import json
import lzma
import random
import tarfile

import pyarrow
import pytest

from pretrain.errors import DataError
from pretrain.preparation.inputs.opening import zstd
from tests.helpers.reading import documents
from tests.unit.preparation.readers.test_warc import BODY, page, response
from tests.unit.preparation.readers.test_webdataset import pack

ROWS = [{"text": "".join(random.Random(number).choices('abc \u00e9\n"\\', k=40))} for number in range(20)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
MEMBERS = [(f"{number}.json", json.dumps(row).encode()) for number, row in enumerate(ROWS)] + [("x.jsonl", LINES)]
ARCHIVE = b"".join(response(page(BODY * number).encode()) for number in range(1, 5))
ARROW = pyarrow.BufferOutputStream()
with pyarrow.ipc.new_stream(ARROW, pyarrow.schema({"text": pyarrow.string()})) as writer:
    writer.write_table(pyarrow.Table.from_pylist(ROWS), max_chunksize=7)
FILES = {
    "a.jsonl": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "a.jsonl.zst": zstd.compress(LINES),
    "a.jsonl.xz": lzma.compress(LINES),
    "a.jsonl.bz2": bz2.compress(LINES),
    "a.json": json.dumps(ROWS).encode(),
    "a.txt": LINES,
    "gnu.tar": pack(MEMBERS, tarfile.GNU_FORMAT),
    "a.arrow": ARROW.getvalue().to_pybytes(),
    "a.warc": ARCHIVE,
    "a.warc.gz": gzip.compress(ARCHIVE),
    "pax.tar": pack([(f"{'d' * 120}/{name}", body) for name, body in MEMBERS], tarfile.PAX_FORMAT),
}


def damage(content, rng):
    """Changes, removes or repeats a few bytes."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(content) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            content[at : at + 1] = bytes([rng.choice([0, 255, rng.randrange(256)])])
        elif kind == 1:
            del content[at : at + rng.randrange(1, 50)]
        elif kind == 2:
            content[at:at] = content[: rng.randrange(1, 50)]
        else:
            del content[at:]
    return bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_damage_anywhere_is_a_data_error_or_nothing(tmp_path, name):
    rng = random.Random(name)
    path = tmp_path / name
    num_refused = 0
    for _ in range(60):
        path.write_bytes(damage(FILES[name], rng))
        try:
            documents(path, part_bytes=rng.choice([50, 500, 1 << 20]), max_document_bytes=rng.choice([100, 10_000]))
        except DataError as error:
            num_refused += 1
            assert error.where.startswith(str(path)) and error.fix
    assert num_refused > 20

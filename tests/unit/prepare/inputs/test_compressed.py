import gzip
import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.errors import DataError
from pretrain.prepare.input_parts import InputFile
from pretrain.prepare.inputs.opening import decompress, zstd

COMPRESS = {"gzip": gzip.compress, "zstd": zstd.compress}


def plain(content, compression):
    return decompress(io.BytesIO(content), InputFile("a", len(content), "0", compression=compression))


@pytest.mark.parametrize("compression", COMPRESS)
@given(pieces=st.lists(st.binary(max_size=100), min_size=1, max_size=4), sizes=st.lists(st.integers(0, 50), max_size=5))
def test_what_was_compressed_comes_back_whatever_is_asked_for(compression, pieces, sizes):
    stream = plain(b"".join(map(COMPRESS[compression], pieces)), compression)
    assert b"".join([stream.read(size) for size in sizes] + [stream.read()]) == b"".join(pieces)


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_file_that_is_cut_off_anywhere_is_refused(compression):
    content = COMPRESS[compression](random.Random(0).randbytes(500))
    for size in range(1, len(content)):
        with pytest.raises(
            DataError, match=rf"a, byte \d+ \(uncompressed\): truncated or damaged {compression}: .*; copy or"
        ):
            plain(content[:size], compression).read()


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("content", [b'{"text": "a"}\n', bytes(100) + b"x"])
def test_something_else_is_refused(compression, content):
    with pytest.raises(DataError, match=f"truncated or damaged {compression}"):
        plain(content, compression).read()


def test_damage_is_refused_with_its_place():
    first = random.Random(0).randbytes(2**18)
    content = bytearray(gzip.compress(first) + gzip.compress(b"second"))
    content[-3] ^= 0xFF
    stream = plain(bytes(content), "gzip")
    assert stream.read(2**18) == first
    with pytest.raises(DataError, match=r"a, byte 262150 \(uncompressed\): truncated or damaged gzip"):
        stream.read()


def test_what_is_not_compressed_is_as_it_is():
    stream = io.BytesIO(b"abc")
    assert decompress(stream, InputFile("a", 3, "0")) is stream

import bz2
import gzip
import io
import itertools
import lzma
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.errors import DataError
from pretrain.preparation.input_parts import InputFile
from pretrain.preparation.inputs.opening import decompress, zstd

COMPRESS = {"gzip": gzip.compress, "zstd": zstd.compress, "xz": lzma.compress, "bzip2": bz2.compress}


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


OTHERS = {
    "text": (
        b'{"text": "a"}\n',
        r"plain text \('\{\"text\": \"a\"\}\\n'\), by its first bytes; leave the ending of the",
    ),
    "cut character": ("\u00e9\u4e2d".encode() * 20 + b"x", "plain text"),
    "zeros": (bytes(100) + b"x", "zeros, by its first bytes; copy or download"),
    "lzma": (lzma.compress(b"a", lzma.FORMAT_ALONE), "compressed by lzma, by its first bytes; decompress it first: xz"),
    "zip": (b"PK\3\4abc", "a zip archive, by its first bytes; unpack it first"),
    "PDF": (b"%PDF-1.7", "a PDF, by its first bytes; extract its text first"),
    **{
        name: (compress(b"a"), rf"compressed by {name}, .*; give it the ending \.")
        for name, compress in COMPRESS.items()
    },
}


@pytest.mark.parametrize(
    ("compression", "other"), [pair for pair in itertools.product(COMPRESS, OTHERS) if pair[0] != pair[1]]
)
def test_something_else_is_refused_by_its_name(compression, other):
    content, message = OTHERS[other]
    with pytest.raises(DataError, match=f"^a: not {compression}, but {message}"):
        plain(content, compression).read()


@pytest.mark.parametrize("compression", COMPRESS)
def test_bytes_that_nothing_is_known_of_are_damage(compression):
    with pytest.raises(DataError, match=rf"^a, byte 0 \(uncompressed\): truncated or damaged {compression}"):
        plain(b"\xff\1\2" * 50, compression).read()


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


@pytest.mark.parametrize("compression", ["gzip", "xz", "bzip2"])
def test_zeros_behind_streams_are_padding_and_anything_else_is_damage(compression):
    packed = COMPRESS[compression](b"abc")
    assert plain(packed + bytes(512) + packed + bytes(512), compression).read() == b"abcabc"
    with pytest.raises(DataError, match=rf"byte 3 \(uncompressed\): truncated or damaged {compression}"):
        plain(packed + b"garbage!", compression).read()


@pytest.mark.parametrize("window_log", [27, 28, 31])
def test_long_windows_of_zstd_are_read(window_log):
    parameter = zstd.CompressionParameter
    options = {parameter.window_log: window_log, parameter.enable_long_distance_matching: 1}
    packer = zstd.ZstdCompressor(options=options)
    packed = packer.compress(b"abc" * 1000) + packer.flush()
    assert plain(packed, "zstd").read() == b"abc" * 1000


def test_limits_of_decoders_are_named_as_such(monkeypatch):
    lines = [b'{"text": "some text %d"}' % number for number in range(100)]
    packed = zstd.compress(b"".join(lines), zstd_dict=zstd.train_dict(lines, 1024))
    fix = "decompress it first: zstd -d -D DICTIONARY FILE"
    limit = "a: a limit of the zstd decoder, no damage"
    with pytest.raises(DataError, match=f"^{limit}: it needs the dictionary that it was compressed with; {fix}"):
        plain(packed, "zstd").read()
    # Magic, a frame without a content size, and a window of 4 TiB.
    window = b"\x28\xb5\x2f\xfd\x00\xff"
    with pytest.raises(DataError, match=f"^{limit}: it needs a window of more than 2 GiB; decompress it first"):
        plain(window + bytes(20), "zstd").read()

    def refuse(*_):
        raise MemoryError

    stream = plain(lzma.compress(b"abc"), "xz")
    monkeypatch.setattr(stream.raw._decoder, "read1", refuse)
    with pytest.raises(DataError, match=r"^a: a limit of the xz decoder, no damage: its window has no room in memory"):
        stream.read()

"""Whatever documents a source holds, the shards hold them too, in the same order, whatever the cut into parts."""

import json
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from pretrain.preparation.convert.convert_part import ConvertOptions
from tests.unit.preparation.convert import writers
from tests.unit.preparation.convert.asked import convert
from tests.unit.preparation.convert.writers import EOS_ID, VOCAB_SIZE, join

QUICK = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
TOKEN = st.integers(0, VOCAB_SIZE - 1)
WORD = st.integers(1, VOCAB_SIZE - 1)
ENDED = st.lists(st.lists(WORD, max_size=8).map(lambda words: [*words, EOS_ID]), max_size=20)
PART_BYTES = st.sampled_from([30, 77, 1000])


def check(write, kind, documents, part_bytes, name="in", split="hash:0", **options):
    """Converts what `write(folder)` writes, under `name`, and compares the shards with `documents`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder)
        tokenizer = writers.write_tokenizer(folder / "tokenizer.json")
        asked = ConvertOptions(folder / "out", kind, (str(folder / name),), str(tokenizer), split, **options)
        index = convert(asked, part_bytes=part_bytes)
        read = {split: writers.read_documents(folder / "out", index, split) for split in ("train", "validation")}
        facts = json.loads((folder / "out/conversion.json").read_text())
    # A split keeps the order, and a document and its copies go the same way.
    held_out = {tuple(document) for document in read["validation"]}
    assert bool(held_out) == (split != "hash:0")
    assert read["train"] == [document for document in documents if tuple(document) not in held_out]
    assert read["validation"] == [document for document in documents if tuple(document) in held_out]
    tokens = [token for document in documents for token in document]
    assert facts["before"] == facts["after"] == writers.token_hash(tokens)
    assert facts["num_documents"] == len(documents)


@QUICK
@given(
    st.lists(st.lists(st.lists(TOKEN, max_size=6), max_size=3), max_size=20),
    st.sampled_from(["uint16", "int32", "int64"]),
    PART_BYTES,
)
def test_megatron_documents_are_kept(sequences, dtype, part_bytes):
    sequences = [[[1]], *sequences]
    documents = [join(document) for document in sequences]
    check(
        lambda folder: writers.write_megatron(folder / "in", sequences, dtype),
        "megatron",
        [document for document in documents if document],
        part_bytes,
    )


@QUICK
@given(ENDED, st.lists(WORD, max_size=5), PART_BYTES)
def test_nanogpt_documents_end_with_their_token(ended, rest, part_bytes):
    documents = [[1, EOS_ID], *ended, *([rest] if rest else [])]

    def write(folder):
        writers.write_flat(folder / "in.bin", join(documents))

    check(write, "nanogpt", documents, part_bytes, "in.bin", dtype="uint16")


@QUICK
@given(ENDED, st.lists(WORD, max_size=5), st.sampled_from([400, 1100, 10**4]))
def test_llmc_documents_begin_with_their_token(ended, rest, part_bytes):
    documents = [*([rest] if rest else []), *([EOS_ID, *document[:-1]] for document in ended)] or [[1]]
    check(
        lambda folder: writers.write_llmc(folder / "in.bin", join(documents)),
        "nanogpt",
        documents,
        part_bytes,
        "in.bin",
    )


@QUICK
@given(st.lists(ENDED, min_size=1, max_size=4), st.sampled_from(["uint16", "uint32"]), PART_BYTES)
def test_olmo_documents_end_with_their_file(files, dtype, part_bytes):
    files = [[[1, 2]], *files]

    def write(folder):
        (folder / "in").mkdir()
        for number, documents in enumerate(files):
            writers.write_flat(folder / f"in/part-{number:02d}.npy", join(documents), dtype)

    check(write, "olmo", join(files), part_bytes, dtype=dtype)


@QUICK
@given(
    st.lists(st.lists(TOKEN, min_size=1, max_size=9), min_size=1, max_size=12),
    st.sampled_from([("bytes", "int64"), ("ndarray:uint16", "uint16"), ("ndarray", "int32")]),
    st.sampled_from([None, "zstd", "zstd:7"]),
    PART_BYTES,
)
def test_mds_samples_are_documents(samples, how, compression, part_bytes):
    encoding, dtype = how

    def write(folder):
        writers.write_mds(folder / "in", samples, encoding=encoding, dtype=dtype, compression=compression)

    check(write, "mds", samples, part_bytes)


@settings(QUICK, max_examples=6)
@given(st.lists(st.lists(WORD, min_size=1, max_size=4), min_size=60, max_size=90, unique_by=tuple), PART_BYTES)
def test_what_is_held_out_leaves_the_hash_as_it_is(words, part_bytes):
    documents = [[*document, EOS_ID] for document in words]

    def write(folder):
        writers.write_flat(folder / "in.bin", join(documents))

    check(write, "nanogpt", documents, part_bytes, "in.bin", split="hash:0.3", dtype="uint16")

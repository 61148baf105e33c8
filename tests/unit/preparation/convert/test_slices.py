"""Slices that partition a file give its documents, each once and whole, wherever the cuts fall and chunks end."""

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from pretrain.errors import DataError
from pretrain.preparation.convert import token_file
from pretrain.preparation.convert.convert import FORMATS
from pretrain.preparation.convert.token_file import ReadOptions, cut_documents, find_cuts
from tests.unit.preparation.convert import writers
from tests.unit.preparation.convert.writers import EOS_ID, VOCAB_SIZE, join

THOROUGH = settings(max_examples=150)
TOKENS = st.lists(st.sampled_from([EOS_ID, 1, 2]), min_size=1, max_size=40)
CUTS = st.lists(st.integers(0, 1200), max_size=5)


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_file, "CHUNK_TOKENS", 3)
        yield


def read_slices(kind, name, write, cuts, **options):
    """The documents of a file, read in slices; and its tokens, read whole."""
    with tempfile.TemporaryDirectory() as temporary:
        write(Path(temporary))
        [opened] = FORMATS[kind]([str(Path(temporary) / name)], ReadOptions(VOCAB_SIZE, EOS_ID, **options))
        inside = sorted({cut for cut in cuts if cut < opened.file.size})
        bounds = list(zip([0, *inside], [*inside, opened.file.size], strict=True))
        documents = [document.tolist() for start, stop in bounds for document in opened.documents(start, stop)]
        return documents, [token for chunk in opened.tokens() for token in chunk.tolist()]


def split_after(tokens):
    """The documents that end with EOS_ID, and what is left."""
    documents = [[]]
    for token in tokens:
        documents[-1].append(token)
        documents += [[]] if token == EOS_ID else []
    return [document for document in documents if document]


def split_before(tokens):
    """The documents that begin with EOS_ID, after what comes before."""
    documents = [[]]
    for token in tokens:
        documents += [[]] if token == EOS_ID else []
        documents[-1].append(token)
    return [document for document in documents if document]


@THOROUGH
@given(TOKENS, CUTS, st.sampled_from(["uint8", "uint16", "int64"]))
def test_flat_files(tokens, cuts, dtype):
    documents, read = read_slices(
        "nanogpt",
        "in.bin",
        lambda folder: writers.write_flat(folder / "in.bin", tokens, dtype),
        cuts,
        dtype=dtype,
    )
    assert (documents, read) == (split_after(tokens), tokens)


@THOROUGH
@given(TOKENS, CUTS)
def test_files_with_a_header(tokens, cuts):
    def write(folder):
        writers.write_llmc(folder / "in.bin", tokens, 20240801, 7, "uint32")

    documents, read = read_slices("nanogpt", "in.bin", write, cuts)
    assert (documents, read) == (split_before(tokens), tokens)


@THOROUGH
@given(st.lists(st.lists(TOKENS | st.just([]), max_size=3), max_size=10), CUTS)
def test_megatron_pairs(sequences, cuts):
    documents, read = read_slices("megatron", "in", lambda f: writers.write_megatron(f / "in", sequences), cuts)
    expected = [join(document) for document in sequences]
    assert [document for document in documents if document] == [document for document in expected if document]
    assert read == join(expected)


def test_no_more_is_read_than_the_slice_needs():
    taken = []

    def chunks():
        for position in range(0, 40, 4):
            taken.append(position)
            tokens = np.array([1, 1, 1, EOS_ID])
            yield position, tokens, find_cuts(tokens, position, EOS_ID, at_start=False)

    assert len(list(cut_documents(chunks(), 0, 5, "x"))) == 2
    assert taken == [0, 4]


def test_a_document_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("pretrain.preparation.convert.token_file.MAX_DOCUMENT_TOKENS", 10)
    chunks = ((position, np.ones(4, int), np.empty(0, int)) for position in range(0, 40, 4))
    message = "^x: no end of a document in 10 tokens before position 12; give the tokenizer whose end-of-document"
    with pytest.raises(DataError, match=message):
        list(cut_documents(chunks, 0, 40, "x"))

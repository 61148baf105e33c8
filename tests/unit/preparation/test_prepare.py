"""What `prepare` writes: the texts, in their order, whatever the processes and parts."""

import io
import logging
import random
import tarfile

import numpy as np
import pytest

from pretrain.errors import ConfigError
from pretrain.preparation.split import TRAIN, VALIDATION, parse_split
from pretrain.shards.index import load_index
from pretrain.tokenizer.file import dump_tokenizer, load_tokenizer, tokenizer_hash
from pretrain.tokenizer.special_tokens import UNK
from tests.helpers.corpus import WORDS, digests, write_corpus
from tests.helpers.tokenizers import train_bpe
from tests.unit.data.prepared import options, prepare


def documents(folder, split):
    """Decodes a split back to texts, without their end-of-document tokens, which are checked to be there."""
    index = load_index(folder)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    texts = []
    for shard in index.split(split).shards:
        with tarfile.open(folder / shard.name) as tar:
            arrays = [np.load(io.BytesIO(tar.extractfile(member).read())) for member in tar]
        for tokens, starts in zip(arrays[0::2], arrays[1::2], strict=True):
            for ids in np.split(tokens, starts[1:]):
                assert ids[-1] == index.eos_id and index.eos_id not in ids[:-1]
                texts.append(tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False))
    return texts


def test_shards_decode_to_the_source_text_in_input_order(tmp_path):
    texts = write_corpus(tmp_path / "in")
    index = prepare(options(tmp_path))
    rule = parse_split("hash:0.2", 0)
    for split in (TRAIN, VALIDATION):
        expected = [text for text in texts if dict(rule.divide(text, text.encode())).get(split)]
        assert documents(tmp_path / "out", split) == expected
        assert index.split(split).num_documents == len(expected)
        assert index.split(split).num_bytes_text == sum(len(text.encode()) for text in expected)
    assert index == load_index(tmp_path / "out")
    assert index.tokenizer_sha256 == tokenizer_hash(tmp_path / "out/tokenizer.json")
    assert (index.vocab_size, index.dtype) == (300, "uint16")


def test_output_is_the_same_bytes_for_one_and_two_processes(tmp_path, corpus):
    seen = []
    prepare(options(tmp_path, "one", processes=1))
    prepare(options(tmp_path, "two", processes=2), lambda *args: seen.append(args))
    assert len(list((tmp_path / "one/parts").iterdir())) > 5
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    total = sum(path.stat().st_size for path in corpus.iterdir())
    assert seen[-1] == ("tokenizing", total, total, 60)


def test_char_tokenizer_with_tail_split_cuts_each_document(tmp_path):
    (tmp_path / "in").mkdir()
    text = "".join(random.Random(0).choices("abcdefgh\n", k=1000))
    (tmp_path / "in/a.txt").write_text(text)
    (tmp_path / "in/b.txt").write_text("ab")
    index = prepare(options(tmp_path, tokenizer="char", vocab_size=None, split="tail:0.1"))
    assert documents(tmp_path / "out", TRAIN) == [text[:900], "a"]
    assert documents(tmp_path / "out", VALIDATION) == [text[900:], "b"]
    assert index.split(TRAIN).num_tokens == 900 + 1 + 1 + 1
    assert index.vocab_size == 9 + 2


def test_tokenizer_never_sees_what_is_held_out(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("a" * 90 + "b" * 10)
    prepare(options(tmp_path, tokenizer="char", vocab_size=None, split="tail:0.1"))
    assert documents(tmp_path / "out", VALIDATION) == [UNK * 10]


def test_given_tokenizer_is_used_as_it_is(tmp_path, corpus):
    given = tmp_path / "given.json"
    given.write_bytes(dump_tokenizer(train_bpe([" ".join(WORDS)] * 3, 280)))
    index = prepare(options(tmp_path, tokenizer=str(given), vocab_size=None))
    assert (tmp_path / "out/tokenizer.json").read_bytes() == given.read_bytes()
    assert index.tokenizer_sha256 == tokenizer_hash(given)
    given.write_bytes(dump_tokenizer(train_bpe([" ".join(WORDS)] * 3, 270)))
    with pytest.raises(ConfigError, match=r"begun with other options: tokenizer\.path was 'sha256:"):
        prepare(options(tmp_path, tokenizer=str(given), vocab_size=None))


def test_a_part_starts_a_new_shard_every_shard_tokens(tmp_path, corpus):
    index = prepare(options(tmp_path, part_bytes=1 << 20, shard_tokens=1000))
    names = [shard.name for shard in index.split(TRAIN).shards]
    assert names == [f"train/part-00000-{number:04d}.tar" for number in range(len(names))]
    assert len(names) > 2
    assert all(1000 <= shard.num_tokens < 2000 for shard in index.split(TRAIN).shards[:-1])


def test_a_long_document_is_encoded_in_pieces_to_the_same_tokens(tmp_path, monkeypatch):
    texts = write_corpus(tmp_path / "in")
    prepare(options(tmp_path, "whole"))
    monkeypatch.setattr("pretrain.preparation.part.BATCH_CHARS", 50)
    monkeypatch.setattr("pretrain.tokenizer.words.cut_text.__defaults__", (20,))
    prepare(options(tmp_path, "pieces"))
    assert digests(tmp_path / "whole") == digests(tmp_path / "pieces")
    assert max(map(len, texts)) > 200


def test_default_corpus_passes_over_files_that_are_not_utf8(tmp_path, monkeypatch, caplog):
    library = tmp_path / "lib"
    library.mkdir()
    (library / "good.py").write_text("import os\n" * 50)
    (library / "bad.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr("pretrain.preparation.inputs.listing.sysconfig.get_path", lambda name: str(library))
    with caplog.at_level(logging.INFO):
        prepare(options(tmp_path, inputs=(), split="tail:0.1"))
    assert "skipped 1 document: not UTF-8" in caplog.text
    assert documents(tmp_path / "out", TRAIN) == ["import os\n" * 45]


def test_empty_documents_are_counted(tmp_path, corpus, caplog):
    with caplog.at_level(logging.INFO):
        prepare(options(tmp_path))
    assert "skipped 1 document: empty" in caplog.text


def test_empty_validation_split_is_warned_of(tmp_path, corpus, caplog):
    index = prepare(options(tmp_path, split="hash:0.000001"))
    assert list(index.splits) == [TRAIN]
    remedy = "to hold out more, prepare another --output with --split tail:0.05, the end of each text"
    effect = "without which runs train and are not evaluated: no val_loss, no checkpoint.best"
    assert f"split hash:0.000001 held out nothing, {effect}; {remedy}" in caplog.text


def test_a_validation_split_of_one_document_is_warned_of(tmp_path, corpus, caplog):
    index = prepare(options(tmp_path, split="hash:0.02"))
    assert index.split(VALIDATION).num_documents == 1
    assert "split hash:0.02 held out one document, whose loss says little; to hold out more" in caplog.text


def test_a_vocabulary_smaller_than_the_one_asked_for_is_told(tmp_path, corpus, caplog):
    index = prepare(options(tmp_path, vocab_size=100_000))
    text = f"the vocabulary has {index.vocab_size} entries, not the 100000 asked for"
    assert 300 < index.vocab_size < 100_000 and text in caplog.text

import json
import logging

import numpy as np
import pytest
from tokenizers import processors

from pretrain.errors import ConfigError, DataError
from pretrain.preparation.convert.convert_part import TextBytes
from pretrain.shards.index import load_index
from pretrain.tokenizer.file import load_tokenizer, tokenizer_hash
from pretrain.tokenizer.special_tokens import EOS
from tests.helpers.corpus import WORDS, digests
from tests.helpers.tokenizers import train_bpe
from tests.unit.preparation.convert import writers
from tests.unit.preparation.convert.asked import DOCUMENTS, convert, facts, options
from tests.unit.preparation.convert.writers import EOS_ID, join, read_documents, token_hash


def test_index_tokenizer_and_proof_are_written(source, caplog):
    with caplog.at_level(logging.INFO):
        index = convert(options(source, split="hash:0"))
    assert index == load_index(source / "out")
    assert (index.vocab_size, index.dtype, index.eos_id, list(index.splits)) == (300, "uint16", EOS_ID, ["train"])
    assert (source / "out/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert index.tokenizer_sha256 == tokenizer_hash(source / "tokenizer.json")
    expected = token_hash(join(DOCUMENTS))
    assert facts(source / "out") == {
        "from": "nanogpt",
        "num_documents": 40,
        "num_documents_without_end": 0,
        "before": expected,
        "after": expected,
    }
    assert (
        f"token hash before and after: sha256 {expected['sha256']} over {expected['num_tokens']} tokens" in caplog.text
    )
    assert len(list((source / "out/parts").iterdir())) > 4


@pytest.mark.parametrize(("num_begun", "begin_id"), [(40, 7), (39, None), (0, None)])
def test_documents_that_all_begin_with_the_start_token_are_recorded_as_such(source, caplog, num_begun, begin_id):
    tokenizer = load_tokenizer(source / "tokenizer.json")
    tokenizer.post_processor = processors.TemplateProcessing("w7 $A", "w7 $A w7 $B", [("w7", 7)])
    tokenizer.save(str(source / "tokenizer.json"))
    documents = [[7 if number < num_begun else 8, *document] for number, document in enumerate(DOCUMENTS)]
    writers.write_flat(source / "in/a.bin", join(documents[:25]))
    writers.write_flat(source / "in/b.bin", join(documents[25:]))
    assert convert(options(source)).begin_id == begin_id == load_index(source / "out").begin_id
    assert ("39 of 40 documents begin with token 7" in caplog.text) == (num_begun == 39)


@pytest.mark.usefixtures("pictures")
def test_statistics_and_a_data_card_tell_what_came_of_it(source):
    index = convert(options(source))
    statistics = json.loads((source / "out/statistics.json").read_text())
    lengths = [statistics["splits"][name]["lengths"] for name in ("train", "validation")]
    assert sum(count for one in lengths for _, count in one["histogram"]) == len(DOCUMENTS)
    assert max(one["longest"] for one in lengths) == max(map(len, DOCUMENTS))
    assert statistics["splits"]["train"]["num_tokens"] == index.splits["train"].num_tokens
    assert statistics["input"]["formats"] == {"nanogpt": 2}
    card = (source / "out/data_card.md").read_text()
    assert f"| train | {index.splits['train'].num_documents} | " in card and "2 files (2 nanogpt)" in card
    assert (source / "out/lengths.png").read_bytes().startswith(b"\x89PNG")


def test_the_hash_is_that_of_the_shards_as_numpy_reads_them(source):
    index = convert(options(source, split="hash:0"))
    assert token_hash(join(read_documents(source / "out", index))) == facts(source / "out")["after"]


@pytest.mark.long
def test_output_is_the_same_bytes_for_one_and_two_processes(source):
    """Of mapped and of mapped and compressed sources alike."""
    writers.write_megatron(source / "m", [[document] for document in DOCUMENTS])
    writers.write_mds(source / "mds", DOCUMENTS, compression="zstd")
    seen = []
    for kind, name in (("megatron", "m"), ("mds", "mds")):
        asked = {"kind": kind, "source": (str(source / name),)}
        convert(options(source, f"{kind}1", **asked))
        convert(options(source, f"{kind}2", **asked), lambda *args: seen.append(args), processes=2)
        assert len(list((source / f"{kind}1/parts").iterdir())) > 4
        assert digests(source / f"{kind}1") == digests(source / f"{kind}2")
        assert seen[-1][1] == seen[-1][2]


def test_a_large_vocabulary_takes_32_bits(source):
    writers.write_tokenizer(source / "tokenizer.json", 65537)
    writers.write_flat(source / "in/a.bin", [65536, 3, EOS_ID], "uint32")
    index = convert(options(source, source=(str(source / "in/a.bin"),), dtype="uint32", split="hash:0"))
    assert index.dtype == "uint32"
    assert read_documents(source / "out", index) == [[65536, 3, EOS_ID]]


def test_a_part_starts_a_new_shard_every_shard_tokens(source, monkeypatch):
    monkeypatch.setattr("pretrain.preparation.convert.convert_part.SHARD_TOKENS", 50)
    index = convert(options(source, split="hash:0"), part_bytes=10**6)
    names = [shard.name for shard in index.split("train").shards]
    assert names == [f"train/part-00000-{number:04d}.tar" for number in range(len(names))]
    assert all(50 <= shard.num_tokens < 70 for shard in index.split("train").shards[:-1])
    assert read_documents(source / "out", index) == DOCUMENTS


def test_documents_without_end_are_left_so_and_counted(source, caplog):
    writers.write_megatron(source / "m", [[[1, 2]], [[3, EOS_ID]], [[4]]])
    changes = {"kind": "megatron", "source": (str(source / "m"),), "split": "hash:0"}
    index = convert(options(source, "left", **changes))
    assert read_documents(source / "left", index) == [[1, 2], [3, EOS_ID], [4]]
    assert facts(source / "left")["num_documents_without_end"] == 2
    assert "2 of 3 documents do not end with token 0" in caplog.text
    assert facts(source / "left")["after"] == token_hash([1, 2, 3, EOS_ID, 4])


def test_empty_documents_are_left_out_and_counted(source, caplog):
    writers.write_megatron(source / "m", [[[1, EOS_ID]], [], [[]], [[2, EOS_ID]]])
    with caplog.at_level(logging.INFO):
        index = convert(options(source, kind="megatron", source=(str(source / "m"),), split="hash:0"))
    assert read_documents(source / "out", index) == [[1, EOS_ID], [2, EOS_ID]]
    assert "skipped 2 documents: empty" in caplog.text


def test_progress_reaches_the_end(source):
    seen = []
    convert(options(source), lambda *args: seen.append(args))
    size = sum(path.stat().st_size for path in (source / "in").iterdir())
    assert ("converting", size, size, 40) in seen
    assert seen[-1] == ("comparing", 2 * size, 2 * size, 40)


# Splits.


def test_a_document_is_held_out_by_its_tokens_alone(source):
    index = convert(options(source))
    held_out = read_documents(source / "out", index, "validation")
    assert 0 < len(held_out) < 20
    for number, document in enumerate(DOCUMENTS):
        writers.write_flat(source / f"in/{number:03d}.bin", document)
    for name in ("a.bin", "b.bin"):
        (source / "in" / name).unlink()
    index = convert(options(source, "alone"))
    assert read_documents(source / "alone", index, "validation") == held_out


@pytest.mark.parametrize("name", ["val.bin", "fineweb_val_000000.bin", "Validation-1.bin", "valid.bin"])
def test_files_that_are_named_so_are_held_out(source, name):
    (source / "in/b.bin").rename(source / "in" / name)
    (source / "in/a.bin").rename(source / "in/interval.bin")
    index = convert(options(source, split=None))
    assert read_documents(source / "out", index) == DOCUMENTS[:25]
    assert read_documents(source / "out", index, "validation") == DOCUMENTS[25:]
    assert facts(source / "out")["after"] == facts(source / "out")["before"]


def test_folders_that_are_named_so_are_held_out(source):
    writers.write_mds(source / "mds/train", DOCUMENTS[:5])
    writers.write_mds(source / "mds/val", DOCUMENTS[5:])
    index = convert(options(source, kind="mds", source=(str(source / "mds"),), split=None))
    assert read_documents(source / "out", index) == DOCUMENTS[:5]
    assert read_documents(source / "out", index, "validation") == DOCUMENTS[5:]


def test_without_such_files_the_hash_decides(source):
    convert(options(source, "auto", split=None))
    convert(options(source, "hash", split="hash:0.01"))
    for split in ("train", "validation"):
        assert digests(source / "auto" / split) == digests(source / "hash" / split)


def test_splits_that_cannot_be_are_refused(source):
    with pytest.raises(ConfigError, match=r"split='tail:0\.1' cuts texts, not tokens; use --split hash:F"):
        convert(options(source, split="tail:0.1"))
    with pytest.raises(ConfigError, match="split='half' is not a split"):
        convert(options(source, split="half"))
    with pytest.raises(DataError, match="there is no text to train on; give more text, or hold out less with --split"):
        convert(options(source, split="hash:0.999999"))
    assert not (source / "out/prepare.json").exists()


# Bytes of text.


def test_text_is_counted_as_it_was():
    tokenizer = train_bpe([" ".join(WORDS)] * 3, 280)
    text = " ".join(WORDS) + " \u00e9\u4e2d\U0001f600\n"
    ids = tokenizer.encode(text).ids
    end = tokenizer.token_to_id(EOS)
    counter = TextBytes(tokenizer)
    assert counter.count(np.array([*ids, end], np.uint16)) == len(text.encode())
    assert counter.count(np.array([end], np.uint16)) == 0


@pytest.mark.parametrize("piece_tokens", [1, 3, 1000])
def test_text_of_other_tokenizers_is_decoded(tmp_path, monkeypatch, piece_tokens):
    monkeypatch.setattr("pretrain.preparation.convert.convert_part.DECODE_TOKENS", piece_tokens)
    tokenizer = load_tokenizer(writers.write_tokenizer(tmp_path / "tokenizer.json"))
    assert TextBytes(tokenizer).count(np.array([1, 20, 299, EOS_ID])) == len("w1w20w299")


def test_text_bytes_are_entered_in_the_index(source):
    index = convert(options(source))
    for split in index.splits:
        words = join(read_documents(source / "out", index, split))
        assert index.split(split).num_bytes_text == sum(len(f"w{word}") for word in words if word != EOS_ID)

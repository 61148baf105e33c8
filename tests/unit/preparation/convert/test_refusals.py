import json
import os

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from pretrain.errors import ConfigError, DataError, LockedError
from pretrain.preparation.output import lock_folder
from pretrain.tokenizer.file import dump_tokenizer
from tests.helpers.corpus import digests
from tests.unit.preparation.convert import writers
from tests.unit.preparation.convert.asked import DOCUMENTS, convert, options
from tests.unit.preparation.convert.writers import EOS_ID, VOCAB_SIZE, join


def test_a_source_that_changes_meanwhile_is_refused(source):
    original = (source / "in/a.bin").read_bytes()

    def change(phase, done_bytes, total_bytes, num_documents):
        if phase == "converting" and done_bytes == total_bytes:
            content = bytearray(original)
            content[0] ^= 1
            (source / "in/a.bin").write_bytes(content)

    message = (
        r"the source changed while it was read: \d+ tokens \(sha256 \w+\) became \d+ \(\w+\); run the same command"
    )
    with pytest.raises(DataError, match=message):
        convert(options(source), change)
    assert not (source / "out").exists()


def test_a_shard_that_is_damaged_before_the_proof_is_found(source):
    whole = []

    def damage(phase, done_bytes, total_bytes, num_documents):
        if phase == "converting" and done_bytes == total_bytes:
            path = source / "out/train/part-00001-0000.tar"
            whole.append(path.read_bytes())
            content = bytearray(whole[0])
            content[512 + 128] ^= 1
            path.write_bytes(content)

    with pytest.raises(DataError, match=r"part-00001-0000\.tar: 00000000\.tokens\.npy is damaged: CRC32"):
        convert(options(source), damage)
    assert not (source / "out/index.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "hash:0.3"}, r"split was 'hash:0\.2' and is now 'hash:0\.3'"),
        ({"dtype": "uint16"}, "dtype was None and is now 'uint16'"),
        ({"kind": "olmo", "source": ("in.npy",)}, "from was 'nanogpt' and is now 'olmo'"),
    ],
)
def test_other_options_for_the_same_folder_are_refused(source, monkeypatch, changes, message):
    monkeypatch.chdir(source)
    writers.write_flat(source / "in.npy", join(DOCUMENTS))
    convert(options(source))
    before = digests(source / "out")
    with pytest.raises(ConfigError, match=f"out: begun with other options: {message}"):
        convert(options(source, **changes))
    assert digests(source / "out") == before


def test_other_sources_for_the_same_folder_are_refused(source):
    writers.write_megatron(source / "m", [[[1, EOS_ID]]])
    changes = {"kind": "megatron", "source": (str(source / "m"),), "split": "hash:0"}
    convert(options(source, **changes))
    os.utime(source / "m.idx", ns=(0, 0))
    with pytest.raises(DataError, match=r"out: begun with other inputs: 1 changed \(.*m\.idx\); use another --output"):
        convert(options(source, **changes))


def test_a_folder_that_another_process_holds_is_refused(source):
    (source / "out").mkdir()
    with lock_folder(source / "out"), pytest.raises(LockedError, match="another `pretrain prepare`"):
        convert(options(source))


@pytest.mark.parametrize("dtype_of_file", ["uint16", "uint32"])
def test_what_is_refused_is_taken_back(source, dtype_of_file):
    writers.write_flat(source / "in/b.bin", [1] * 500 + [300], dtype_of_file)
    with pytest.raises(DataError, match=r"b\.bin: token 300 at position \d+ is not below the vocabulary size, 300;"):
        convert(options(source, dtype="uint16"))
    assert not (source / "out").exists()
    write_again = DOCUMENTS[25:]
    writers.write_flat(source / "in/b.bin", join(write_again))
    convert(options(source))


def test_a_tokenizer_that_is_missing_is_refused(source):
    (source / "tokenizer.json").unlink()
    with pytest.raises(
        DataError, match=r"tokenizer\.json: cannot read the tokenizer: No such file .*; give a tokenizer"
    ):
        convert(options(source))
    assert not (source / "out").exists()


def test_a_tokenizer_without_end_of_document_is_refused(source):
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB_SIZE)}, unk_token="w1"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<start>", special=True)])
    (source / "tokenizer.json").write_bytes(dump_tokenizer(tokenizer))
    with pytest.raises(DataError, match="the tokenizer has no end-of-document token"):
        convert(options(source))


def test_a_format_that_is_not_known_is_refused(source):
    with pytest.raises(
        ConfigError, match="from='fairseq' is not a format of tokens; use one of megatron, nanogpt, olmo,"
    ):
        convert(options(source, kind="fairseq"))


def test_no_processes_are_refused(source):
    with pytest.raises(ConfigError, match="processes=0 must be at least 1; leave it out for one a core"):
        convert(options(source), processes=0)


def test_an_empty_source_is_refused(source):
    for name in ("a.bin", "b.bin"):
        (source / "in" / name).write_bytes(b"")
    with pytest.raises(DataError, match="there is no text to train on"):
        convert(options(source))


def test_a_file_that_is_named_twice_is_refused(source):
    writers.write_mds(source / "mds", DOCUMENTS[:2])
    index = json.loads((source / "mds/index.json").read_text())
    index["shards"] *= 2
    (source / "mds/index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="mds: names a file twice; name each once"):
        convert(options(source, kind="mds", source=(str(source / "mds"),)))

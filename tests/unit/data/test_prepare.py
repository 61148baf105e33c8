import fcntl
import io
import logging
import os
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest

from pretrain.data import prepare as prepare_module
from pretrain.data.lock import PREPARE_LOCK, WORKERS_LOCK
from pretrain.data.progress import no_progress
from pretrain.data.readers.reader import Reader
from pretrain.data.split import TRAIN, VALIDATION, parse_split
from pretrain.data.tokenizer import UNK, dump_tokenizer, load_tokenizer, tokenizer_hash, train_bpe
from pretrain.errors import ConfigError, DataError, DiskError, LockedError
from pretrain.index import load_index
from pretrain.io import set_fault_hook
from tests.helpers.corpus import WORDS, digests, write_corpus
from tests.helpers.killed import count_writes, run_killed
from tests.helpers.prepare_config import prepare_config


@pytest.fixture
def corpus(tmp_path):
    write_corpus(tmp_path / "in")
    return tmp_path / "in"


def options(tmp_path, name="out", **changes):
    """A config over the corpus, and how to run it."""
    defaults = {"inputs": (str(tmp_path / "in"),), "vocab_size": 300, "split": "hash:0.2", "part_bytes": 1500}
    chosen = {"processes": 1, **defaults, **changes}
    processes, inputs = chosen.pop("processes"), chosen.pop("inputs")
    return prepare_config(tmp_path / name, inputs, **chosen), processes


def prepare(chosen, progress=no_progress):
    config, processes = chosen
    return prepare_module.prepare(config, progress, processes=processes)


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


@pytest.fixture
def fault_hook():
    yield set_fault_hook
    set_fault_hook(None)


# What is written.


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
    monkeypatch.setattr("pretrain.data.part.BATCH_CHARS", 50)
    monkeypatch.setattr("pretrain.data.tokenizer.cut_text.__defaults__", (20,))
    prepare(options(tmp_path, "pieces"))
    assert digests(tmp_path / "whole") == digests(tmp_path / "pieces")
    assert max(map(len, texts)) > 200


def test_default_corpus_passes_over_files_that_are_not_utf8(tmp_path, monkeypatch, caplog):
    library = tmp_path / "lib"
    library.mkdir()
    (library / "good.py").write_text("import os\n" * 50)
    (library / "bad.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr("pretrain.data.inputs.listing.sysconfig.get_path", lambda name: str(library))
    with caplog.at_level(logging.INFO):
        prepare(options(tmp_path, inputs=(), split="tail:0.1"))
    assert "skipped 1 files that are not UTF-8" in caplog.text
    assert documents(tmp_path / "out", TRAIN) == ["import os\n" * 45]


def test_empty_documents_are_counted(tmp_path, corpus, caplog):
    with caplog.at_level(logging.INFO):
        prepare(options(tmp_path))
    assert "skipped 1 empty documents" in caplog.text


def test_empty_validation_split_is_warned_of(tmp_path, corpus, caplog):
    index = prepare(options(tmp_path, split="hash:0.000001"))
    assert list(index.splits) == [TRAIN]
    assert "split hash:0.000001 held out nothing: there is no validation split" in caplog.text


# Restart.


def test_second_run_does_nothing(tmp_path, corpus, caplog):
    first = prepare(options(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.name[0] != "."}
    with caplog.at_level(logging.INFO):
        assert prepare(options(tmp_path, processes=2)) == first
    assert "is complete: nothing to do" in caplog.text
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.name[0] != "."}


CHILD = """
from pretrain.data.prepare import prepare
from tests.helpers.prepare_config import prepare_config

source, out = arguments
prepare(prepare_config(out, [source], vocab_size=300, split="hash:0.2", part_bytes=1500), processes=1)
"""


def test_killed_at_any_write_and_started_again_it_gives_the_same_bytes(tmp_path, corpus):
    num_writes = count_writes(CHILD, corpus, tmp_path / "whole")
    assert num_writes > 100
    for kill_at in (2, *random.Random(0).sample(range(3, num_writes), 4), num_writes):
        out = tmp_path / f"killed{kill_at}"
        run_killed(CHILD, corpus, out, kill_at=kill_at)
        assert not (out / "index.json").exists() or kill_at == num_writes
        prepare(options(tmp_path, out.name))
        assert digests(out) == digests(tmp_path / "whole")


def test_finished_parts_are_not_done_again(tmp_path, corpus, fault_hook):
    def fail(operation, path):
        if operation == "rename" and path.name == "part-00003.json":
            raise OSError(28, "No space left on device")

    fault_hook(fail)
    with pytest.raises(DiskError, match="No space left on device"):
        prepare(options(tmp_path))
    fault_hook(None)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/parts").iterdir()}
    assert len(kept) == 3
    seen = []
    prepare(options(tmp_path), lambda *args: seen.append(args))
    assert all(path.stat().st_mtime_ns == mtime for path, mtime in kept.items())
    assert seen[0][1] > 1500 * 3
    prepare(options(tmp_path, "whole"))
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.parametrize(
    "victim",
    [*(f"train/part-00002-0000.{suffix}" for suffix in ("tar", "idx.npy", "lengths.npy")), "tokenizer.json"],
)
def test_a_file_that_went_missing_is_made_again(tmp_path, corpus, victim):
    prepare(options(tmp_path))
    before = digests(tmp_path / "out")
    (tmp_path / "out" / victim).unlink()
    prepare(options(tmp_path))
    assert digests(tmp_path / "out") == before


def test_a_tokenizer_that_was_replaced_is_made_again(tmp_path, corpus, caplog):
    prepare(options(tmp_path))
    before = digests(tmp_path / "out")
    (tmp_path / "out/tokenizer.json").write_bytes(b"{}")
    prepare(options(tmp_path))
    assert digests(tmp_path / "out") == before
    assert "tokenizer.json is not the one that made the shards; making what is missing again" in caplog.text


def test_parts_of_another_tokenizer_are_not_reused(tmp_path, corpus):
    prepare(options(tmp_path))
    before = digests(tmp_path / "out")
    (tmp_path / "out/index.json").unlink()
    (tmp_path / "out/tokenizer.json").write_bytes(dump_tokenizer(train_bpe(["x"], 257)))
    index = prepare(options(tmp_path))
    assert index.vocab_size == 257
    assert not before.items() & digests(tmp_path / "out").items() - {("prepare.json", before["prepare.json"])}


def test_ctrl_c_passes_through_and_leaves_nothing_that_is_trusted(tmp_path, corpus, fault_hook):
    def interrupt(operation, path):
        if operation == "write" and path.name.startswith("part-00002-0000.tar"):
            raise KeyboardInterrupt

    fault_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(options(tmp_path))
    assert not list((tmp_path / "out").rglob("*.tmp-*"))
    assert not (tmp_path / "out/index.json").exists()
    fault_hook(None)
    prepare(options(tmp_path))
    prepare(options(tmp_path, "whole"))
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.parametrize("operation", ["open", "write", "fsync", "rename"])
@pytest.mark.parametrize("name", ["prepare.json", "tokenizer.json", "part-00001-0000", "part-00001.json", "index.json"])
def test_full_disk_leaves_nothing_that_is_trusted(tmp_path, corpus, fault_hook, operation, name):
    def fail(what, path):
        if what == operation and path.name.startswith(name):
            raise OSError(28, "No space left on device")

    fault_hook(fail)
    with pytest.raises(DiskError, match="No space left on device; free space"):
        prepare(options(tmp_path))
    assert not (tmp_path / "out/index.json").exists()
    assert not list((tmp_path / "out").rglob("*.tmp-*"))
    fault_hook(None)
    prepare(options(tmp_path))
    prepare(options(tmp_path, "whole"))
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "tail:0.1"}, "split was 'hash:0.2' and is now 'tail:0.1'"),
        ({"vocab_size": 301}, "tokenizer.vocab_size was 300 and is now 301"),
        (
            {"seed": 1, "text_field": "body"},
            "inputs.0.text_field was 'text' and is now 'body', seed was 0 and is now 1",
        ),
    ],
)
def test_other_options_for_the_same_folder_are_refused(tmp_path, corpus, changes, message):
    prepare(options(tmp_path))
    before = digests(tmp_path / "out")
    with pytest.raises(ConfigError, match=f"out: begun with other options: {message}; use another --output"):
        prepare(options(tmp_path, **changes))
    assert digests(tmp_path / "out") == before


def test_other_inputs_for_the_same_folder_are_refused(tmp_path, corpus):
    prepare(options(tmp_path))
    before = digests(tmp_path / "out")
    (corpus / "d.txt").write_text("new")
    (corpus / "c000.txt").unlink()
    os.utime(corpus / "c001.txt", ns=(0, 0))
    message = r"other inputs: 1 new \(.*d\.txt\), 1 gone \(.*c000\.txt\), 1 changed \(.*c001\.txt\); use another"
    with pytest.raises(DataError, match=message):
        prepare(options(tmp_path))
    assert digests(tmp_path / "out") == before


def test_same_inputs_in_another_order_are_refused(tmp_path, corpus):
    names = [str(corpus / "a.jsonl"), str(corpus / "c000.txt")]
    prepare(options(tmp_path, inputs=tuple(names), split="hash:0"))
    with pytest.raises(DataError, match="begun with other inputs: their order changed"):
        prepare(options(tmp_path, inputs=tuple(reversed(names)), split="hash:0"))


def test_folder_that_holds_something_else_is_refused(tmp_path, corpus):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"not begun by `pretrain prepare` \(it holds thesis\.tex\); use another"):
        prepare(options(tmp_path))


def test_folder_where_no_lock_file_can_be_made_is_refused(tmp_path, corpus):
    (tmp_path / "out" / PREPARE_LOCK).mkdir(parents=True)
    with pytest.raises(DiskError, match="out: cannot write here: Is a directory; free space or fix permissions"):
        prepare(options(tmp_path))


def test_output_that_is_a_file_is_refused(tmp_path, corpus):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="out: a file, not a folder; use another --output"):
        prepare(options(tmp_path))
    (tmp_path / "out").unlink()
    (tmp_path / "out").symlink_to(tmp_path / "nowhere/at/all")
    with pytest.raises(DiskError, match="out: cannot create the folder: File exists"):
        prepare(options(tmp_path))


def test_unreadable_identity_is_refused(tmp_path, corpus):
    prepare(options(tmp_path))
    (tmp_path / "out/prepare.json").write_text("{}")
    with pytest.raises(DataError, match=r"prepare\.json: cannot be read: .*; use another --output"):
        prepare(options(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 256}, "vocab_size=256 has no room for the 256 bytes"),
        ({"tokenizer": "char"}, "vocab_size=300 does not go with tokenizer=char; leave it out"),
        ({"processes": 0}, "processes=0 must be at least 1"),
        ({"split": "half"}, "split='half' is not a split"),
        ({"tokenizer": "none.json", "vocab_size": None}, r"none\.json: cannot read the tokenizer"),
        ({"inputs": ("none.txt",)}, r"none\.txt: no such file"),
    ],
)
def test_bad_options_leave_no_folder(tmp_path, corpus, changes, message):
    with pytest.raises((ConfigError, DataError), match=message):
        prepare(options(tmp_path, **changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_malformed_input_is_named_and_what_was_written_is_taken_back(tmp_path, corpus, processes):
    with (corpus / "c005.txt").open("ab") as file:
        file.write(b"\xff")
    given = tmp_path / "given.json"
    given.write_bytes(dump_tokenizer(train_bpe([" ".join(WORDS)] * 3, 280)))
    with pytest.raises(DataError, match=r"c005\.txt@\d+: invalid UTF-8: byte 0xff"):
        prepare(options(tmp_path, tokenizer=str(given), vocab_size=None, processes=processes))
    assert not digests(tmp_path / "out")
    (corpus / "c005.txt").write_text("mended")
    prepare(options(tmp_path, split="tail:0.5"))


@pytest.mark.parametrize(
    ("content", "split", "message"),
    [
        ({"a.txt": ""}, "hash:0.1", r"the input is empty \(1 files, 0 bytes\)"),
        ({"a.jsonl": '{"text": ""}\n\n'}, "hash:0.1", "there is no text to train on; give more text"),
        ({"a.txt": "held out"}, "hash:0.999999999", "there is no text to train on"),
    ],
)
@pytest.mark.parametrize("tokenizer", ["bpe", "char", "given"])
def test_corpus_without_training_text_is_refused(tmp_path, content, split, message, tokenizer):
    (tmp_path / "in").mkdir()
    for name, text in content.items():
        (tmp_path / "in" / name).write_text(text)
    if tokenizer == "given":
        tokenizer = str(tmp_path / "given.json")
        Path(tokenizer).write_bytes(dump_tokenizer(train_bpe([" ".join(WORDS)] * 3, 280)))
    with pytest.raises(DataError, match=message):
        prepare(options(tmp_path, tokenizer=tokenizer, vocab_size=None, split=split))
    assert not (tmp_path / "out").exists() or not digests(tmp_path / "out")


def test_input_that_cannot_be_read_keeps_finished_parts(tmp_path, corpus, monkeypatch):
    def fail(self, slices):
        for piece in slices:
            if piece.file.path.endswith("c005.txt"):
                raise PermissionError(13, "Permission denied", piece.file.path)
        return read(self, slices)

    read = Reader.read
    given = tmp_path / "given.json"
    given.write_bytes(dump_tokenizer(train_bpe([" ".join(WORDS)] * 3, 280)))
    monkeypatch.setattr(Reader, "read", fail)
    with pytest.raises(DataError, match=r"c005\.txt: cannot be read: Permission denied; mend that and run the same"):
        prepare(options(tmp_path, tokenizer=str(given), vocab_size=None))
    assert len(list((tmp_path / "out/parts").iterdir())) > 2


# Processes.


def test_second_prepare_of_a_folder_is_refused_while_the_first_runs(tmp_path, corpus):
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / PREPARE_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711\n")
        lock.flush()
        with pytest.raises(LockedError, match=r"another `pretrain prepare` \(process 4711\) is writing.*; wait for it"):
            prepare(options(tmp_path))
    prepare(options(tmp_path))


def test_workers_of_a_killed_run_are_waited_for(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr("pretrain.data.lock.ORPHAN_WAIT_S", 0.1)
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / WORKERS_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with pytest.raises(LockedError, match="workers of an earlier `pretrain prepare` are still running; end them"):
            prepare(options(tmp_path))
    prepare(options(tmp_path))

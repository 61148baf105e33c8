"""What `prepare` refuses, with what it leaves behind."""

import os
from pathlib import Path

import pytest

from pretrain.errors import ConfigError, DataError, DiskError
from pretrain.preparation import part as part_module
from pretrain.preparation.output import PREPARE_LOCK
from pretrain.tokenizer.file import dump_tokenizer
from tests.helpers.corpus import WORDS, digests
from tests.helpers.tokenizers import train_bpe
from tests.unit.data.prepared import options, prepare


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
    with pytest.raises(DiskError, match="out: cannot write here: Is a directory; check the path"):
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
    with pytest.raises(DataError, match=r"c005\.txt, byte \d+: invalid UTF-8: byte 0xff"):
        prepare(options(tmp_path, tokenizer=str(given), vocab_size=None, processes=processes))
    assert not digests(tmp_path / "out")
    (corpus / "c005.txt").write_text("corrected")
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
    def fail(config, slices):
        for piece in slices:
            if piece.file.path.endswith("c005.txt"):
                raise PermissionError(13, "Permission denied", piece.file.path)
        return read(config, slices)

    read = part_module.read_slices
    given = tmp_path / "given.json"
    given.write_bytes(dump_tokenizer(train_bpe([" ".join(WORDS)] * 3, 280)))
    monkeypatch.setattr(part_module, "read_slices", fail)
    with pytest.raises(
        DataError, match=r"c005\.txt: cannot be read: Permission denied; fix the access problem and run the same"
    ):
        prepare(options(tmp_path, tokenizer=str(given), vocab_size=None))
    assert len(list((tmp_path / "out/parts").iterdir())) > 2

"""Bad input, through the real command line: one line with what, where and how to fix, the documented exit code, no
traceback, nothing half-written; within seconds, on every rank."""

import gzip
import shutil
import socket
from pathlib import Path

import pytest

from pretrain.preparation.output import lock_folder
from pretrain.run.lease import Lease
from tests.helpers.cli import run_cli, run_light
from tests.helpers.refused import CONFIG, check_refused, fill_folder, truncate_shard, visible


@pytest.fixture
def folder(tmp_path, corpus) -> Path:
    """A working folder with a config and shards."""
    return fill_folder(tmp_path, CONFIG, corpus)


# --- prepare -----------------------------------------------------------------------------------------------------


BAD_TEXT = {
    "an empty corpus": ({"a.txt": b""}, ["the input is empty (1 files, 0 bytes)", "give files with text"]),
    "blank documents only": ({"a.jsonl": b'{"text": ""}\n'}, ["there is no text to train on", "give more text"]),
    "invalid UTF-8": (
        {"a.txt": b"abc\xff"},
        ["a.txt, byte 3", "invalid UTF-8: byte 0xff", "convert the file", "iconv -c"],
    ),
    "invalid UTF-8 in a line": (
        {"a.jsonl": b'{"text": "x"}\n{"text": "\xff"}\n'},
        ["a.jsonl, byte 24", "invalid UTF-8", "convert the file"],
    ),
    "a line that is not JSON": (
        {"a.jsonl": b'{"text": "x"}\n{"text": \n'},
        ["a.jsonl:2", "not JSON", "write one JSON object a line"],
    ),
    "a line that is no object": ({"a.jsonl": b'"x"\n'}, ["a.jsonl:1", "not a JSON object"]),
    "a field that is absent": (
        {"a.jsonl": b'{"text": "x"}\n{"body": "x", "id": 3}\n'},
        ["a.jsonl:2", "field 'text' is absent; fields: body, id", "choose one with --text-field"],
    ),
    "a field that is no text": ({"a.jsonl": b'{"text": 3}\n'}, ["a.jsonl:1", "field 'text' is a number"]),
    "a truncated gzip": (
        {"a.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 99)[:-9]},
        ["a.jsonl.gz, byte 1386 (uncompressed)", "gzip"],
    ),
    "a file of another type": ({"a.pdf": b"%PDF"}, ["a.pdf: a PDF; extract its text first", "format: text"]),
}


@pytest.mark.parametrize(("files", "words"), BAD_TEXT.values(), ids=BAD_TEXT)
def test_text_that_cannot_be_used_is_refused_and_nothing_is_left(tmp_path, warm, files, words):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    inputs = [word for name in files for word in ("--input", name)]
    result = warm("prepare", *inputs, "--output", "out", "--tokenizer", "char", cwd=tmp_path)
    check_refused(result, 65, *words)
    assert visible(tmp_path / "out") == set()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--input", "nope.txt"], 65, ["nope.txt", "no such file or folder", "--input, or inputs.0.path"]),
        (["--input", "*.md"], 65, ["*.md", "nothing to read", "give files of .txt"]),
        (["--input", "a.txt", "--tokenizer", "nope.json"], 65, ["cannot read the tokenizer", "tokenizer.path"]),
        (["--input", "a.txt", "--tokenizer", "char", "--vocab-size", "9"], 64, ["vocab_size=9", "leave it out"]),
        (["--input", "a.txt", "--split", "tail:2"], 64, ["tail:2"]),
        (["--input", "a.txt", "--processes", "0"], 64, ["'--processes'", "see `pretrain prepare --help`"]),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_written(tmp_path, warm, options, code, words):
    (tmp_path / "a.txt").write_text("some text")
    check_refused(warm("prepare", *options, "--output", "out", cwd=tmp_path), code, *words)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_not_written_into(tmp_path, warm):
    (tmp_path / "a.txt").write_text("some text")
    result = warm("prepare", "--input", "a.txt", "--output", ".", cwd=tmp_path)
    check_refused(result, 64, "the folder is not empty", "it holds a.txt", "use another --output")
    assert visible(tmp_path) == {"a.txt"}


def test_a_folder_that_is_being_prepared_is_left_alone(tmp_path, warm):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "out").mkdir()
    with lock_folder(tmp_path / "out"):
        result = warm("prepare", "--input", "a.txt", "--output", "out", cwd=tmp_path)
    check_refused(result, 73, "out")
    assert visible(tmp_path / "out") == set()


# --- the config --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optim.lrr=1"], ["override 'optim.lrr=1'", "unknown key 'optim.lrr'", "did you mean 'optim.lr'?"]),
        (
            ["train.steps=many"],
            ["override", "override 'train.steps=many': input should be a valid integer", "write a whole number"],
        ),
        (["batch.global_tokens=100"], ["override", "must be a multiple of batch.seq_len=32", "use 64 or 128"]),
        (["engine.zero_stage=2"], ["zero_stage=2 needs kind=deepspeed"]),
    ],
)
@pytest.mark.parametrize("command", [["config"], ["train"], ["launch", "local"]], ids=" ".join)
def test_a_bad_config_is_refused_by_every_command_that_reads_it(folder, warm, command, overrides, words):
    check_refused(warm(*command, "a.yaml", *overrides, cwd=folder), 64, *words)
    assert not (folder / "runs").exists()


def test_several_bad_keys_are_told_a_line_each(folder, warm):
    result = warm("launch", "local", "a.yaml", "--ranks", "2", "optim.lr=x", "seeed=1", cwd=folder)
    assert result.code == 64
    assert [line.partition(": ")[0] for line in result.errors] == ["override 'optim.lr=x'", "override 'seeed=1'"]
    assert result.stderr.count("\n") == 2


def test_a_batch_that_the_ranks_do_not_divide_is_refused_before_they_start(folder, warm):
    result = warm("launch", "local", "a.yaml", "--ranks", "3", cwd=folder)
    check_refused(result, 64, "batch.global_tokens=128", "micro 2 x ranks 3 = 192", "use 192")
    assert not (folder / "runs").exists()


def test_a_config_that_does_not_exist_is_refused(folder, warm):
    check_refused(warm("train", "nope.yaml", cwd=folder), 64, "nope.yaml", "no such config file", "check the path")


# --- the data ----------------------------------------------------------------------------------------------------


def damage_index(folder: Path) -> None:
    """Makes the index what is not JSON."""
    (folder / "data/index.json").write_text("{")


BAD_DATA = {
    "no shard folder": (
        lambda f: shutil.rmtree(f / "data"),
        ["data", "no such shard folder", "run `pretrain prepare`"],
    ),
    "no index": (lambda f: (f / "data/index.json").unlink(), ["data", "holds no index.json", "run `pretrain prepare`"]),
    "a damaged index": (damage_index, ["data/index.json", "not JSON", "run `pretrain prepare` again"]),
    "a truncated shard": (truncate_shard, ["data", ".tar has", "bytes, not", "copy these files again"]),
    "a missing shard": (
        lambda f: next((f / "data/validation").glob("*.tar")).unlink(),
        ["data", ".tar is missing", "copy these files again"],
    ),
    "another tokenizer": (
        lambda f: (f / "data/tokenizer.json").write_text((f / "data/tokenizer.json").read_text() + " "),
        ["data/tokenizer.json: sha256 is", "the index says", "copy it again"],
    ),
}


@pytest.mark.parametrize(("damage", "words"), BAD_DATA.values(), ids=BAD_DATA)
def test_bad_shards_are_refused_before_a_run_folder_is_made(folder, damage, words):
    damage(folder)
    launched = run_light("launch", "local", "a.yaml", "--ranks", "2", cwd=folder)
    check_refused(launched, 65, *words)
    check_refused(run_light("train", "a.yaml", cwd=folder, without=["torch"]), 65, *words)
    assert not (folder / "runs").exists()


def test_each_rank_that_is_started_by_another_launcher_tells_of_bad_data(folder, warm):
    truncate_shard(folder)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    check_refused(warm("train", "a.yaml", cwd=folder, RANK="0", **place), 65, "data", ".tar has")
    check_refused(warm("train", "a.yaml", cwd=folder, RANK="1", **place), 65, "rank 1: data", ".tar has")


def test_a_vocabulary_that_does_not_match_the_shards_is_refused(folder, warm):
    words = ["data", "model.vocab_size=5 is smaller than the", "tokens of the shards", "use model.vocab_size="]
    check_refused(warm("train", "a.yaml", "model.vocab_size=5", cwd=folder), 64, *words)
    assert not (folder / "runs").exists()


def test_an_extension_that_does_not_exist_is_refused(folder, warm):
    words = ["extend: there is no module 'no_such.module'", "correct the name, or put its folder on PYTHONPATH"]
    check_refused(warm("train", "a.yaml", "extend=[no_such.module]", cwd=folder), 64, *words)
    assert not (folder / "runs").exists()


# --- the run folder ----------------------------------------------------------------------------------------------


def test_a_run_that_another_live_process_holds_is_refused_on_every_rank(folder):
    lease = Lease(folder / "runs/run/lease")
    held = (folder / "runs/run/lease/00000001.json").read_text()
    result = run_cli("launch", "local", "a.yaml", "--ranks", "2", "engine.kind=ddp", cwd=folder)
    check_refused(result, 73, "runs/run", "in use by process", "wait for it, stop it, or use another folder")
    assert visible(folder / "runs/run") == {"lease"}
    assert (folder / "runs/run/lease/00000001.json").read_text() == held
    lease.release()


def test_a_port_in_use_is_refused(folder, warm):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        result = warm("launch", "local", "a.yaml", "--ranks", "2", "--port", port, cwd=folder)
        check_refused(result, 69, "--port", f"port {port} cannot be used: Address already in use", "give another one")
        assert not (folder / "runs").exists()


def test_a_port_in_use_is_refused_by_a_rank_too(folder, warm):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        result = warm("train", "a.yaml", "engine.kind=ddp", cwd=folder, **place)
        check_refused(result, 69, f"rank 0 at 127.0.0.1:{port}", "cannot set up the process group", "port is free")

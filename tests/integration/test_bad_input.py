"""Bad input, through the real command line: one line with what, where and how to fix, the documented exit code, no
traceback, nothing half-written; within seconds, on every rank."""

import gzip
import json
import random
import shutil
import socket
from pathlib import Path

import pytest

from pretrain.data.lock import lock_folder
from pretrain.rundir import Lock
from tests.helpers.cli import Result, WarmCli, run_cli
from tests.unit.checkpoint.test_manager import damages

CONFIG = """
seed: 7
run: {name: run}
data: {path: data, lanes: 1, block_samples: 16}
model: {preset: llama-tiny, max_seq_len: 32, decoder: {width: 32, heads: 4, kv_heads: 2, ff_width: 48}}
batch: {global_tokens: 128, seq_len: 32, micro: 2}
optim: {lr: 1e-3}
train: {steps: 4}
engine: {kind: single, zero_stage: 0, precision: fp32, device: cpu, timeout_s: 30}
checkpoint: {every_steps: 2}
tracking: {wandb: off}
"""


@pytest.fixture(scope="module")
def warm():
    """Commands in forks of one process that has imported torch."""
    with WarmCli() as cli:
        yield cli


@pytest.fixture
def folder(tmp_path, corpus) -> Path:
    """A working folder with a config and shards."""
    (tmp_path / "a.yaml").write_text(CONFIG)
    shutil.copytree(corpus, tmp_path / "data")
    return tmp_path


@pytest.fixture(scope="module")
def finished(warm, corpus, tmp_path_factory) -> Path:
    """A working folder with a run of four steps that is complete, and its checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "a.yaml").write_text(CONFIG)
    shutil.copytree(corpus, folder / "data")
    result = warm("train", "a.yaml", cwd=folder)
    assert result.code == 0, result.stderr
    return folder


@pytest.fixture
def run_folder(finished, tmp_path) -> Path:
    """A copy of the finished run, to damage."""
    return shutil.copytree(finished, tmp_path / "copy")


def check_refused(result: Result, code: int, *words: str) -> None:
    """The command ended with `code` and one error line that has these words in order."""
    assert result.code == code, result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.errors) == 1, result.stderr
    (line,) = result.errors
    position = 0
    for word in words:
        position = line.find(word, position)
        assert position >= 0, f"{word!r} is not in {line!r}, or not in this order"


def visible(folder: Path) -> set[str]:
    """What is in a folder, without locks."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.exists() else set()


# --- prepare -----------------------------------------------------------------------------------------------------


BAD_TEXT = {
    "an empty corpus": ({"a.txt": b""}, ["the input is empty (1 files, 0 bytes)", "give files with text"]),
    "blank documents only": ({"a.jsonl": b'{"text": ""}\n'}, ["there is no text to train on", "give more text"]),
    "invalid UTF-8": ({"a.txt": b"abc\xff"}, ["a.txt@3", "invalid UTF-8: byte 0xff", "convert the file"]),
    "invalid UTF-8 in a line": (
        {"a.jsonl": b'{"text": "x"}\n{"text": "\xff"}\n'},
        ["a.jsonl@24", "invalid UTF-8", "convert the file"],
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
    "a truncated gzip": ({"a.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 99)[:-9]}, ["a.jsonl.gz@", "gzip"]),
    "a file of another type": ({"a.pdf": b"%PDF"}, ["a.pdf", "unsupported file type", "give one of .txt"]),
}


@pytest.mark.parametrize(("files", "words"), BAD_TEXT.values(), ids=BAD_TEXT)
def test_text_that_cannot_be_used_is_refused_and_nothing_is_left(tmp_path, warm, files, words):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    inputs = [word for name in files for word in ("--input", name)]
    result = warm("prepare", *inputs, "--output", "out", "--tokenizer", "char", cwd=tmp_path)
    check_refused(result, 65, *words)
    assert visible(tmp_path / "out") == set()
    assert result.seconds < 10


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--input", "nope.txt"], 65, ["nope.txt", "no such file or folder", "correct the path"]),
        (["--input", "*.md"], 65, ["*.md", "nothing to read", "give files of .txt"]),
        (["--input", "a.txt", "--tokenizer", "nope.json"], 65, ["nope.json", "cannot read the tokenizer"]),
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
        (["train.steps=many"], ["override", "train.steps='many'", "valid integer", "write a whole number"]),
        (["batch.global_tokens=100"], ["override", "must be a multiple of batch.seq_len=32", "use 96 or 128"]),
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


def truncate_shard(folder: Path) -> None:
    """Takes the last bytes of a shard."""
    shard = next((folder / "data/train").glob("*.tar"))
    shard.write_bytes(shard.read_bytes()[:-512])


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
}


@pytest.mark.parametrize(("damage", "words"), BAD_DATA.values(), ids=BAD_DATA)
def test_bad_shards_are_refused_before_a_run_folder_is_made(folder, warm, damage, words):
    damage(folder)
    launched = warm("launch", "local", "a.yaml", "--ranks", "2", cwd=folder)
    check_refused(launched, 65, *words)
    check_refused(warm("train", "a.yaml", cwd=folder), 65, *words)
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
    lock = Lock(folder / "runs/run/.lock")
    held = (folder / "runs/run/.lock").read_text()
    result = run_cli("launch", "local", "a.yaml", "--ranks", "2", "engine.kind=ddp", cwd=folder)
    check_refused(result, 73, "runs/run", "in use by process", "wait for it, stop it, or use another folder")
    assert result.seconds < 30
    assert visible(folder / "runs/run") == {"logs"}
    assert (folder / "runs/run/.lock").read_text() == held
    lock.release()


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


def test_a_resumption_with_another_meaning_is_refused_naming_keys_and_values(run_folder, warm):
    before = (run_folder / "runs/run/run.json").read_bytes()
    changes = ["seed=8", "model.decoder.width=64", "data.lanes=2"]
    refused = warm("train", "a.yaml", *changes, cwd=run_folder)
    words = ["seed: 7 -> 8", "data.lanes: 1 -> 2", "model.decoder.width: 32 -> 64", "name the keys in resume.allow"]
    check_refused(refused, 64, *words)
    assert (run_folder / "runs/run/run.json").read_bytes() == before
    allowed = warm("train", "a.yaml", "seed=8", "resume.allow=[seed]", "train.steps=5", cwd=run_folder)
    assert allowed.code == 0, allowed.stderr
    assert "resuming runs/run at step 4" in allowed.stderr
    assert "resuming with train.steps changed from 4 to 5" in allowed.stderr


def test_a_changed_learning_rate_is_said_and_not_refused(run_folder, warm):
    result = warm("train", "a.yaml", "optim.lr=0.5", "train.stop_after=4", cwd=run_folder)
    assert result.code == 0, result.stderr
    assert "WARNING resuming with optim.lr changed from 0.001 to 0.5" in result.stderr


def test_a_resumption_on_other_data_is_refused_unless_allowed(run_folder, warm):
    options = ["--output", "other", "--tokenizer", "data/tokenizer.json", "--split", "tail:0.1"]
    (run_folder / "b.txt").write_text("alpha beta gamma delta " * 2000)
    assert warm("prepare", "--input", "b.txt", *options, cwd=run_folder).code == 0
    refused = warm("train", "a.yaml", "data.path=other", cwd=run_folder)
    check_refused(refused, 64, "the token shards at data.path differ", "pass resume.allow=[data]")
    assert warm("train", "a.yaml", "data.path=other", "resume.allow=[data]", cwd=run_folder).code == 0


def test_a_damaged_record_of_a_run_is_refused(run_folder, warm):
    (run_folder / "runs/run/config.yaml").write_text("run: {name: ")
    check_refused(warm("train", "a.yaml", cwd=run_folder), 64, "runs/run/config.yaml:1:", "not YAML")
    (run_folder / "runs/run/config.yaml").unlink()
    (run_folder / "runs/run/run.json").write_text("{")
    check_refused(warm("train", "a.yaml", cwd=run_folder), 64, "runs/run/run.json", "cannot be read", "restore it")
    check_refused(warm("inspect", "runs/run", cwd=run_folder), 64, "runs/run/run.json", "restore it")


# --- checkpoints -------------------------------------------------------------------------------------------------


def test_a_corrupted_checkpoint_is_set_aside_and_the_older_one_continued(run_folder, warm):
    checkpoints = run_folder / "runs/run/checkpoints"
    file = checkpoints / "step-00000004/rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    result = warm("train", "a.yaml", cwd=run_folder)
    assert result.code == 0, result.stderr
    assert "WARNING checkpoint runs/run/checkpoints/step-00000004 is damaged (rank-00000.safetensors: CRC32" in (
        result.stderr
    )
    assert "resuming runs/run at step 2" in result.stderr
    assert visible(checkpoints) == {"step-00000002", "step-00000004", "step-00000004.bad-damaged"}
    again = json.loads((run_folder / "runs/run/audit.jsonl").read_text().splitlines()[-1])
    assert again["step"] == 4


def test_a_run_without_a_good_checkpoint_is_refused_on_every_rank_and_never_starts_over(run_folder):
    checkpoints = run_folder / "runs/run/checkpoints"
    for path in checkpoints.glob("step-*/rank-00000.safetensors"):
        path.write_bytes(path.read_bytes()[:-4])
    audit = (run_folder / "runs/run/audit.jsonl").read_bytes()
    result = run_cli("launch", "local", "a.yaml", "--ranks", "2", "engine.kind=ddp", cwd=run_folder)
    words = ["this run has saved checkpoints, and none can be used", "restore one, or start over under another run"]
    check_refused(result, 66, "runs/run/checkpoints", *words)
    assert result.seconds < 40
    assert (run_folder / "runs/run/audit.jsonl").read_bytes() == audit
    assert visible(checkpoints) == {"step-00000002.bad-damaged", "step-00000004.bad-damaged"}


def test_weights_of_another_model_are_refused_by_the_name_of_a_parameter(run_folder, warm):
    options = ["run.name=new", "init.from=runs/run", "model.decoder.ff_width=64"]
    result = warm("train", "a.yaml", *options, cwd=run_folder)
    check_refused(
        result, 66, "runs/run/checkpoints/step-00000004", "has shape", "in the checkpoint shape", "use the con"
    )


@pytest.mark.parametrize("what", ["nope", "a.yaml", "data", "runs", "runs/run/logs"])
def test_generate_refuses_what_is_no_model(run_folder, warm, what):
    result = warm("generate", what, cwd=run_folder)
    check_refused(result, 66, what, "neither a checkpoint nor a run with one", "check the path")


@pytest.mark.parametrize("what", ["nope", "a.yaml", "runs", "runs/run/checkpoints"])
def test_inspect_refuses_what_it_does_not_know(run_folder, warm, what):
    result = warm("inspect", what, cwd=run_folder)
    check_refused(result, 65, what, "neither a shard folder, a run, a checkpoint nor a model", "check the path")


def test_generate_and_inspect_refuse_what_is_damaged(run_folder, warm):
    truncate_shard(run_folder)
    check_refused(warm("inspect", "data", cwd=run_folder), 65, "data", ".tar has")
    checkpoint = "runs/run/checkpoints/step-00000004"
    weights = run_folder / checkpoint / "rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    check_refused(warm("inspect", checkpoint, cwd=run_folder), 66, "rank-00000.safetensors", "not of its size")
    check_refused(warm("generate", checkpoint, cwd=run_folder), 66, checkpoint, "damaged", "use another checkpoint")
    assert warm("generate", "runs/run", "--max-tokens", "3", cwd=run_folder).code == 0
    (run_folder / "runs/run/tokenizer.json").write_text("{")
    check_refused(warm("generate", "runs/run", cwd=run_folder), 65, "tokenizer.json", "not a tokenizer")
    (run_folder / "runs/run/tokenizer.json").unlink()
    check_refused(warm("generate", "runs/run", cwd=run_folder), 66, "runs/run", "tokenizer.json is missing")


def test_no_damage_to_a_manifest_makes_inspect_fail_with_a_traceback(run_folder, warm):
    manifest = run_folder / "runs/run/checkpoints/step-00000004/manifest.json"
    content = manifest.read_bytes()
    chosen = random.Random(3).sample(list(damages(content[:-1], random.Random(4), num_flips=100)), 12)
    for damaged in chosen:
        manifest.write_bytes(damaged)
        check_refused(warm("inspect", str(manifest.parent), cwd=run_folder), 66, "manifest.json", "damaged")

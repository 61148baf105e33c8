"""Runs and checkpoints that are damaged, or are not what a command is told they are, through the real command line."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.helpers.cli import run_light
from tests.helpers.refused import CONFIG, check_refused, fill_folder, truncate_shard, visible
from tests.unit.checkpoint.test_manager import damages


@pytest.fixture(scope="module")
def finished(warm, corpus, tmp_path_factory) -> Path:
    """A working folder with a run of four steps that is complete, and its checkpoints of steps 2 and 4."""
    folder = fill_folder(tmp_path_factory.mktemp("finished"), CONFIG, corpus)
    result = warm("train", "a.yaml", cwd=folder)
    assert result.code == 0, result.stderr
    return folder


@pytest.fixture
def run_folder(finished, tmp_path) -> Path:
    """A copy of the finished run, to damage."""
    return shutil.copytree(finished, tmp_path / "copy")


# --- complete ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["train"], ["launch", "local", "--ranks", "2"], ["launch", "slurm", "--nodes", "2"]]
)
def test_a_complete_run_says_so_at_once_without_torch_and_writes_nothing(run_folder, command):
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run_folder.rglob("*") if path.is_file()}
    again, short, changed = (
        run_light(*command, "a.yaml", *changes, cwd=run_folder, without=["torch"])
        for changes in ([], ["train.stop_after=3", "optim.lr=0.5"], ["seed=8"])
    )
    assert (again.code, again.stderr) == (0, "")
    assert again.stdout == "runs/run is complete: 4 steps; raise train.steps to go on\n"
    assert (short.code, short.stderr) == (0, "")  # nothing is resumed
    assert short.stdout == "runs/run is complete: 4 steps; raise train.stop_after to go on\n"
    assert before == {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in before}
    check_refused(changed, 64, "seed: 7 -> 8")


def test_other_data_of_a_complete_run_are_refused_as_they_are_of_one_with_steps_left(run_folder):
    done = run_light("train", "a.yaml", "data.path=nowhere", cwd=run_folder, without=["torch"])
    check_refused(done, 65, "nowhere: no such shard folder")


@pytest.mark.parametrize("command", [["train"], ["launch", "local", "--ranks", "2"]])
def test_a_start_that_is_not_there_is_refused_before_an_engine_starts(run_folder, warm, command):
    options = ["a.yaml", "run.name=new", "init.from=runs/ran"]
    refused = run_light(*command, *options, cwd=run_folder, without=["torch"])
    what = "init.from=runs/ran: no run, checkpoint, model folder or Hugging Face folder is there"
    check_refused(refused, 64, what, "did you mean runs/run?")
    assert "starting" not in refused.stderr and not (run_folder / "runs/new/run.json").exists()
    begun = warm("train", *options[:2], "init.from=runs/run/ema", "train.stop_after=1", cwd=run_folder)
    assert "no run, checkpoint" not in begun.stderr  # of the average, which this run has not kept


def test_a_run_with_weights_of_its_own_continues_without_its_start(run_folder, warm):
    result = warm("train", "a.yaml", "init.from=gone", "resume.allow=[init]", "train.steps=5", cwd=run_folder)
    assert "init.from=gone: no run" not in result.stderr


# --- resumption -----------------------------------------------------------------------------------------------------


def test_a_resumption_with_another_meaning_is_refused_naming_keys_and_values(run_folder, warm):
    before = (run_folder / "runs/run/run.json").read_bytes()
    changes = ["seed=8", "model.decoder.width=64", "data.lanes=2"]
    refused = warm("train", "a.yaml", *changes, cwd=run_folder)
    words = ["seed: 7 -> 8", "data.lanes: 1 -> 2", "never: model.decoder.width: 32 -> 64"]
    check_refused(refused, 64, *words, "or restore model.decoder.width and add resume.allow=[seed,data.lanes]")
    assert (run_folder / "runs/run/run.json").read_bytes() == before
    allowed = warm("train", "a.yaml", "seed=8", "resume.allow=[seed]", "train.steps=5", cwd=run_folder)
    assert allowed.code == 0, allowed.stderr
    assert "resuming runs/run at step 4" in allowed.stderr
    assert "WARNING resuming with a config that differs from the run's so far:" in allowed.stderr
    assert "    allowed seed: 7 -> 8\n    warn    train.steps: 4 -> 5\n" in allowed.stderr


def test_a_changed_learning_rate_is_said_and_not_refused(run_folder, warm):
    result = warm("train", "a.yaml", "optim.lr=0.5", "train.steps=6", "train.stop_after=5", cwd=run_folder)
    assert result.code == 0, result.stderr
    assert "    warn    train.steps: 4 -> 6\n    free    train.stop_after: null -> 5" in result.stderr
    assert "    warn    optim.lr: 0.001 -> 0.5\n" in result.stderr


def test_a_resumption_on_other_data_is_refused_unless_allowed(run_folder, warm):
    options = ["--output", "other", "--tokenizer", "data/tokenizer.json", "--split", "tail:0.1"]
    (run_folder / "b.txt").write_text("alpha beta gamma delta " * 2000)
    assert warm("prepare", "--input", "b.txt", *options, cwd=run_folder).code == 0
    changes = ["data.path=other", "train.steps=5"]
    refused = warm("train", "a.yaml", *changes, cwd=run_folder)
    check_refused(refused, 64, "the token shards at data.path differ", "pass resume.allow=[data]")
    assert warm("train", "a.yaml", *changes, "resume.allow=[data]", cwd=run_folder).code == 0


def test_a_damaged_record_of_a_run_is_refused(run_folder, warm):
    (run_folder / "runs/run/config.yaml").write_text("run: {name: ")
    check_refused(warm("train", "a.yaml", cwd=run_folder), 64, "runs/run/config.yaml:1:", "not YAML")
    (run_folder / "runs/run/config.yaml").unlink()
    (run_folder / "runs/run/run.json").write_text("{")
    check_refused(warm("train", "a.yaml", cwd=run_folder), 64, "runs/run/run.json", "cannot be read", "restore it")
    check_refused(warm("inspect", "runs/run", cwd=run_folder), 64, "runs/run/run.json", "restore it")


# --- folders made by others -----------------------------------------------------------------------------------------

DEEP = b'{"step": ' + b"[" * 10**5
HOSTILE = {
    "aliases": ("config.yaml", b"a: &a [x, x, x]\n" + b"".join(b"%c: &%c [*%c, *%c, *%c]\n" % (c + 1, c + 1, c, c, c)
                                                              for c in range(ord("a"), ord("y")))),
    "a cycle": ("config.yaml", b"a: &a {b: *a}\n"),
    "no date": ("config.yaml", b"x: 2020-13-45\ny: " + b"9" * 6000),
    "nested config": ("config.yaml", b"[" * 10_000),
    "nested record": ("run.json", DEEP),
    "attempts of numbers": ("run.json", b'{"id": "a", "name": "a", "created": "a", "attempts": [3]}'),
    "attempts by name": ("run.json", b'{"id": "a", "name": "a", "created": "a", "attempts": {"b": 3}}'),
    "fields of other types": ("run.json", b'{"id": "a", "name": "a", "created": "a", '
                                          b'"attempts": [{"slurm": "x", "versions": [], "exit_code": {}}]}'),
    "nested row": ("metrics.jsonl", DEEP + b"\n"),
    "huge numbers": ("metrics.jsonl", b"".join(
        b'{"step": %d, "loss": %s1e308, "tokens": 1e308, "step_time_s": 1e308, "checkpoint_step": NaN}\n' % (step, sign)
        for step, sign in enumerate((b"", b"-", b"")))),
    "huge step": ("metrics.jsonl", b'{"step": %s, "loss": 1}\n' % (b"9" * 400)),
    "nested journal": ("launch/journal.jsonl", DEEP + b'\n{"event": "start", "job": ["x"], "restart": {}}\n'),
}  # fmt: skip


@pytest.mark.parametrize("commands", [["inspect"], pytest.param(["report"], marks=pytest.mark.long)], ids=" ".join)
def test_folders_made_to_do_harm_are_described_or_refused_and_do_not_hide_others(run_folder, warm, commands):
    for name, (file, content) in HOSTILE.items():
        bad = shutil.copytree(run_folder / "runs/run", run_folder / "runs" / name)
        (bad / file).parent.mkdir(exist_ok=True)
        (bad / file).write_bytes(content)
        for command in commands:
            result = warm(command, f"runs/{name}", cwd=run_folder)
            assert result.code in (0, 64), f"{command} of {name}: {result.stderr}"
            assert "Traceback" not in result.stderr
    result = warm("report", *(f"runs/{name}" for name in ("run", *HOSTILE)), cwd=run_folder)
    assert (result.code, "Traceback" in result.stderr) == (0, False), result.stderr
    result = warm("runs", "runs", "--json", cwd=run_folder)
    assert (result.code, "Traceback" in result.stderr) == (0, False)
    assert {one["path"]: one["state"] for one in json.loads(result.stdout)}["runs/run"] == "done"


PIPES = ("config.yaml", "metrics.jsonl", "audit.jsonl", "evaluations.jsonl", "samples.jsonl", "lease/00000009.json",
         "launch/journal.jsonl", "launch/spec.json", "launch/config.yaml", "logs/rank-00000.log")  # fmt: skip


def test_pipes_in_the_place_of_files_hold_up_no_command(run_folder, warm):
    bad = shutil.copytree(run_folder / "runs/run", run_folder / "runs/bad")
    for file in PIPES:
        (bad / file).parent.mkdir(exist_ok=True)
        (bad / file).unlink(missing_ok=True)
        os.mkfifo(bad / file)
    for command in ("inspect runs/bad", "report runs/bad", "launch status runs/bad", "runs runs --json"):
        result = warm(*command.split(), cwd=run_folder)
        assert result.code in (0, 64), result.stderr
        assert "Traceback" not in result.stderr
    assert result.code == 0
    assert {one["path"]: one["state"] for one in json.loads(result.stdout)}["runs/run"] == "done"


def test_nothing_in_a_run_reaches_the_terminal_as_a_control_character(run_folder, warm):
    title = "\x1b]0;owned\x07[/red]\x9b2J"
    run = run_folder / "runs" / f"run{title.replace('/', '')}"
    (run_folder / "runs/run").rename(run)
    record = json.loads((run / "run.json").read_text())
    record["name"] = title
    record["attempts"][-1] |= {"host": title, "reason": title, "exit_code": 1, "versions": {title: title}}
    (run / "run.json").write_text(json.dumps(record))
    (run / "metrics.jsonl").write_text('{"step": 1}\n{\n')
    with (run / "logs/rank-00000.log").open("a") as file:
        file.write(f"{title}\tlast\n")
    commands = {
        ("inspect", run): 0, ("runs", "runs"): 0, ("launch", "status", run): 0, ("launch", "logs", run): 0,
        ("report", run): 0, ("generate", run / title): 66, ("train", f"{title}.yaml"): 64,
    }  # fmt: skip
    for command, code in commands.items():
        result = warm(*map(str, command), cwd=run_folder)
        assert result.code == code, result.stderr
        said = result.stdout + result.stderr
        assert "owned" in said and "\\x1b" in said, command
        assert all(character in "\n\t" or character.isprintable() for character in said), command
    assert "\tlast\n" in warm("launch", "logs", str(run), cwd=run_folder).stdout


# --- checkpoints -------------------------------------------------------------------------------------------------


def test_a_corrupted_checkpoint_is_set_aside_and_the_older_one_continued(run_folder, warm):
    checkpoints = run_folder / "runs/run/checkpoints"
    file = checkpoints / "step-00000004/rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    result = warm("train", "a.yaml", "train.steps=5", cwd=run_folder)
    assert result.code == 0, result.stderr
    assert "WARNING checkpoint runs/run/checkpoints/step-00000004 is damaged (rank-00000.safetensors: CRC32" in (
        result.stderr
    )
    assert "resuming runs/run at step 2" in result.stderr
    assert visible(checkpoints) == {"step-00000004", "step-00000005", "step-00000004.bad-damaged"}
    again = [json.loads(line)["step"] for line in (run_folder / "runs/run/audit.jsonl").read_text().splitlines()]
    assert again == [1, 2, 3, 4, 5]


def test_a_run_without_a_good_checkpoint_is_refused_on_every_rank_and_never_starts_over(run_folder, warm):
    checkpoints = run_folder / "runs/run/checkpoints"
    for path in checkpoints.glob("step-*/rank-00000.safetensors"):
        path.write_bytes(path.read_bytes()[:-4])
    audit = (run_folder / "runs/run/audit.jsonl").read_bytes()
    result = warm("train", "a.yaml", "engine.kind=ddp", "train.steps=5", cwd=run_folder, ranks=2)
    words = ["this run has saved checkpoints, and none can be used", "restore one, or start over under another run"]
    check_refused(result, 66, "runs/run/checkpoints", *words)
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
    tokenizer = json.loads((run_folder / "runs/run/tokenizer.json").read_text())
    pieces = [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {}}
    tokenizer["post_processor"] = {"type": "Sequence", "processors": [template]}
    (run_folder / "runs/run/tokenizer.json").write_text(json.dumps(tokenizer))
    check_refused(warm("generate", "runs/run", cwd=run_folder), 65, "tokenizer.json", "post_processor.single names [X]")
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

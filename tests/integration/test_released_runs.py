"""Released runs: written, continued on other ranks, verified, and what is refused of a stranger's or a damaged one."""

import errno
import json
import os
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from pretrain import cli
from pretrain.checkpoint.format import seal
from pretrain.cli.wish_commands.command_steps import CommandSteps
from pretrain.release.released_course import read_course
from pretrain.release.released_run import hash_file
from pretrain.run.folder import RunDir
from pretrain.run.lease import Lease
from pretrain.utils.io import json_bytes, set_fault_hook
from tests.helpers.cli import run_cli, run_warm
from tests.helpers.fork_server import ROOT
from tests.helpers.runs import RunMaker

ALONE = ("engine.kind=single", "engine.zero_stage=0", "data.lanes=2")
SHORT = ("train.steps=12", "checkpoint.every_steps=4", "checkpoint.keep_every_steps=4", "optim.schedule.warmup_steps=2")
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus) -> RunDir:
    """A run of 12 steps in two starts, with checkpoints of steps 4, 8 and 12."""
    runs = RunMaker(tmp_path_factory.mktemp("released"), corpus)
    for stop in (6, 12):
        runs.train("mine", *ALONE, *SHORT, f"train.stop_after={stop}", ranks=1)
    return runs.folder("mine")


@pytest.fixture(scope="module")
def released(run, tmp_path_factory) -> Path:
    """Its release."""
    out = tmp_path_factory.mktemp("out") / "mine"
    assert cli.run(["release", str(run.path), str(out)]) == 0
    return out


@pytest.fixture
def copy(released, tmp_path) -> Path:
    """A copy of the release, to be damaged."""
    return Path(shutil.copytree(released, tmp_path / "copy"))


@pytest.fixture
def data(corpus) -> str:
    """The override that names the place of the data, which a release does not."""
    return f"data.path={corpus}"


@pytest.fixture
def warm_steps(monkeypatch):
    """Runs the commands of a command in warm forks: ranks without their launcher."""

    def run(self, arguments: list[str], stop=None) -> int:
        words = list(arguments)
        assert words[:2] == ["launch", "local"] and words[3] == "--ranks"
        done = run_warm("train", words[2], *words[5:], cwd=ROOT, ranks=int(words[4]))
        assert done.code == 0, done.stderr
        return done.code

    monkeypatch.setattr(CommandSteps, "run", run)


def edit(path: Path, change) -> None:
    """Changes the content of a release.json, and seals it again."""
    content = json.loads(path.read_text())["content"]
    change(content)
    path.write_bytes(json_bytes(seal(content)))


def names_below(folder: Path) -> set[str]:
    """The files of a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_release_has_everything_but_the_place_of_the_run(run, released):
    names = names_below(released)
    records = {"config.yaml", "run.json", "audit.jsonl", "metrics.jsonl", "tokenizer.json", "normalize.json"}
    data = {
        "data/" + next(iter((released / "data").iterdir())).name + f"/{name}"
        for name in ("options.json", "data_card.md")
    }
    checkpoints = {f"checkpoints/{name}" for name in names_below(run.checkpoints) if name.startswith("step-")}
    assert names == records | data | checkpoints | {"README.md", "ledger.json", "release.json"}
    assert {name.split("/")[1] for name in checkpoints} == {"step-00000004", "step-00000008", "step-00000012"}
    text = "".join((released / name).read_text() for name in ("config.yaml", "run.json", "README.md", "release.json"))
    assert str(run.path.parent.parent) not in text and os.uname().nodename not in re.findall(r'"host".*', text)
    assert '"pid"' not in text


def test_every_nth_checkpoint_is_taken_and_the_newest(run, tmp_path, capsys):
    assert cli.run(["release", str(run.path), str(tmp_path / "out"), "--every", "8", "--shards"]) == 0
    assert "checkpoints of steps 8, 12" in capsys.readouterr().out
    (data,) = (tmp_path / "out/data").iterdir()
    assert (data / "index.json").is_file() and list(data.glob("train/*.tar"))
    shutil.move(data, tmp_path / "moved")  # verified by their hash, and named
    assert cli.run(["verify-release", str(tmp_path / "out"), "--steps", "0"]) == 66
    assert "data/" in capsys.readouterr().err


def test_a_continuation_has_the_rows_of_the_release_bit_for_bit(released, data, run, tmp_path, warm_steps, capsys):
    new = tmp_path / "new"
    assert cli.run(["continue", str(released), data, "--from-step", "8", "--output", str(new)]) == 0
    assert "steps 9 to 12: equal to the released ones in every bit" in capsys.readouterr().out
    assert (new / "checkpoints/step-00000012").is_dir()
    assert read_course(RunDir(new)).rows[:8] == read_course(run).rows[:8]
    record, original = (json.loads((folder / "run.json").read_text()) for folder in (new, released))
    assert record["attempts"][-1]["number"] == 3 and record["id"] != original["id"]
    # The same command has nothing to do; another step is another run.
    assert cli.run(["continue", str(released), data, "--from-step", "8", "--output", str(new)]) == 0
    assert cli.run(["continue", str(released), data, "--from-step", "4", "--output", str(new)]) == 64
    assert "continues step 8 of run" in capsys.readouterr().err


def test_other_ranks_continue_with_the_same_samples(released, data, tmp_path, warm_steps, capsys):
    items = ["engine.kind=ddp", "train.stop_after=6"]
    new = ["--output", str(tmp_path / "new"), "--ranks", "2"]
    assert cli.run(["continue", str(released), data, "--from-step", "4", *new, *items]) == 0
    out = capsys.readouterr().out
    samples = r"steps 5 to 6: the released samples; losses differ by \S+ in the first 20 steps"
    assert re.search(rf"{samples} \(dropout draws other masks here\)", out)
    assert "not compared in bits: ranks is 2, and was 1" in out


def test_another_course_is_not_compared(released, data, tmp_path, warm_steps, capsys):
    new = ["--from-step", "8", "--output", str(tmp_path / "new")]
    assert cli.run(["continue", str(released), data, *new, "optim.lr=0.1"]) == 0
    assert "not compared with the released rows: optim.lr changed" in capsys.readouterr().out


def test_drawn_steps_are_trained_again_from_the_checkpoint_before_or_the_beginning(released, data, warm_steps, capsys):
    assert cli.run(["verify-release", str(released), data, "--seed", "1", "--steps", "2", "--within", "2"]) == 0
    out = capsys.readouterr().out
    drawn = re.search(r"drawn by --seed 1: steps (\d+), (\d+)", out).groups()
    assert all(int(step) % 4 in (1, 2) for step in drawn)
    assert out.count("equal to the released ones in every bit") == len({int(step) // 4 for step in drawn})
    assert "verified: 2 drawn steps" in out


def test_a_row_that_was_not_trained_is_found(copy, data, warm_steps, capsys):
    lines = (copy / "audit.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[9])
    lines[9] = json.dumps(row | {"loss": (float.fromhex(row["loss"]) + 1e-12).hex()}) + "\n"
    (copy / "audit.jsonl").write_text("".join(lines))
    assert cli.run(["verify-release", str(copy)]) == 66
    assert "audit.jsonl: SHA-256" in capsys.readouterr().err
    rewrite(copy, "audit.jsonl", "".join(lines))
    assert cli.run(["verify-release", str(copy), data, "--steps", "12", "--within", "3"]) == 1
    assert "DIFFERENT at step 10: loss is" in capsys.readouterr().out


def test_a_run_that_began_anew_is_compared_by_the_hashes_of_the_ledger(released, run, tmp_path, capsys):
    ledger = tmp_path / "ledger.json"
    shutil.copy(released / "ledger.json", ledger)
    assert cli.run(["verify-release", str(ledger), "--run", str(run.path)]) == 0
    assert "steps 1 to 12 are equal to the released ones in every bit" in capsys.readouterr().out
    content = json.loads(ledger.read_text())
    last = "0" if content["rows"][-1] == "1" else "1"
    ledger.write_bytes(json_bytes(content | {"rows": content["rows"][:-1] + last}))
    assert cli.run(["verify-release", str(ledger), "--run", str(run.path)]) == 1
    assert "DIFFERENT at step 12" in capsys.readouterr().out
    content["environments"][0][1]["torch"] = "1.0"
    ledger.write_bytes(json_bytes(content))
    assert cli.run(["verify-release", str(ledger), "--run", str(run.path)]) == 0
    assert re.search(r"NOT COMPARED with .*: torch is .*, and was 1.0", capsys.readouterr().out)


def test_a_released_run_is_not_changed(released, tmp_path):
    before = names_below(released)
    for command in (["train", f"{released}/config.yaml", "train.steps=20"], ["rollback", str(released), "--to", "4"]):
        done = run_warm(*command, cwd=tmp_path)  # whose stop signals would stay blocked in this process
        assert done.code == 64
        assert "a released run is not changed; continue it in a folder of its own" in done.stderr
    assert cli.run(["runs", str(released.parent)]) == 0
    assert names_below(released) == before


def refused(arguments: list[str], code: int, message: str, capsys) -> None:
    """Checks that a command says why in one line, and has written nothing."""
    out = Path(arguments[2]).parent if arguments[0] == "release" else None
    before = sorted(out.iterdir()) if out else []
    assert cli.run(arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert out is None or sorted(out.iterdir()) == before


def test_a_live_run_is_not_released(run, tmp_path, capsys):
    lease = Lease(run.lease)
    try:
        refused(["release", str(run.path), str(tmp_path / "out")], 73, f"in use by process {os.getpid()}", capsys)
    finally:
        lease.release()


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [
        (lambda run: (run.checkpoints / "step-00000008/rank-00000.safetensors").write_bytes(b"x"), 66,
         "step-00000008: rank-00000.safetensors is not as its manifest says"),
        (lambda run: (run.checkpoints / "step-00000008/manifest.json").write_bytes(b"{"), 66,
         "the manifest is damaged"),
        (lambda run: shutil.rmtree(run.checkpoints), 66, "there is no checkpoint to release"),
        (lambda run: run.audit.write_text("\n".join(run.audit.read_text().splitlines()[1:]) + "\n"), 65,
         "audit.jsonl: step 1: the row is missing"),
        (lambda run: run.audit.write_text("".join(run.audit.read_text().splitlines(keepends=True)[:9])), 65,
         "the ledger ends at step 9, the newest checkpoint is of step 12"),
        (lambda run: run.record.unlink(), 64, "no run here"),
    ],
)  # fmt: skip
def test_a_damaged_run_is_not_released(run, tmp_path, capsys, damage, code, message):
    copy = RunDir(Path(shutil.copytree(run.path, tmp_path / "run")))
    damage(copy)
    refused(["release", str(copy.path), str(tmp_path / "out")], code, message, capsys)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), 74, "No space left on device; free space"),
    ],
)
def test_an_interruption_leaves_no_release(run, tmp_path, capsys, error, code, message):
    def stop(operation: str, path: Path) -> None:
        if operation == "write" and "step-00000008" in str(path):
            raise error

    set_fault_hook(stop)
    try:
        refused(["release", str(run.path), str(tmp_path / "out")], code, message, capsys)
    finally:
        set_fault_hook(None)


def test_a_release_needs_room_and_a_new_folder(run, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 9, 1))
    refused(["release", str(run.path), str(out)], 74, r"bytes are to be copied, and 1 are free; free space", capsys)
    out.mkdir()
    (out / "mine").touch()
    refused(["release", str(run.path), str(out)], 64, "exists and is not an empty folder", capsys)


def foreign(copy: Path, name: str) -> None:
    """Lets a release name a file outside."""
    edit(copy / "release.json", lambda one: one["files"].update({name: {"num_bytes": 1, "sha256": "0"}}))


def rewrite(copy: Path, name: str, text: str) -> None:
    """Replaces a file of a release, hash included."""
    (copy / name).write_text(text)
    size, digest = hash_file(copy / name)
    edit(copy / "release.json", lambda one: one["files"].update({name: {"num_bytes": size, "sha256": digest}}))


@pytest.mark.parametrize(
    ("change", "items", "code", "message"),
    [
        (lambda copy: None, ["--from-step", "5"], 66, "step 5 was not released; there is 0, 4, 8, 12; give one of"),
        (lambda copy: None, ["data.path=/nowhere"], 65, "/nowhere: the data of the run are not there"),
        (lambda copy: None, ["--ranks", "7"], 64, "must be a multiple of"),
        (lambda copy: None, ["optim.lrr=1"], 64, "did you mean 'optim.lr'"),
        (lambda copy: (copy / "release.json").unlink(), [], 66, "no released run"),
        (lambda copy: (copy / "release.json").write_text("{}"), [], 66, "release.json: damaged"),
        (lambda copy: foreign(copy, "../evil"), [], 66, "'../evil' leaves the folder"),
        (lambda copy: foreign(copy, "/etc/passwd"), [], 66, "'/etc/passwd' leaves the folder"),
        (lambda copy: edit(copy / "release.json", lambda one: one.update(schema=2)), [], 66, "in another format"),
        (lambda copy: edit(copy / "release.json", lambda one: one.update(steps=["4"])), [], 66, "no whole number"),
        (lambda copy: (copy / "run.json").unlink(), [], 66, "run.json: No such file"),
        (lambda copy: edit(copy / "release.json", lambda one: one["files"].pop("run.json")), [], 66,
         "run.json: not in the release"),
        (lambda copy: edit(copy / "release.json", lambda one: one.update(data=[])), [], 66,
         "different sources of data"),
        (lambda copy: edit(copy / "release.json", lambda one: one["data"][0].update(name="../..")), [], 66,
         "leaves the folder"),
        (lambda copy: (copy / "checkpoints/step-00000004/rank-00000.safetensors").write_bytes(b"x"),
         ["--from-step", "4"], 66, "rank-00000.safetensors is not the released one"),
        (lambda copy: (copy / "tokenizer.json").write_text("{}"), [], 66, "tokenizer.json is not the released one"),
        (lambda copy: rewrite(copy, "audit.jsonl", (copy / "audit.jsonl").read_text().replace('"0x1', '1', 1)), [], 65,
         "audit.jsonl"),
        (lambda copy: rewrite(copy, "config.yaml", (copy / "config.yaml").read_text().replace(
            "extend: []", "extend: [antigravity_of_a_stranger]")), [], 64,
         "may be code of a stranger, and is not imported"),
        (lambda copy: edit(copy / "release.json", lambda one: one.update(tokenizer_sha256="0" * 64)), [], 65,
         "the tokenizer is another than the run's: sha256 .*, released 000000000000"),
        (lambda copy: edit(copy / "release.json", lambda one: one.update(data_sha256="0" * 64)), [], 65,
         "the token shards are others than the run's"),
    ],
)  # fmt: skip
def test_a_release_that_cannot_be_continued_is_refused_by_name(
    copy, tmp_path, capsys, corpus, change, items, code, message
):
    change(copy)
    data = [] if any("data.path" in item for item in items) else [f"data.path={corpus}"]
    before = sorted(tmp_path.iterdir())
    refused(["continue", str(copy), "--output", str(tmp_path / "new"), *data, *items], code, message, capsys)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.long
def test_the_commands_themselves(released, data, tmp_path):
    ranks = ["--ranks", "2", "engine.kind=ddp"]
    done = run_cli("continue", str(released), data, "--from-step", "8", *ranks, cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert "$ pretrain launch local runs/run-from-8/config.yaml --ranks 2" in done.stdout
    assert "steps 9 to 12: the released samples" in done.stdout
    done = run_cli("verify-release", str(released), data, "--steps", "1", cwd=tmp_path)
    assert done.code == 0 and "\nverified: 1 drawn step" in done.stdout, done.stdout + done.stderr

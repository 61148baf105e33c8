"""`pretrain launch slurm` where there is no Slurm: what it prints, what it refuses, and that a login node is enough."""

import contextlib
import json
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain import cli
from pretrain.config.load import dump_config, load_config
from pretrain.run.folder import RunDir
from pretrain.run.lease import Lease
from pretrain_launch.journal import read_journal
from pretrain_launch.runs import find_runs
from tests.helpers.cli import run_warm
from tests.helpers.runs import CONFIG

NEEDED = ("--nodes", "2", "--time", "12h")


@pytest.fixture
def launch(tmp_path, corpus, monkeypatch, capsys):
    """Runs the command on a config in an empty folder; returns exit code, output and errors."""
    (tmp_path / "a.yaml").write_text(CONFIG.format(runs="runs", data=corpus))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(["launch", "slurm", "a.yaml", *arguments])
        return code, *capsys.readouterr()

    return run


def test_a_dry_run_needs_no_slurm_and_writes_nothing(launch, tmp_path):
    code, output, errors = launch(*NEEDED, "--dry-run")
    assert (code, errors) == (
        0,
        "not submitted; config, data and run folder are checked; the partition is not checked, as sinfo does not list "
        "it; no job is in the queue; Slurm is not asked, as there is no sbatch here\n",
    )
    assert output.startswith("#!/bin/bash\n")
    assert (
        "$ sbatch --parsable --job-name=run --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --time=0-12:00:00 "
        in output
    )
    spec = json.loads(output[output.index("spec.json:\n") + len("spec.json:\n") :])
    assert (spec["run"], spec["cwd"], spec["nodes"]) == (f"{tmp_path}/runs/run", str(tmp_path), 2)
    assert not (tmp_path / "runs").exists()


def test_without_slurm_nothing_is_submitted_and_the_command_says_so(launch):
    code, _, errors = launch(*NEEDED)
    assert (code, errors) == (
        69,
        "error: there is no sbatch on this machine; submit from a login node of a Slurm cluster\n",
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--nodes", "5"), 64, "must be a multiple of seq_len 32 x micro 2 x ranks 5 = 320; use 320 or 640"),
        (("--mode", "ssh"), 64, "--mode: unknown mode 'ssh'; use torchrun or srun or accelerate or deepspeed"),
        (("--time", "1m"), 64, "--time: '1m' is 60 s; a job saves 60 s before its end; give at least 2m"),
        (("--cluster", "nowhere"), 64, "--cluster: there is no cluster 'nowhere'; give a YAML file"),
        (("--partition", "a b"), 64, "--partition: 'a b' is no name of a partition; see `sinfo`"),
        (("--vary", "optim.lr"), 64, "--vary: 'optim.lr' names no values"),
        (("--vary", "optim.lr=1,2", "--jobs", "2"), 64, "--jobs: is not for arrays"),
        (("run.dir=a%j",), 64, "cannot be passed to Slurm; no control characters, % or backslash in paths"),
        (("data.path=absent",), 65, "absent"),
        (("init.from=absent",), 64, "error: init.from=absent: no run, checkpoint, model folder or Hugging Face folder"),
        (("run.name=a/b",), 64, "run.name"),
    ],
)
def test_what_cannot_work_is_refused_before_it_is_submitted(launch, tmp_path, arguments, code, message):
    found, _, errors = launch(*arguments)
    assert found == code
    assert message in errors
    assert not (tmp_path / "runs").exists()


def test_force_submits_what_is_predicted_not_to_fit(launch):
    code, _, errors = launch("--nodes", "5", "--force", "--dry-run")
    assert code == 0
    assert errors.startswith("warning: run: batch.global_tokens=384 must be a multiple of ")


def test_an_elastic_run_asks_for_a_range_and_knows_what_divides(launch):
    _, output, _ = launch("--nodes", "5", "launch.elastic=true", "--dry-run")
    assert "--nodes=1-5 --mincpus=1" in output
    assert '"node_counts": [\n    1,\n    2,\n    3\n  ]' in output


@contextlib.contextmanager
def held(run: Path) -> Iterator[None]:
    """Owns a run folder, as a process that trains does."""
    lease = Lease(run / "lease")
    try:
        yield
    finally:
        lease.release()


def test_a_run_that_is_at_work_is_not_submitted_twice(launch, tmp_path):
    with held(tmp_path / "runs" / "run"):
        for options in (["--dry-run"], [], ["--dry-run", "--singleton"]):  # it waits for jobs alone
            code, _, errors = launch(*NEEDED, *options)
            assert (code, "in use by process" in errors) == (73, True)


def test_a_config_that_the_run_could_not_go_on_with_is_refused_before_it_waits_in_the_queue(launch, tmp_path):
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    stored = load_config(tmp_path / "a.yaml", ["optim.lr=0.5"])
    model = stored.model.model_copy(update={"vocab_size": 31})  # as the run has found it in the data
    (run / "config.yaml").write_text(dump_config(stored.model_copy(update={"model": model})))
    assert launch(*NEEDED, "--dry-run", "seed=8")[0] == 0  # nothing was saved yet
    (run / "checkpoints" / "step-00000020").mkdir(parents=True)  # a damaged one counts too, as it does for the job
    code, output, errors = launch(*NEEDED, "--dry-run")
    assert (code, output.startswith("#!/bin/bash")) == (0, True)
    assert "warn    optim.lr: 0.5 -> 0.001" in errors and "vocab_size" not in errors
    code, output, errors = launch(*NEEDED, "--dry-run", "seed=8")
    assert (code, output) == (64, "")
    assert "the run run was started with another config (on purpose only: seed: 7 -> 8)" in errors
    assert launch(*NEEDED, "--dry-run", "seed=8", "resume.allow=[seed]")[0] == 0
    assert "never: model.vocab_size: 31 -> 32" in launch(*NEEDED, "--dry-run", "model.vocab_size=32")[2]


def test_elements_of_an_array_have_folders_of_their_own(launch, tmp_path):
    assert launch(*NEEDED, "--vary", "optim.lr=1e-3,3e-4")[0] == 69  # no sbatch
    assert find_runs(tmp_path / "runs") == []
    command_of_slurm(tmp_path, "sbatch", "echo 10")
    assert launch(*NEEDED, "--vary", "optim.lr=1e-3,3e-4")[0] == 0
    for number, lr in enumerate((1.0e-3, 3.0e-4)):
        folder = tmp_path / "runs" / f"run-{number}" / "launch"
        assert stat.S_IMODE((folder / "spec.json").stat().st_mode) == 0o600
        assert json.loads((folder / "spec.json").read_text())["name"] == f"run-{number}"
        config = load_config(folder / "config.yaml")
        assert (config.optim.lr, config.tracking.group) == (lr, "run")
    listed = json.loads((tmp_path / "runs" / "run-0" / "launch" / "array.json").read_text())
    assert listed["specs"] == [str(tmp_path / "runs" / f"run-{number}" / "launch" / "spec.json") for number in range(2)]


def command_of_slurm(folder: Path, name: str, script: str) -> None:
    """Makes a command of Slurm, a script for sh."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_sweep_names_its_folders_also_to_those_who_give_its_name(launch, tmp_path, capsys):
    command_of_slurm(tmp_path, "sbatch", "echo 10")
    code, output, _ = launch(*NEEDED, "--vary", "optim.lr=1e-3,3e-4")
    folders = [str(tmp_path / "runs" / f"run-{number}") for number in range(2)]
    assert (code, output.splitlines()) == (0, ["submitted 2 runs as job array 10:", *folders])
    assert cli.run(["launch", "status", "runs/run"]) == 64
    assert "no run here (no run.json, no launch/spec.json); give one of its sweep: runs/run-0, runs/run-1" in (
        capsys.readouterr().err
    )


def test_a_dry_run_makes_the_checks_of_a_submission_where_slurm_is_there(launch, tmp_path):
    command_of_slurm(tmp_path, "sbatch", "echo 10")
    command_of_slurm(tmp_path, "sinfo", "echo 'main*|2|1-infinite|1-00:00:00'")
    command_of_slurm(tmp_path, "squeue", "echo '10|10|RUNNING|None|n1|0:10|1:00|x'")
    code, output, errors = launch(*NEEDED, "--dry-run")
    assert (code, output.startswith("#!/bin/bash")) == (0, True)
    assert errors.endswith("; the partition allows its nodes and time; no job is in the queue; Slurm accepts it\n")
    assert launch("--nodes", "3", "--dry-run")[0] == 64
    assert launch(*NEEDED)[0] == 0
    code, output, errors = launch(*NEEDED, "--dry-run")
    assert (code, output, "job 10 of this run is RUNNING; wait for it" in errors) == (73, "", True)
    with held(tmp_path / "runs" / "run"):  # by the job
        refusals = [launch(*NEEDED, *options) for options in (["--dry-run"], [])]
    job = "job 10 of this run is RUNNING; wait for it, or cancel it: pretrain launch cancel "
    assert refusals == [(73, "", f"error: {tmp_path}/runs/run: {job}{tmp_path}/runs/run\n")] * 2
    joins = "; 1 run would join jobs in the queue; Slurm accepts it\n"
    assert launch(*NEEDED, "--dry-run", "--singleton")[2].endswith(joins)
    assert launch(*NEEDED, "--dry-run", "--singleton", "optim.lr=1")[0] == 73
    command_of_slurm(tmp_path, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert "; the queue is not checked, as Slurm does not answer; " in launch(*NEEDED, "--dry-run")[2]
    with held(tmp_path / "runs" / "run"):
        code, _, errors = launch(*NEEDED, "--dry-run")
    assert (code, "in use by process" in errors) == (73, True)


GRES = "sbatch: error: Invalid generic resource (gres) specification"
NOPE = "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified"
STARTS = "2026-11-24T14:41:45 using 2 processors on nodes n[1-2] in partition main"
FEW = "Requested node configuration is not available"
AWAY = "allocation failure: Unable to contact slurm controller (connect failure)"
GPUS = "it requests GPUs (1 a node): none with --gpus-per-node 0, or with `gpus: none` in the cluster's file"


@pytest.mark.parametrize(
    ("options", "said", "expected"),
    [
        ((), f"sbatch: Job 11 to start at {STARTS}", f"no job is in the queue; Slurm would start it at {STARTS}"),
        ((), f"allocation failure: {FEW}", f"; as its nodes are now, Slurm would not start it: {FEW}"),
        ((), AWAY, "; Slurm is not asked, as it does not answer"),
        (("--gpus-per-node", "1"), GRES, f"error: sbatch: Slurm refuses the job: {GRES[15:]}; {GPUS}"),
        (
            ("--partition", "nope"),
            NOPE,
            f"error: sbatch: Slurm refuses the job: {NOPE[15:48]}; the partitions are main",
        ),
        ((), "allocation failure: Invalid feature specification", "refuses the job: Invalid feature specification"),
    ],
)
def test_a_dry_run_tells_what_slurm_says_of_the_job_that_it_shows(launch, tmp_path, options, said, expected):
    """The answers are those of 22.05. Drained nodes, whose job would wait, and too few are one to it."""
    script = f"echo \"$@\" >{tmp_path}/asked\necho '{said}' >&2\n[ {int('to start' in said)} = 1 ]"
    command_of_slurm(tmp_path, "sbatch", script)
    command_of_slurm(tmp_path, "sinfo", "echo main")
    code, output, errors = launch(*NEEDED, *options, "--dry-run")
    assert (code, errors.splitlines()[-1].endswith(expected)) == (64 if "refuses" in expected else 0, True), errors
    shown = next(line for line in output.splitlines() if line.startswith("$ sbatch "))
    asked = (tmp_path / "asked").read_text().split()
    assert ["$", "sbatch", *asked[1:]] == shlex.split(shown) and asked[0] == "--test-only"
    assert not (tmp_path / "runs").exists()


def test_a_controller_that_is_away_at_submission_is_no_bad_command_line(launch, tmp_path):
    command_of_slurm(tmp_path, "sbatch", f"echo '{AWAY}' >&2; exit 1")
    code, _, errors = launch(*NEEDED)
    assert (code, errors.startswith("error: sbatch: Slurm does not answer: Unable to contact")) == (69, True), errors
    assert not list((tmp_path / "runs").rglob("spec.json"))


def test_several_configs_and_values_are_one_array(launch, tmp_path):
    """Named after the first config; a run that would need other nodes, or another folder, is refused."""
    command_of_slurm(tmp_path, "sbatch", f'echo "$@" >>{tmp_path}/asked; echo 10')
    text = (tmp_path / "a.yaml").read_text()
    (tmp_path / "b.yaml").write_text(text.replace("name: run", "name: other").replace("seed: 7", "seed: 8"))
    both = ("b.yaml", "train.steps=9", "--vary", "optim.lr=1e-3,3e-4", "--vary", "batch.micro=1,2")
    code, output, errors = launch(*NEEDED, *both)
    assert code == 0, errors
    folders = [tmp_path / "runs" / f"run-{number}" for number in range(8)]
    assert output.splitlines() == ["submitted 8 runs as job array 10:", *map(str, folders)]
    assert " --array=0-7 " in (tmp_path / "asked").read_text()
    configs = [load_config(folder / "launch" / "config.yaml") for folder in folders]
    found = [(config.seed, config.optim.lr, config.batch.micro) for config in configs]
    assert found == [(seed, lr, micro) for seed in (7, 8) for lr in (1e-3, 3e-4) for micro in (1, 2)]
    assert {(config.train.steps, config.tracking.group) for config in configs} == {(9, "run")}
    (tmp_path / "b.yaml").write_text(text.replace("dir: runs", "dir: others"))
    for further, said in (("b.yaml", f"run.dir is {tmp_path}/others for run-1, {tmp_path}/runs for"),
                          ("absent", "absent"), ("engine.device", "engine.device")):  # fmt: skip
        code, _, errors = launch(*NEEDED, further, "--dry-run")
        assert (code, said in errors) == (64, True), errors
    assert launch(*NEEDED, "b.yaml", "--jobs", "2")[0] == 64


def test_a_sweep_is_continued_by_its_elements_that_are_neither_complete_nor_queued(
    launch, tmp_path, monkeypatch, capsys
):
    """A job of the first array looks for its spec at each start, in the list that the second writes."""
    command_of_slurm(tmp_path, "sbatch", f'echo "$@" >>{tmp_path}/asked; read -r n <{tmp_path}/number; echo $n')
    (tmp_path / "number").write_text("10\n")
    vary = ("--vary", "optim.lr=1e-3,3e-4,1e-4,3e-5")
    assert launch("--nodes", "1", *vary)[0] == 0
    (tmp_path / "number").write_text("20\n")
    command_of_slurm(tmp_path, "squeue", "echo '11|10_1|RUNNING|None|n1|0:10|1:00|x'")
    complete = "pretrain.cli.launch.complete_line"
    monkeypatch.setattr(complete, lambda one: "run-2 is complete" if one.run.name == "run-2" else "")
    code, output, errors = launch("--nodes", "1", *vary)
    folders = [str(tmp_path / "runs" / f"run-{number}") for number in range(4)]
    assert (code, output.splitlines()) == (
        0,
        [f"{folders[1]} is left out: job 10_1 is RUNNING", "run-2 is complete", "submitted 2 runs as job array 20:",
         folders[0], folders[3]],
    ), errors  # fmt: skip
    assert " --array=0,3 " in (tmp_path / "asked").read_text().splitlines()[-1]
    assert [row["array"] for row in read_journal(RunDir(Path(folders[3])))] == ["10_3", "20_3"]
    assert launch("--nodes", "1", "--vary", "optim.lr=1e-3,3e-4")[0] == 0
    listed = json.loads((tmp_path / "runs" / "run-0" / "launch" / "array.json").read_text())["specs"]
    assert listed == [f"{folder}/launch/spec.json" for folder in folders]

    command_of_slurm(
        tmp_path, "squeue", "echo '11|10_1|RUNNING|None|n1|0:10|1:00|x'; echo '20|20_3|PENDING|Priority||0:00|1:00|x'"
    )
    command_of_slurm(tmp_path, "scancel", f'echo "$@" >>{tmp_path}/cancelled')
    assert cli.run(["launch", "cancel", "runs/run", "--grace", "0"]) == 0
    assert (tmp_path / "cancelled").read_text() == "20_3\n10_1\n"
    assert {"run-1: cancelled", "run-3: cancelled"} <= set(capsys.readouterr().out.splitlines())


def test_a_partition_that_is_unknown_to_slurm_is_refused_with_those_that_it_has(launch, tmp_path):
    command_of_slurm(tmp_path, "sbatch", "echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    command_of_slurm(tmp_path, "sinfo", "echo debug; echo long")
    code, _, errors = launch(*NEEDED, "--partition", "nope")
    assert (code, errors) == (
        64,
        "error: sbatch: Slurm refuses the job: invalid partition specified: nope; the partitions are debug, long\n",
    )


NODES = "--nodes: a job of 2 nodes would wait for ever; the partitions have at most: "
TIMES = "--time: a job of 12:00:00 would wait for ever; the partitions allow at most: "


@pytest.mark.parametrize(
    ("sinfo", "options", "refusal"),
    [
        ("echo 'main*|1|1-infinite|infinite'; echo 'big|4|1-infinite|infinite'", (), f"{NODES}main 1, big 4"),
        ("echo 'main*|1|1-infinite|infinite'; echo 'main*|1|1-infinite|infinite'", (), ""),  # of two states
        ("echo 'main*|4|1-infinite|infinite'; echo 'big|8|1|30:00'", ("--partition", "big"), f"{NODES}main 4, big 1"),
        ("echo 'main*|4|1-infinite|1-00:00:00'; echo 'big|1|1-infinite|30:00'", ("--partition", "main,big"), ""),
        ("echo 'main*|1|1-infinite|infinite'", ("launch.elastic=true",), ""),
        ("echo 'main*|1|1-infinite|30:00'", ("launch.elastic=true",), f"{TIMES}main 30:00"),
        (
            "echo 'main*|4|1-infinite|11:59:00'; echo 'long|1|1-infinite|7-00:00:00'",
            (),
            f"{TIMES}main 11:59:00, long 7-0",
        ),
        ("echo 'main*|4|1-infinite|30:00'", ("--partition", "main", "--force"), ""),
        ("echo 'main*|4|1-infinite|12:00:00'", (), ""),
        ("echo 'main*|1|1-infinite|infinite'", ("--force",), ""),
        ("echo 'main*|1|1-infinite|infinite'", ("--partition", "hidden"), ""),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", (), ""),
    ],
)
def test_more_than_a_partition_allows_is_refused_before_a_job_waits_for_ever(launch, tmp_path, sinfo, options, refusal):
    command_of_slurm(tmp_path, "sbatch", "echo 10")
    command_of_slurm(tmp_path, "sinfo", sinfo)
    code, output, errors = launch(*NEEDED, *options)
    if not refusal:
        assert (code, output) == (0, f"submitted as job 10: {tmp_path}/runs/run\n"), errors
        return
    assert (code, output) == (64, "")
    assert errors.startswith(f"error: {refusal}")
    assert errors.endswith("; ask for less, or another --partition; --force submits it\n")
    assert not (tmp_path / "runs").exists()


def test_a_run_with_a_job_in_the_queue_warns_where_it_is_started_here_and_is_not_submitted(launch, tmp_path):
    """Slurm is asked where the journal names jobs, and by no rank."""
    command_of_slurm(tmp_path, "sbatch", "echo 10")
    asked = tmp_path / "asked"
    command_of_slurm(tmp_path, "squeue", f"echo asked >> {asked}; echo '10|10|PENDING|Resources||0:00|1:00|x'")
    config = ["a.yaml", "train.steps=1", "optim.schedule.warmup_steps=0", "engine.kind=single", "engine.zero_stage=0"]

    def errors_of(*arguments: str) -> str:
        done = run_warm(*arguments, cwd=tmp_path)
        assert done.code == 0, done.stderr
        return done.stderr

    assert "warning" not in errors_of("train", *config, "run.name=other")
    assert not asked.exists()
    assert launch(*NEEDED)[0] == 0
    code, _, errors = launch(*NEEDED)
    assert (code, "job 10 of this run is PENDING; wait for it, or cancel it" in errors) == (73, True)
    asked.unlink()
    warning = (
        "warning: job 10 of this run is in the queue, and ends (73) if it finds the run in use; cancel it first: "
        "pretrain launch cancel runs/run; afterwards: pretrain launch resubmit runs/run\n"
    )
    errors = errors_of("launch", "local", *config)
    assert errors.count(warning) == 1
    assert asked.read_text() == "asked\n"
    errors = errors_of("train", *config, "train.steps=2")
    assert errors.count(warning) == 1


def test_a_job_after_one_in_the_queue_joins_its_chain_and_changes_nothing_that_it_reads(launch, tmp_path):
    """The job in the queue reads config and spec at its next start."""
    command_of_slurm(tmp_path, "sbatch", f"read -r n <{tmp_path}/next; echo $((n + 1)) >{tmp_path}/next; echo $n")
    (tmp_path / "next").write_text("10\n")
    command_of_slurm(tmp_path, "squeue", "echo '10|10|RUNNING|None|n1|0:10|1:00|x'")
    assert launch("--nodes", "1")[0] == 0
    stored = tmp_path / "runs" / "run" / "launch"
    before = [(stored / name).read_bytes() for name in ("spec.json", "config.yaml")]
    for more in (["--singleton"], ["--jobs", "3"]):
        code, _, errors = launch("--nodes", "2", *more, "optim.lr=5e-3", "--partition", "big")
        assert (code, errors) == (
            73,
            f"error: {tmp_path}/runs/run: job 10 of this run is RUNNING, submitted with other settings (nodes: 1 -> 2, "
            "site.partition: null -> 'big', optim.lr: 0.001 -> 0.005); submit without these changes, or after "
            f"pretrain launch cancel {tmp_path}/runs/run\n",
        )
    code, output, _ = launch("--nodes", "1", "--jobs", "2")
    assert (code, output.count("submitted as job 1")) == (0, 2)
    assert [(stored / name).read_bytes() for name in ("spec.json", "config.yaml")] == before
    rows = read_journal(RunDir(tmp_path / "runs" / "run"))
    assert ([row["job"] for row in rows], len({row["chain"] for row in rows})) == (["10", "11", "12"], 1)
    (stored / "cancelled").touch()
    code, _, errors = launch("--nodes", "1", "--singleton")
    assert (code, "job 10 of this run is RUNNING; it is ending: try again in a moment" in errors) == (73, True)
    assert (stored / "cancelled").exists()


def test_the_group_of_a_sweep_may_be_chosen(launch, tmp_path):
    command_of_slurm(tmp_path, "sbatch", "echo 10")
    launch(*NEEDED, "--vary", "optim.lr=1e-3,3e-4", "tracking.group='2026'")
    groups = [load_config(path).tracking.group for path in tmp_path.glob("runs/run-*/launch/config.yaml")]
    assert groups == ["2026", "2026"]


def test_a_login_node_needs_no_torch():
    launch = ", ".join(f"pretrain_launch.{name}" for name in ("job", "node", "preflight", "submit"))
    modules = f"{launch}, pretrain.cli.launch"
    code = f"import sys, {modules}\nprint(sorted({{'torch', 'deepspeed', 'transformers', 'numpy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"

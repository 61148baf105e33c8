"""What is said of a run, from written run folders, journals and answers of squeue."""

import io
import json
import os
import socket
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from pretrain.run.folder import RunDir, begin_attempt, end_attempt
from pretrain.run.owner import LEASE_S
from pretrain_launch import runs
from pretrain_launch.job_table import MAX_STARTS, show_run, show_runs
from pretrain_launch.journal import mark_of_cancel
from pretrain_launch.runs import find_runs, log_line, merge_starts, read_run, read_runs
from pretrain_launch.slurm_tools import find_jobs, parse_jobs
from tests.helpers.waiting import make_old

BEGIN = datetime(2026, 1, 2, 3, 0, tzinfo=UTC)
DIED = 2**22 - 3
"""A process number that no process has."""


def at(minutes: float) -> str:
    """A time of the journal."""
    return (BEGIN + timedelta(minutes=minutes)).isoformat(timespec="seconds")


def start(minutes, job="7", restart=0, nodes=("n1", "n2"), step=0, **more):
    """A row of a start."""
    row = {"event": "start", "job": job, "array": None, "restart": restart, "nodes": list(nodes), "world_size": 2}
    return {**row, "step": step, "at": at(minutes), **more}


def end(minutes, code, reason, job="7", restart=0, decision="requeue", step=0, **more):
    """A row of an end."""
    row = {"event": "end", "job": job, "array": None, "restart": restart, "exit_code": code, "reason": reason}
    return {**row, "step": step, "decision": decision, "at": at(minutes), **more}


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A run folder in which nothing is yet."""
    folder = RunDir(tmp_path / "runs" / "first")
    folder.launch.mkdir(parents=True)
    return folder


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Puts a squeue before all others that gives an answer, and no other commands of Slurm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def answer(*lines: str, code: int = 0, error: str = "") -> None:
        script = folder / "squeue"
        said = "\n".join(lines)
        (folder / "answer").write_text(f"{said}\n" if said else "")
        script.write_text(
            f"#!/bin/sh\nwhile read -r line; do echo \"$line\"; done <'{folder}/answer'\n"
            f"echo '{error}' >&2\nexit {code}\n"
        )
        script.chmod(0o755)

    return answer


def journal(run: RunDir, *rows: dict) -> None:
    """Writes a journal, and the spec that a launched run has."""
    (run.launch / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.launch / "spec.json").write_text(json.dumps({"name": "first"}))


def write_attempts(run: RunDir, *attempts: dict) -> None:
    """Writes run.json."""
    run.record.write_text(json.dumps({"id": "a", "name": "first", "created": at(0), "attempts": attempts}))


def train_a_little(run: RunDir, steps: int = 40) -> None:
    """Writes what a run writes."""
    run.config.write_text("train: {steps: 160}\n")
    row = {"step": steps - 5, "loss": 2.5, "tokens_per_s": 1234.5}
    rows = [{**row, "step": 10, "loss": 3}, row, {"step": steps, "save_s": 1.5}]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9')
    (run.checkpoints / f"step-{steps:08d}").mkdir(parents=True)
    (run.checkpoints / f"step-{steps:08d}" / "manifest.json").write_text("{}")
    (run.checkpoints / f".tmp-step-{2 * steps:08d}").mkdir()
    (run.checkpoints / f"step-{3 * steps:08d}.bad-damaged").mkdir()


def own(run: RunDir, *, pid: int, released: bool = False, age_s: float = 0.0, job: str = "") -> None:
    """Writes the lease of an attempt of this machine."""
    from dataclasses import replace

    from pretrain.run.owner import this_process

    run.lease.mkdir(exist_ok=True)
    path = run.lease / "00000001.json"
    path.write_bytes(replace(this_process(), number=1, pid=pid, released=released, job=job).to_json())
    make_old(path, age_s)


def test_a_local_run_needs_no_slurm(run, squeue):
    begin_attempt(run, "first", {"world_size": 2, "from_step": 0})
    train_a_little(run)
    end_attempt(run, {"exit_code": 75, "reason": "stopped by SIGTERM"})
    facts = read_run(run.path)
    assert (facts.state, facts.exit_code, facts.reason) == ("stopped", 75, "stopped by SIGTERM")
    assert (facts.step, facts.total_steps, facts.loss, facts.tokens_per_s) == (40, 160, 2.5, 1234.5)
    assert (facts.checkpoint_step, facts.job, facts.restarts) == (40, None, 0)
    assert 0 <= facts.checkpoint_age_s < 60
    assert [(start["world_size"], start["nodes"]) for start in facts.starts] == [(2, [socket.gethostname()])]


def test_a_run_over_images_has_images_a_second_and_thousands_have_one_format(run, squeue):
    train_a_little(run)
    row = {"step": 41, "loss": 2.5, "tokens_per_s": 4267.0}
    for more, speed in (({}, "4.27 k tokens/s"), ({"images_per_s": 251.0}, "251 images/s")):
        run.metrics.write_text(json.dumps(row | more) + "\n")
        console = Console(file=io.StringIO(), width=100)
        show_run(read_run(run.path), console)
        assert f"2.5, {speed}" in console.file.getvalue()


def test_the_best_checkpoint_is_named_while_it_is_there(run, squeue):
    train_a_little(run)
    best = {"metric": "val_loss", "value": 1.25, "step": 40}
    (run.checkpoints / "best.json").write_text(json.dumps(best))
    assert read_run(run.path).best == best == read_run(run.path).facts()["best"]
    (run.checkpoints / "best.json").write_text(json.dumps(best | {"step": 41}))
    assert read_run(run.path).best is None


@pytest.mark.parametrize(
    ("lease", "state"),
    [
        ({"pid": os.getpid()}, "running"),
        ({"pid": os.getpid(), "job": "9@cluster"}, "running"),
        ({"pid": os.getpid(), "released": True}, "lost"),
        ({"pid": DIED}, "lost"),
        ({"pid": os.getpid(), "age_s": LEASE_S + 1}, "lost"),
    ],
)
def test_an_attempt_without_an_end_runs_as_long_as_its_owner_gives_signs_of_life(run, squeue, lease, state):
    begin_attempt(run, "first", {"world_size": 1})
    own(run, **lease)
    facts = read_run(run.path)
    assert (facts.state, facts.owner is not None) == (state, state == "running")


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (False, "killed before its first step was done, or never began"),
        (True, "killed, node lost, or disk full, after step 40: the same command continues it"),
    ],
)
def test_a_lost_run_is_shown_with_its_last_step_and_the_remedy(run, squeue, steps, reason):
    begin_attempt(run, "first", {"world_size": 1})
    own(run, pid=DIED)
    if steps:
        train_a_little(run)
    console = Console(width=160, record=True, file=io.StringIO())
    show_runs(read_runs([run.path]), run.path.parent, console)
    assert reason in console.export_text()


SUBMITTED = {"event": "submit", "chain": "a", "job": "7", "array": None, "at": at(0)}
PENDING = "7|7|PENDING|BeginTime||0:00|1-00:00:00|2026-01-02T04:00:00"
RUNNING = "7|7|RUNNING|None|n[1-2]|0:30|1-00:00:00|2026-01-02T03:00:00"


@pytest.mark.parametrize(
    ("rows", "answer", "state"),
    [
        ([start(0)], RUNNING, "running"),
        ([start(0)], RUNNING.replace("RUNNING", "COMPLETING"), "ending"),
        ([start(0), end(5, 75, "stopped by SIGUSR1")], PENDING, "queued"),
        ([start(0)], None, "lost"),
        ([start(0), end(5, 0, "done", decision="end")], None, "done"),
        ([start(0), end(5, 65, "no shard", decision="end")], None, "failed"),
        ([start(0), end(5, 137, "rank 1 was killed"), start(6, restart=1)], RUNNING, "running"),
        ([start(0), end(5, 75, "cancelled by the user (stopped by SIGTERM)", decision="end")], None, "cancelled"),
    ],
)
def test_the_state_of_a_job_is_what_slurm_and_the_journal_say(run, squeue, rows, answer, state):
    journal(run, *rows)
    squeue(*([answer] if answer else []))
    facts = read_run(run.path)
    assert (facts.state, facts.job, facts.restarts) == (state, "7", sum(row["event"] == "start" for row in rows) - 1)


@pytest.mark.parametrize(("answers", "state"), [(True, "failed"), (False, "running")])
def test_the_last_sign_of_life_of_a_job_that_slurm_knows_no_more_is_not_believed(run, squeue, answers, state):
    journal(run, start(0), end(5, 137, "rank 0 was killed", decision="end"))
    own(run, pid=os.getpid(), job="7@cluster")
    squeue(code=0 if answers else 1)
    assert read_run(run.path).state == state


REFUSALS = {"data": (65, "no shard"), "config": (64, "no such key"), "locked": (73, "in use by process 4 on n1")}


@pytest.mark.parametrize("why", REFUSALS)
def test_a_refused_start_is_named_and_the_run_stays_what_it_was(run, squeue, why):
    code, reason = REFUSALS[why]
    stopped = [start(0), end(5, 75, "stopped by SIGUSR1", decision="end")]
    journal(run, *stopped, start(9, job="8"), end(9, code, reason, job="8", decision="end"))
    squeue()
    facts = read_run(run.path)
    assert (facts.state, facts.exit_code, facts.reason, facts.restarts) == ("stopped", 75, "stopped by SIGUSR1", 0)
    console = Console(width=160, record=True, file=io.StringIO())
    show_runs([facts], run.path.parent, console)
    show_run(facts, console)
    shown = console.export_text()
    assert shown.count(f"75: stopped by SIGUSR1; job 8 was refused, {code}: {reason}") == 2
    assert f"start 2: refused: {reason}" in shown


def test_bad_data_in_training_end_a_run_and_refuse_no_start(run, squeue):
    journal(run, start(0), end(5, 75, "stopped", decision="end"), start(6, job="8"), end(9, 65, "CRC32", job="8"))
    slurm = {"job": "8", "restart": 0}
    write_attempts(run, {"number": 1, "started": at(0)}, {"number": 2, "started": at(7), "slurm": slurm})
    squeue()
    assert (read_run(run.path).state, read_run(run.path).reason) == ("failed", "CRC32")


def test_the_loser_of_two_jobs_says_nothing_about_the_run_nor_about_the_winner(run, squeue):
    journal(run, start(0), start(1, job="8"), end(2, 73, "in use by process 4 on n1", job="8", decision="end"))
    squeue(RUNNING)
    facts = read_run(run.path)
    assert (facts.state, facts.job, facts.exit_code) == ("running", "7", None)
    console = Console(width=160, record=True, file=io.StringIO())
    show_run(facts, console)
    assert "without a word" not in console.export_text()
    squeue()
    journal(run, start(0), start(1, job="8"), end(2, 73, "in use", job="8"), end(9, 0, "done", decision="end"))
    assert read_run(run.path).state == "done"


def test_a_cancelled_run_is_told_from_one_that_stopped_by_itself(run, squeue):
    journal(run, start(0), end(5, 75, "stopped by SIGUSR1"))
    squeue()
    assert read_run(run.path).state == "stopped"
    (run.launch / "cancelled").touch()
    assert read_run(run.path).state == "cancelled"


@pytest.mark.parametrize(("why", "state"), [("", "cancelled"), (" DUE TO TIME LIMIT", "lost")])
@pytest.mark.parametrize("rows", [[], [start(0)]])
def test_a_job_that_was_cancelled_before_it_could_note_it_is_told_by_its_output(run, squeue, rows, why, state):
    journal(run, {"event": "submit", "chain": "a", "job": "7", "array": None, "at": at(0)}, *rows)
    run.logs.mkdir()
    (run.logs / "slurm-7.out").write_text(
        f"slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T03:00:00{why} ***\n"
    )
    squeue()
    assert read_run(run.path).state == state


def test_a_cancelled_job_whose_driver_was_killed_after_the_save_is_cancelled(run, squeue):
    journal(run, SUBMITTED, start(0))
    slurm = {"job": "7", "restart": 0}
    ended = {"ended": at(5), "exit_code": 75, "reason": "stopped by SIGTERM"}
    write_attempts(run, {"number": 1, "started": at(1), "slurm": slurm, **ended})
    squeue()
    assert read_run(run.path).state == "stopped"
    run.logs.mkdir()
    (run.logs / "slurm-7.out").write_text("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T03:05:00 ***\n")
    assert (read_run(run.path).state, read_run(run.path).exit_code) == ("cancelled", 75)


def scontrol(run: RunDir, answer: str) -> None:
    """Puts a scontrol beside `squeue`."""
    script = run.path.parents[1] / "bin" / "scontrol"
    script.write_text(f"#!/bin/sh\n[ -n '{answer}' ] && echo '{answer}' || exit 1\n")
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("answer", "output", "state", "why"),
    [
        ("JobId=7 JobState=CANCELLED Reason=None ExitCode=0:0", "", "cancelled", "job 7 was cancelled before it began"),
        (
            "JobId=7 JobState=FAILED Reason=NonZeroExitCode ExitCode=127:0",
            "slurm_script: line 40: /env/bin/py: No such file\n\n",
            "failed",
            "127: job 7 ended before the run began: FAILED, NonZeroExitCode, slurm_script: line 40: /env/bin/py: No "
            "such file",
        ),
        (
            "JobId=7 JobState=FAILED Reason=JobLaunchFailure ExitCode=0:53",
            "",
            "failed",
            "181: job 7 ended before the run began: FAILED, JobLaunchFailure",
        ),
        ("", "no python\n", "lost", "killed before its first step was done, or never began; last output: no python"),
        ("", "", "lost", "killed before its first step was done, or never began"),
    ],
)
def test_a_job_that_ended_before_its_driver_is_told_as_slurm_tells_it(run, squeue, answer, output, state, why):
    journal(run, SUBMITTED)
    if output:
        run.logs.mkdir()
        (run.logs / "slurm-7.out").write_text(output)
    squeue()
    scontrol(run, answer)
    assert read_run(run.path).state == state
    assert why in shown(run, 200)
    assert log_line(run.path).startswith(f"the run is {state}: ")
    squeue(PENDING)
    assert log_line(run.path) == "job 7 is PENDING (BeginTime), and makes it as it starts"


def test_a_resubmitted_job_that_ended_before_its_driver_is_the_run_s_end_and_the_rest_of_a_done_chain_is_not(
    run, squeue
):
    squeue()
    scontrol(run, "JobId=8 JobState=FAILED Reason=NonZeroExitCode ExitCode=1:0")
    stopped = [start(0), end(5, 75, "stopped by SIGUSR1", decision="end")]
    journal(run, *stopped, {**SUBMITTED, "chain": "b", "job": "8"})
    assert (read_run(run.path).state, read_run(run.path).exit_code) == ("failed", 1)
    chain = [{**SUBMITTED, "job": job} for job in "78"]
    journal(run, *chain, start(0, chain="a"), end(5, 0, "done", decision="end", chain="a"))
    assert read_run(run.path).state == "done"


def test_a_job_of_which_slurm_has_forgotten_is_not_in_the_queue(run, squeue):
    journal(run, start(0), end(5, 0, "done", decision="end"))
    squeue(code=1, error="slurm_load_jobs error: Invalid job id specified")
    facts = read_run(run.path)
    assert (facts.state, facts.slurm_answers, facts.queue) == ("done", True, [])


def test_without_an_answer_of_slurm_the_files_speak(run, squeue):
    journal(run, start(0), end(5, 75, "stopped by SIGUSR1"))
    squeue(code=1, error="slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    assert (read_run(run.path).state, read_run(run.path).slurm_answers) == ("stopped", False)


def test_an_attempt_and_the_start_of_its_job_are_one(run):
    rows = [start(0), end(5, 137, "rank 1 on n2 was killed", step=20), start(6, restart=1, nodes=["n1", "n3"], step=20)]
    first = {"number": 1, "host": "n1", "started": at(1), "world_size": 2, "from_step": 0}
    second = {**first, "number": 2, "started": at(7), "from_step": 20, "slurm": {"job": "7", "restart": 1}}
    first |= {"slurm": {"job": "7", "restart": 0}, "ended": at(4), "exit_code": 76, "reason": "rank 1 is gone"}
    local = {"number": 0, "host": "login", "started": at(-9), "ended": at(-8), "exit_code": 75, "reason": "stopped"}
    starts = merge_starts([local, first, second], rows)
    assert [(s["job"], s["restart"], s["nodes"], s["from_step"], s["exit_code"], s["reason"]) for s in starts] == [
        (None, None, ["login"], None, 75, "stopped"),
        ("7", 0, ["n1", "n2"], 0, 137, "rank 1 on n2 was killed"),
        ("7", 1, ["n1", "n3"], 20, None, None),
    ]


def test_what_rank_0_noted_stands_in_for_a_driver_that_was_killed():
    slurm = {"job": "7", "restart": 0}
    attempt = {"number": 1, "started": at(1), "slurm": slurm, "ended": at(4), "exit_code": 75, "reason": "stopped"}
    assert [(s["job"], s["exit_code"], s["reason"]) for s in merge_starts([attempt], [start(0)])] == [
        ("7", 75, "stopped")
    ]


def test_an_end_belongs_to_the_start_of_its_element(run):
    rows = [start(0, job="9", array="8_1"), {**end(5, 75, "stopped by SIGUSR1", job="9"), "array": None}]
    (only,) = merge_starts([], rows)
    assert (only["job"], only["exit_code"]) == ("8_1", 75)


def test_elements_of_an_array_are_told_apart():
    waiting = "".join(f"8|8_{number}|PENDING|Resources||0:00|1:00|N/A\n" for number in (3, 2))
    text = "9|9_1|RUNNING|None|n1|0:10|1:00|x\n" + waiting
    jobs = parse_jobs(text + "a line of something else\n")
    assert {key: job.element for key, job in jobs.items()} == {"9_1": "9_1", "9": "9_1", "8_3": "8_3", "8_2": "8_2"}
    assert [jobs[key].is_waiting for key in ("9_1", "8_2")] == [False, True]


def test_a_run_of_an_array_finds_its_own_element(tmp_path, squeue):
    for number in (0, 1):
        folder = RunDir(tmp_path / "runs" / f"sweep-{number}")
        folder.launch.mkdir(parents=True)
        journal(folder, start(0, job=str(8 + number), array=f"8_{number}"))
    squeue("8|8_0|RUNNING|None|n1|0:10|1:00|x", "9|9_1|PENDING|Resources||0:00|1:00|N/A".replace("9_1", "8_1"))
    runs = read_runs(find_runs(tmp_path / "runs"))
    assert [(run.path.name, run.job, run.state) for run in runs] == [
        ("sweep-0", "8_0", "running"),
        ("sweep-1", "8_1", "queued"),
    ]


def test_runs_are_found_below_a_folder_but_not_in_each_other(tmp_path):
    for name in ("a", "b/c", "b/d/deep"):
        (tmp_path / name / "checkpoints" / "x").mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    (tmp_path / "a" / "inner").mkdir()
    (tmp_path / "a" / "inner" / "run.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == ["a", "b/c", "b/d/deep"]
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]


def test_a_folder_in_which_everything_is_broken_is_a_run_still(run, squeue):
    for name in ("run.json", "config.yaml", "metrics.jsonl", "launch/journal.jsonl", "launch/spec.json"):
        (run.path / name).write_bytes(b"\xff{]\n")
    run.checkpoints.mkdir()
    facts = read_run(run.path)
    assert (facts.name, facts.state, facts.step, facts.starts) == ("first", "new", 0, [])


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_of_runs_fits_the_terminal(run, squeue, width):
    journal(run, start(0), end(5, 65, "shard-00003.tar: its CRC32 does not match what the index says", decision="end"))
    train_a_little(run)
    squeue()
    console = Console(width=width, record=True, file=io.StringIO())
    show_runs(read_runs([run.path]), run.path.parent, console)
    shown = console.export_text()
    assert all(len(line) <= width for line in shown.splitlines())
    for expected in ("first", "failed", "40/160", "2.5", "1.23 k", "40, 0s ago", "7", "65: shard-00003.tar"):
        assert expected in shown


def test_all_jobs_of_a_chain_are_counted_and_the_limit_of_a_job_is_shown_after_it_too(run, squeue):
    submissions = [{"event": "submit", "chain": "a", "job": job, "array": None, "at": at(-1)} for job in "789"]
    journal(run, *submissions, start(0))
    (run.launch / "spec.json").write_text(json.dumps({"name": "first", "time_s": 43_200, "signal_s": 90}))
    squeue(RUNNING, PENDING.replace("7", "8"), PENDING.replace("7", "9"))
    console = Console(width=120, record=True, file=io.StringIO())
    show_runs(read_runs([run.path]), run.path.parent, console)
    assert "7 +2" in console.export_text()
    assert {"time limit 12:00:00 a job, saving 1:30 before", "9: PENDING, 0:00 of 1-00:00:00"} <= {
        line.removeprefix("job ") for line in shown(run)
    }
    squeue()
    assert {"time limit 12:00:00 a job, saving 1:30 before", "job 9: not in the queue"} <= set(shown(run))


def test_one_run_is_shown_with_all_its_starts(run, squeue):
    rows = [
        start(0),
        end(5, 75, "stopped by SIGUSR1", step=20),
        start(6, restart=1, nodes=["n3"], step=20, world_size=1),
    ]
    submitted = {"event": "submit", "chain": "a", "job": "7", "array": None, "at": at(-1)}
    journal(run, submitted, *rows, start(90, restart=2, step=40))
    run.logs.mkdir()
    (run.logs / "slurm-7.out").touch()
    train_a_little(run)
    squeue(RUNNING)
    console = Console(width=120, record=True, file=io.StringIO())
    show_run(read_run(run.path), console)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "state running" in lines
    assert "job 7: RUNNING on n[1-2], 0:30 of 1-00:00:00" in lines
    assert "submitted 01-02 02:59 UTC" in lines
    assert f"log {run.logs}/slurm-7.out" in lines
    assert "1 7 01-02 03:00 5m 2 0 75 n1,n2" in lines
    assert "2 7+1 01-02 03:06 1 20 n3" in lines
    assert "3 7+2 01-02 04:30 2 40 n1,n2" in lines
    assert lines[-2:] == [
        "start 1: stopped by SIGUSR1",
        "start 2: without a word: killed, node lost, or disk full",
    ]


def shown(run: RunDir, width: int = 120) -> list[str]:
    """The lines of `launch status`."""
    console = Console(width=width, record=True, file=io.StringIO())
    show_run(read_run(run.path), console)
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


def test_a_lost_start_has_no_end_of_an_earlier_one_and_is_told_of_while_the_job_waits_again(run, squeue):
    journal(run, start(0), end(5, 75, "stopped by SIGUSR1", step=20), start(6, restart=1, step=20))
    squeue("7|7|PENDING|PartitionNodeLimit|n[1-2]|0:00|1-00:00:00|N/A")
    lines = shown(run)
    assert lines[-1] == "start 2: without a word: killed, node lost, or disk full"
    assert any(line.startswith("waits: PartitionNodeLimit (it asks for more nodes than") for line in lines)
    squeue()
    facts = read_run(run.path)
    assert (facts.state, facts.exit_code, facts.reason) == ("lost", None, None)
    mark_of_cancel(run).touch()
    facts = read_run(run.path)
    assert (facts.state, facts.exit_code, facts.reason) == ("cancelled", None, None)


def test_recoveries_are_told_apart_from_restarts(run, squeue):
    whole = {"started": at(0), "ended": at(1), "exit_code": 137, "reason": "rank 1 was killed"}
    entry = {"number": 1, "lost": "rank 1 was killed", "seconds": 2.5}
    write_attempts(
        run,
        {"number": 1, **whole},
        {"number": 2, **whole, "recovery": entry},
        {"number": 3, **whole, "recovery": {"number": 2, "lost": "rank 0 was killed"}},
        {"number": 4, "started": at(3), "ended": at(4), "exit_code": 0, "reason": "done"},
    )
    train_a_little(run)
    facts = read_run(run.path)
    assert (facts.restarts, facts.recoveries) == (1, 2)
    lines = shown(run)
    assert "recoveries 2 without a restart" in lines
    assert "start 2: recovery 1, a step done after 2.5 s, of the loss: rank 1 was killed" in lines
    assert "start 3: recovery 2, no step done, of the loss: rank 0 was killed" in lines


def test_slow_ranks_are_told_by_their_start(run, squeue):
    note = {"rank": 3, "kind": "slow", "step": 120, "text": "rank 3 on n2, GPU 1: computes 1.31 times as long"}
    write_attempts(run, {"number": 1, "started": at(0), "ranks": [note | {"until": 310}, note, "damaged"]})
    train_a_little(run)
    lines = shown(run)
    assert f"start 1: from step 120 to 310: {note['text']}" in lines
    assert f"start 1: from step 120 on: {note['text']}" in lines


def test_a_local_process_at_work_is_not_told_to_be_dead_beside_a_job_that_begins(run, squeue):
    write_attempts(run, {"number": 1, "started": at(0), "host": socket.gethostname(), "pid": os.getpid()})
    own(run, pid=os.getpid())
    journal(run, start(5))
    squeue(RUNNING)
    assert not any("without a word" in line and line.startswith("start 1") for line in shown(run))


def test_a_damaged_record_is_told_whatever_the_other_files_say(run, squeue):
    journal(run, start(0), end(5, 0, "done", step=20, decision="end"))
    run.record.write_text("{damaged")
    squeue()
    assert any(line.startswith("damaged: run.json cannot be read") for line in shown(run, 400))


def test_the_steps_of_a_queued_run_are_those_of_the_config_that_was_submitted(run, squeue):
    train_a_little(run)
    submitted = run.launch / "config.yaml"
    submitted.parent.mkdir(exist_ok=True)
    submitted.write_text("train: {steps: 1000}")
    os.utime(submitted, (2**31, 2**31))
    squeue()
    assert read_run(run.path).total_steps == 1000
    os.utime(run.config, (2**31 + 9, 2**31 + 9))
    assert read_run(run.path).total_steps == 160


def test_a_reason_of_any_length_is_a_sentence_across_the_terminal(run, squeue):
    reason = "n2 cannot reach n1 (198.18.0.1:23456): " + "no route to host, " * 8
    journal(run, start(0), end(5, 69, reason, decision="end"))
    squeue()
    console = Console(width=80, record=True, file=io.StringIO())
    show_run(read_run(run.path), console)
    shown = console.export_text().partition("start 1: ")[2]
    assert " ".join(shown.split()) == reason.strip()
    assert len(shown.splitlines()) == 3


def test_a_job_that_ends_while_slurm_is_asked_is_not_lost(run, squeue, monkeypatch):
    """Between a look at the files and Slurm's answer there may be any time."""
    journal(run, start(0))

    def end_and_ask(jobs):
        journal(run, start(0), end(5, 0, "done", decision="end"))
        return find_jobs(jobs)

    squeue()
    monkeypatch.setattr(runs, "find_jobs", end_and_ask)
    assert read_run(run.path).state == "done"


def test_a_job_that_is_submitted_while_slurm_is_asked_is_asked_for_too(run, squeue, monkeypatch):
    journal(run, start(0), end(5, 65, "no shard", decision="end"))
    asked = []

    def submit_and_ask(jobs):
        asked.append(sorted(jobs))
        journal(run, start(0), end(5, 65, "no shard", decision="end"), {"event": "submit", "job": "8", "array": None})
        return find_jobs(jobs)

    squeue(PENDING.replace("7", "8"))
    monkeypatch.setattr(runs, "find_jobs", submit_and_ask)
    assert read_run(run.path).state == "queued"
    assert asked == [["7"], ["7", "8"]]


def test_of_thousands_of_starts_the_newest_are_shown(run, squeue):
    journal(run, *(start(number, restart=number) for number in range(MAX_STARTS + 5)))
    squeue()
    console = Console(width=160, record=True, file=io.StringIO())
    show_run(read_run(run.path), console)
    shown = console.export_text()
    assert "the 5 starts before these: --json\n" in shown
    numbers = [int(words[0]) for line in shown.splitlines() if (words := line.split()) and words[0].isdecimal()]
    assert numbers == list(range(6, MAX_STARTS + 6))
    assert "start 6: without a word" in shown and "start 5: " not in shown

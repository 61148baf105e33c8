"""What `pretrain launch logs` shows: the newest job's output, or a rank's log, as it grows."""

import json
import os
from pathlib import Path

import pytest

from pretrain.errors import ConfigError
from pretrain.run.folder import RunDir
from pretrain_launch import logs
from pretrain_launch.journal import journal_path
from pretrain_launch.runs import read_run


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A run folder with logs of two ranks."""
    folder = RunDir(tmp_path)
    folder.logs.mkdir()
    for rank in (0, 1):
        (folder.logs / f"rank-{rank:05d}.log").write_text(f"of rank {rank}\n")
    return folder


def add_job(run: RunDir, job: int, text: str) -> None:
    """Writes the output of a job, newer than those with lower numbers."""
    path = run.logs / f"slurm-{job}.out"
    path.write_text(text)
    os.utime(path, (job, job))


def test_the_newest_job_speaks_for_the_run_and_rank_0_where_there_is_none(run):
    assert logs.find_log(run, None).name == "rank-00000.log"
    add_job(run, 9, "old\n")
    add_job(run, 10, "new\n")
    assert logs.find_log(run, None).name == "slurm-10.out"
    assert logs.find_log(run, 1).name == "rank-00001.log"


def test_a_job_that_found_its_chain_ended_does_not_speak_for_the_run(run):
    """Of `--jobs 3` the first has trained all steps: the others print that alone, later."""
    rows = [{"event": "submit", "chain": "a", "job": str(job), "array": None} for job in (12, 13, 14)]
    rows += [{"event": "start", "chain": "a", "job": "12", "restart": 0, "step": 0}]
    for job in (12, 13, 14):
        add_job(run, job, "launch: of a job\n")
    journal_path(run).parent.mkdir()
    journal_path(run).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert logs.find_log(run, None).name == "slurm-14.out"  # it may have failed before it could write that it began
    with journal_path(run).open("a") as file:
        file.write(json.dumps({"event": "end", "chain": "a", "job": "12", "exit_code": 0, "decision": "end"}) + "\n")
    assert logs.find_log(run, None).name == "slurm-12.out"
    assert Path(read_run(run.path).log).name == "slurm-12.out"


def test_a_log_that_is_not_there_is_named_with_those_that_are(run):
    with pytest.raises(ConfigError, match=r"rank-00007.log: no such log; there are rank-00000.log, rank-00001.log"):
        logs.find_log(run, 7)


def test_a_log_is_awaited_until_it_is_there_or_the_run_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "POLL_S", 0.0)
    monkeypatch.setattr(logs, "ASK_S", -1.0)
    run = RunDir(tmp_path)
    run.logs.mkdir()
    logs.await_log(run, lambda: True)  # cancelled in the queue
    answers = [lambda: False, lambda: add_job(run, 9, "begun\n")]
    logs.await_log(run, lambda: bool(answers.pop(0)()))
    assert not answers


def test_a_log_begins_with_its_last_lines(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo \xff\nthree")
    assert logs.last_lines(path, 2) == ("two \ufffd\nthree", path.stat().st_size)
    assert logs.last_lines(path, 0) == ("", path.stat().st_size)


def test_following_shows_what_is_added_what_replaces_it_and_what_was_written_last(run, monkeypatch):
    monkeypatch.setattr(logs, "POLL_S", 0)
    add_job(run, 1, "seen\n")
    path = logs.find_log(run, None)
    happenings = iter([
        lambda: add_job(run, 1, "seen\nmore\n"),
        lambda: add_job(run, 2, "a longer output of the second job\n"),
        lambda: None,
        lambda: add_job(run, 2, "cut\n"),
    ])  # fmt: skip

    def is_over():
        happen = next(happenings, None)
        if happen is not None:
            happen()
        return happen is None

    pieces = list(logs.follow(lambda: logs.find_log(run, None), path, len("seen\n"), is_over))
    assert pieces == ["more\n", "a longer output of the second job\n", "cut\n"]


def test_a_character_of_which_a_part_is_written_is_shown_once_it_is_whole(run, monkeypatch):
    monkeypatch.setattr(logs, "POLL_S", 0)
    path, content = run.logs / "rank-00000.log", "caf\u00e9 \u2603\n".encode()
    path.write_bytes(content[:4])
    text, offset = logs.last_lines(path, 9)
    ends = iter([5, 7, 8, len(content), len(content)])

    def is_over():
        end = next(ends, None)
        if end is not None:
            path.write_bytes(content[:end])
        return end is None

    pieces = list(logs.follow(lambda: path, path, offset, is_over))
    assert [text, *pieces] == ["caf", "\u00e9", " ", "\u2603\n"]


def test_slurm_is_asked_seldom_and_never_again_once_the_run_is_over(monkeypatch):
    now, asked = [0.0], []
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    answers = iter([False, True])
    is_over = logs.seldom(lambda: asked.append(now[0]) or next(answers))
    for second in range(20):
        now[0] = float(second)
        assert is_over() == (second >= 12)
    assert asked == [6.0, 12.0]

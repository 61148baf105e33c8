"""Streams that break: programs keep their exit code, and an answer that is lost is told."""

import errno
import io
import os
import subprocess
import sys
from contextlib import ExitStack
from tempfile import TemporaryDirectory

import pytest

from pretrain.cli import run
from tests.helpers.broken_streams import KINDS, bare_environment, broken
from tests.helpers.fork_server import ROOT
from tests.helpers.tables import thinned
from tests.helpers.waiting import LIMIT_S

MEETING = '{"address": "", "port": 1, "nodes": [], "ranks_per_node": 1, "identity": ""}'
RECIPE = "configs/run/quickstart.yaml"
COMMAND = [sys.executable, "-m", "pretrain"]
REFUSED = "error: standard output: cannot be written: No space left on device; write to another place\n"


def run_broken(command: list[str], stdout: str, stderr: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs a program whose streams are each "kept", "closed", or broken in one of the ways that there are."""
    kinds = (stdout, stderr)
    with ExitStack() as opened:
        streams = [opened.enter_context(broken(kind)) if kind in KINDS else subprocess.PIPE for kind in kinds]
        return subprocess.run(
            command,
            cwd=opened.enter_context(TemporaryDirectory()),
            env=bare_environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=streams[0],
            stderr=streams[1],
            text=True,
            timeout=LIMIT_S,
            preexec_fn=lambda: [os.close(number) for number in (1, 2) if kinds[number - 1] == "closed"],
        )


@pytest.mark.parametrize(
    ("arguments", "stdout", "code", "error"),
    [
        (["config", RECIPE], "full", 74, REFUSED),  # less than a buffer: it is refused when all is done
        (["plan", RECIPE], "full", 74, REFUSED),  # more, written by rich
        (["config", RECIPE], "unread", 141, ""),
        pytest.param(["plan", RECIPE], "unread", 141, "", marks=pytest.mark.long),
        pytest.param(["--help"], "unread", 141, "", marks=pytest.mark.long),
        (["config", RECIPE], "closed", 0, ""),
        (
            ["config", "none.yaml"],
            "full",
            64,
            "error: none.yaml: no such config file; check the path; `pretrain recipes` lists the built-in ones\n",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value)[:6],
)
def test_an_answer_that_is_refused_is_an_error_and_one_that_nobody_reads_on_ends_quietly(
    arguments, stdout, code, error
):
    done = run_broken([*COMMAND, *arguments], stdout, "kept")
    assert (done.returncode, done.stderr) == (code, error)


def test_an_answer_is_not_lost_in_silence_where_python_does_not_buffer_it():
    done = run_broken([*COMMAND, "config", RECIPE], "full", "kept", PYTHONUNBUFFERED="1")
    assert (done.returncode, done.stderr) == (74, REFUSED)


@pytest.mark.parametrize("stderr", thinned([*KINDS, "closed"], 3))
def test_an_error_that_nobody_can_be_told_of_keeps_its_code_and_does_not_come_among_the_answers(stderr):
    done = run_broken([*COMMAND, "config", "none.yaml"], "kept", stderr)
    assert (done.returncode, done.stdout) == (64, "")


@pytest.mark.parametrize(
    ("program", "environment", "code"),
    [
        (["pretrain_launch.job", "none.json"], {}, 69),
        (["pretrain_launch.node", "none.json", MEETING, "none"], {}, 64),
        (["pretrain_launch.rank", "none.yaml", "logs", "exits"], {"RANK": "0"}, 64),
        (["pretrain_launch.rendezvous", "nonce", "1"], {}, 0),
        pytest.param(["pretrain", "train", "none.yaml"], {}, 64, marks=pytest.mark.long),
        (["pretrain", "launch", "local", "none.yaml"], {}, 64),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_program_keeps_its_exit_code_where_both_streams_refuse_what_it_says(program, environment, code):
    assert run_broken([sys.executable, "-m", *program], "full", "full", **environment).returncode == code


def test_what_a_closed_stream_leaves_free_is_given_to_no_file():
    """Else what a library prints would be written into the first file that the process opens."""
    code = """
        import os
        from pretrain.utils.process import guard_streams
        guard_streams()
        os._exit(3 if os.open(os.devnull, os.O_RDONLY) > 2 and os.get_inheritable(1) else 4)
    """
    command = [sys.executable, "-c", "\n".join(line.strip() for line in code.splitlines())]
    assert run_broken(command, "closed", "closed").returncode == 3


def test_a_broken_pipe_that_is_not_ours_is_no_quiet_end(monkeypatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "the server has gone")

    monkeypatch.setattr("pretrain.config.load.load_config", refuse)
    assert run(["config", RECIPE]) == 70
    assert "the server has gone" in capsys.readouterr().err


def test_a_full_device_that_has_room_again_gets_what_comes_then(tmp_path):
    """A job's output on a disk that was full: lines are missing, and those after are there."""
    code = """
        import resource, sys
        from pretrain.utils.process import guard_streams
        guard_streams()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        print("before", file=sys.stderr)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len("before ") , limits[1]))
        print("refused", file=sys.stderr)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        print("after", file=sys.stderr)
    """
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, "-c", "\n".join(line.strip() for line in code.splitlines())]
        done = subprocess.run(command, cwd=ROOT, env=bare_environment(), stderr=out, timeout=LIMIT_S)
    assert done.returncode == 0
    assert (tmp_path / "out").read_text() == "before\nafter\n"


def test_streams_that_a_caller_has_put_there_stay(monkeypatch):
    from pretrain.utils.process import discard_refused_stdout, guard_stderr, guard_streams

    ours = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", ours[0])
    monkeypatch.setattr(sys, "stderr", ours[1])
    guard_stderr()
    guard_streams()
    discard_refused_stdout()
    assert (sys.stdout, sys.stderr) == ours

"""Logging: who writes where, what is hidden, and that a broken terminal stops nothing."""

import logging
import os
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from pretrain.errors import DiskError
from pretrain.utils import log
from tests.helpers.waiting import LIMIT_S, finish

SECRET = "s3cr3t-value-of-a-key"


def run_python(code: str, arguments: tuple = (), **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        **kwargs,
    )


def test_rank_0_writes_to_stderr_and_its_file_with_rank_label(tmp_path, capsys):
    log.setup_logging(0, 4, tmp_path / "logs" / "rank0.log")
    logging.getLogger("pretrain.data").info("read %d shards", 3)
    captured = capsys.readouterr()
    assert captured.err.endswith("INFO    read 3 shards\n")
    assert captured.out == ""
    assert "rank 0/4 INFO pretrain.data: read 3 shards" in (tmp_path / "logs" / "rank0.log").read_text()


def test_other_ranks_write_to_their_file_only(tmp_path, capsys):
    log.setup_logging(2, 4, tmp_path / "rank2.log")
    logging.getLogger("pretrain").error("lost")
    assert capsys.readouterr().err == ""
    assert "rank 2/4 ERROR pretrain: lost" in (tmp_path / "rank2.log").read_text()


def test_other_ranks_without_a_file_show_errors_but_not_information(capsys):
    log.setup_logging(1, 2)
    logging.getLogger("pretrain").info("quiet")
    logging.getLogger("pretrain").error("loud")
    error = capsys.readouterr().err
    assert "loud" in error
    assert "quiet" not in error


def test_calling_it_again_replaces_the_handlers(tmp_path, capsys):
    log.setup_logging(0, 1)
    log.setup_logging(0, 1, tmp_path / "a.log")
    logging.getLogger("pretrain").info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_a_log_file_that_cannot_be_opened_is_a_disk_error(tmp_path):
    (tmp_path / "logs").write_text("a file where the folder should be")
    with pytest.raises(DiskError, match=r"rank0.log: cannot open the log file: .*; check the path"):
        log.setup_logging(0, 1, tmp_path / "logs" / "rank0.log")


def test_secrets_are_hidden_in_messages_arguments_and_tracebacks(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    log.setup_logging(0, 1, tmp_path / "rank0.log")
    logger = logging.getLogger("pretrain")
    logger.info("key is %s", SECRET)
    try:
        raise ValueError(f"server refused {SECRET}")
    except ValueError:
        logger.exception("upload failed")
    for text in (capsys.readouterr().err, (tmp_path / "rank0.log").read_text()):
        assert SECRET not in text
        assert "key is ***" in text
        assert "ValueError: server refused ***" in text


@pytest.mark.parametrize("name", ["HF_TOKEN", "aws_secret_access", "DB_PASSWORD", "WANDB_API_KEY"])
def test_redact_hides_values_by_the_name_of_their_variable(name, monkeypatch):
    monkeypatch.setenv(name, SECRET)
    assert log.redact(f"<{SECRET}>") == "<***>"


def test_redact_leaves_short_switches_and_other_variables_alone(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("RUN_FOLDER", "some-long-folder-name")
    assert log.redact("false some-long-folder-name") == "false some-long-folder-name"


def test_redact_hides_a_secret_that_contains_another_whole(monkeypatch):
    monkeypatch.setenv("A_KEY", "abcdefgh")
    monkeypatch.setenv("B_KEY", "abcdefgh-and-more")
    assert log.redact("abcdefgh-and-more abcdefgh") == "*** ***"


def test_redact_hides_wandb_keys_of_netrc_and_of_the_new_form(tmp_path, monkeypatch):
    key = "0123456789abcdef0123456789abcdef01234567"
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {key}\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert log.redact(f"{key} wandb_v1_Abc123_xyz") == "*** ***"


@pytest.mark.parametrize("content", ["machine", "garbage \x00", None])
def test_a_bad_or_missing_netrc_is_no_entry(tmp_path, content, monkeypatch):
    if content is not None:
        (tmp_path / "netrc").write_text(content)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert log.netrc_login("api.wandb.ai") is None


def test_libraries_own_handlers_are_removed_and_their_warnings_kept(capsys):
    noisy = logging.getLogger("DeepSpeed")
    noisy.propagate = False
    noisy.setLevel(logging.INFO)
    noisy.addHandler(logging.StreamHandler(sys.stdout))
    log.setup_logging(0, 1)
    noisy.info("chatter")
    noisy.warning("matters")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "matters" in captured.err
    assert "chatter" not in captured.err


def test_python_warnings_come_through_logging():
    done = run_python("""
        import warnings
        from pretrain.utils.log import setup_logging
        setup_logging(0, 1)
        warnings.warn("beware")
    """)
    assert "WARNING" in done.stderr
    assert "beware" in done.stderr


def test_a_missing_optional_package_of_the_client_of_wandb_is_not_told():
    done = run_python("""
        import contextlib
        from pretrain.utils.log import setup_logging
        setup_logging(0, 1)
        # requests filters it, but a thread that restores the filters of before may undo that.
        with contextlib.suppress(ImportError):
            import urllib3.contrib.socks
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_of_stderr_that_goes_away_changes_nothing():
    code = """
        import logging, os, sys
        from pretrain.utils.log import setup_logging
        setup_logging(0, 1)
        sys.stdin.readline()
        for number in range(100):
            logging.getLogger("pretrain").info("row %d", number)
        print("finished")
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr
    child.stderr.close()
    output, _ = finish(child, "go\n")
    assert (output, child.returncode) == ("finished\n", 0)


def test_a_closed_stderr_changes_nothing():
    done = run_python("""
        import logging, sys
        from pretrain.utils.log import setup_logging
        setup_logging(0, 1)
        sys.stderr.close()
        logging.getLogger("pretrain").info("into the void")
        print("finished")
    """)
    assert (done.stdout, done.returncode) == ("finished\n", 0)


@pytest.mark.parametrize("break_terminal", [False, True])
def test_on_a_terminal_records_are_redacted_and_a_hang_up_changes_nothing(break_terminal, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    code = f"""
        import logging, os, signal, sys
        from pretrain.utils.log import setup_logging
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        setup_logging(0, 1)
        sys.stdin.readline()
        logging.getLogger("pretrain").info("key {SECRET}")
        print("finished")
    """
    master, slave = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
    )
    os.close(slave)
    if break_terminal:
        os.close(master)
    output, _ = finish(child, "go\n")
    assert (output, child.returncode) == ("finished\n", 0)
    if not break_terminal:
        shown = b""
        with suppress(OSError):  # the end: whoever wrote is gone
            while piece := os.read(master, 10000):
                shown += piece
        os.close(master)
        assert b"key ***" in shown
        assert SECRET.encode() not in shown


def test_a_disk_that_is_full_for_a_while_is_said_once_in_one_line_and_the_file_goes_on_when_there_is_room(tmp_path):
    done = run_python(
        """
        import logging, resource, sys
        from pathlib import Path
        from pretrain.utils.log import setup_logging
        setup_logging(1, 2, Path(sys.argv[1]))
        log = logging.getLogger("pretrain")
        log.info("before")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        for number in range(1000):
            log.info("refused %d", number)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.info("after")
        log.info("at the end")
        """,
        arguments=(tmp_path / "rank1.log",),
    )
    assert done.returncode == 0
    assert (
        done.stderr
        == f"{tmp_path}/rank1.log: cannot be written: File too large; lines are missing there until it can be\n"
    )
    lines = (tmp_path / "rank1.log").read_text().splitlines()
    assert lines[0].endswith("before")
    assert lines[-3] == "(lines are missing here: the disk refused them)"
    assert [line.split(": ")[1] for line in lines[-2:]] == ["after", "at the end"]


def test_a_log_file_whose_folder_is_gone_stops_nothing(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    log.setup_logging(1, 2, tmp_path / "logs" / "rank1.log")
    (handler,) = [found for found in logging.getLogger().handlers if hasattr(found, "installed_by_pretrain")]
    handler.close()
    (tmp_path / "logs" / "rank1.log").unlink()
    (tmp_path / "logs").rmdir()
    for _ in range(3):
        logging.getLogger("pretrain").info("lost")
    assert capsys.readouterr().err.count("cannot be written: No such file or directory") == 1


def test_importing_it_loads_nothing_heavy():
    done = run_python(
        "import sys, pretrain.utils.log; print([m for m in ('rich', 'torch', 'wandb') if m in sys.modules])"
    )
    assert done.stdout == "[]\n"


@pytest.mark.long
def test_log_lines_of_a_real_deepspeed_import_stay_off_stdout(tmp_path: Path):
    done = run_python(
        """
        import logging
        from pretrain.utils.log import quiet_libraries, setup_logging
        setup_logging(0, 1)
        import deepspeed.utils.logging
        quiet_libraries()
        logging.getLogger("DeepSpeed").warning("from deepspeed")
        """,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert "from deepspeed" not in done.stdout
    assert done.stderr.count("from deepspeed") == 1

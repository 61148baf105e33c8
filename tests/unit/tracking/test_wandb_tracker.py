"""The mirror against the real wandb, offline, with real signals to its children and a server that is not there."""

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pretrain.tracking import wandb_tracker
from pretrain.tracking.wandb_tracker import choose_mode
from tests.helpers.waiting import LIMIT_S
from tests.unit.tracking.wandb_file import read_history

KEY = "0123456789abcdef0123456789abcdef01234567"

PREAMBLE = """
    import contextlib, logging, os, signal, sys
    from pathlib import Path
    from pretrain.config.tracking import TrackingConfig
    from pretrain.utils.log import setup_logging
    from pretrain.tracking import tracker, wandb_tracker
    from pretrain.tracking.tracker import Identity, Mirror
    from pretrain.tracking.wandb_tracker import WandbTracker, choose_mode
    from tests.helpers.waiting import LIMIT_S, wait_until

    wandb_tracker._INIT_TIMEOUT_S = LIMIT_S  # where a test is not about waiting, a slow machine is waited for
    Mirror.close.__defaults__ = (LIMIT_S,)

    setup_logging(0, 1)
    logging.getLogger("pretrain").setLevel(logging.WARNING)

    def mirror(mode="offline", after_step=-1, run_config={}, find_facts=dict, **options):
        identity = Identity("abc123", "name", run_config)
        config = TrackingConfig(wandb=mode, **options)
        opened = WandbTracker(Path("run"), config, identity, choose_mode(mode))
        return Mirror(opened, config, after_step, find_facts)

    def children():
        found = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                found += [int(pid) for pid in (task / "children").read_text().split()]
        return sorted(found)

    def wait_for_children():
        wait_until(Path("run/wandb/SYNC.txt").exists, "the run is open")
        return children()

    def wait_for_end(pid):
        stat = Path(f"/proc/{pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "the service has ended")

    def give_up_online_soon():
        forget, wandb_tracker._INIT_TIMEOUT_S = wandb_tracker._forget_service, 1.0

        def forget_and_wait_again():
            wandb_tracker._INIT_TIMEOUT_S = LIMIT_S
            forget()

        wandb_tracker._forget_service = forget_and_wait_again
"""


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Runs code after the preamble in a process of its own, in `tmp_path`, with no wandb account."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))

    def run(code: str, **env: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PREAMBLE) + textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=tmp_path,
            env={**os.environ, "WANDB_X_SERVICE_WAIT": str(LIMIT_S), **env},
        )

    return run


def test_offline_rows_arrive_in_order_and_the_folder_says_how_to_sync(python, tmp_path):
    done = python("""
        m = mirror()
        for step in range(1, 6):
            m.log(step, {"loss": step / 8})
        logging.getLogger("pretrain").setLevel(logging.INFO)
        m.close()
        m.close()
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert read_history(tmp_path / "run") == [{"step": step, "train/loss": step / 8} for step in range(1, 6)]
    assert "wandb sync wandb/offline-run-*-abc123\n" in (tmp_path / "run" / "wandb" / "SYNC.txt").read_text()


@pytest.mark.parametrize("leaves", ["m.close(); os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_nothing_is_left_in_the_folder_for_temporary_files_however_the_process_ends(python, tmp_path, leaves):
    (tmp_path / "tmp").mkdir()
    picture = "m.log(1, {'loss': 1.0}); wait_for_children(); import wandb; wandb.Artifact"
    python(f"m = mirror(); {picture}; {leaves}", TMPDIR=str(tmp_path / "tmp"))
    assert not list((tmp_path / "tmp").glob("tmp*"))
    kept = tmp_path / "run/wandb-tmp"
    assert kept.exists() == ("SIGKILL" in leaves)
    if kept.exists():  # removed by the next start, whose own folders are removed at its end
        python("m = mirror(); m.log(2, {'loss': 1.0}); m.close()", TMPDIR=str(tmp_path / "tmp"))
        assert not kept.exists()


@pytest.mark.long
def test_rows_that_an_earlier_attempt_sent_are_not_sent_again(python, tmp_path):
    python("m = mirror(); [m.log(step, {'loss': 1.0}) for step in range(1, 6)]; m.close()")
    python("m = mirror(after_step=5); [m.log(step, {'loss': 1.0}) for step in range(3, 9)]; m.close()")
    assert [row["step"] for row in read_history(tmp_path / "run")] == list(range(1, 9))


@pytest.mark.long
def test_the_service_ignores_the_time_limit_signal(python, tmp_path):
    done = python("""
        m = mirror()
        m.log(1, {"loss": 1.0})
        before = wait_for_children()
        for pid in before:
            os.kill(pid, signal.SIGUSR1)
        m.log(2, {"loss": 1.0})
        m.close()  # which the service has to answer
        print("same service" if children() == before else children())
    """)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "same service\n")
    assert [row["step"] for row in read_history(tmp_path / "run")] == [1, 2]


@pytest.mark.long
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_service_that_a_signal_ends_is_started_again_under_the_same_id(python, tmp_path, name):
    done = python(f"""
        m = mirror()
        m.log(1, {{"loss": 1.0}})
        for pid in wait_for_children():
            os.kill(pid, signal.{name})
            wait_for_end(pid)
        m.log(2, {{"loss": 1.0}})
        m.log(3, {{"loss": 1.0}})
        m.close()
        print("trained on")
    """)
    assert (done.returncode, done.stdout) == (0, "trained on\n")
    assert done.stderr.count("\n") == 1
    assert "WARNING wandb: cannot log: " in done.stderr
    # Row 1 may have been in the dead service's buffer.
    assert [row["step"] for row in read_history(tmp_path / "run")][-2:] == [2, 3]


@pytest.mark.long
def test_stop_signals_reach_the_run_itself_while_wandb_starts(python):
    done = python("""
        got = []
        signal.signal(signal.SIGTERM, lambda *_: got.append("SIGTERM"))
        m = mirror()
        m.log(1, {"loss": 1.0})  # which opens an offline run
        os.kill(os.getpid(), signal.SIGTERM)
        print(got)
        m.close()
    """)
    assert done.stdout == "['SIGTERM']\n"


@pytest.mark.long
@pytest.mark.parametrize("is_failing", [False, True])
def test_a_service_that_hangs_delays_the_end_by_the_timeout_only(python, is_failing):
    """The exit hook of wandb would wait without limit; the error of a run that fails has stderr to itself."""
    done = python(f"""
        m = mirror()
        m.log(1, {{"loss": 1.0}})  # which opens an offline run
        for pid in wait_for_children():
            os.kill(pid, signal.SIGSTOP)
        m.log(2, {{"loss": 1.0}})
        m.close(timeout_s=0.5, is_failing={is_failing})
        m._thread.join()
        print("done")
    """)
    assert (done.returncode, done.stdout) == (0, "done\n")
    warned = "wandb: not finished after 0.5 s; the run folder has what was not uploaded" in done.stderr
    assert warned is not is_failing and done.stderr.count("wandb: ") == int(warned)
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_server_that_is_not_there_means_offline(python, tmp_path):
    done = python(
        """
        give_up_online_soon()
        m = mirror("auto")
        m.log(1, {"loss": 1.0})
        m.close()
        """,
        WANDB_API_KEY=KEY,
        WANDB_BASE_URL="http://127.0.0.1:9",
    )
    assert done.returncode == 0
    assert "wandb: cannot start online: " in done.stderr
    assert KEY not in done.stderr
    assert [row["step"] for row in read_history(tmp_path / "run")] == [1]


def test_no_wandb_at_all_is_one_warning(python, tmp_path):
    (tmp_path / "wandb.py").write_text("raise RuntimeError('broken installation')\n")
    done = python("""
        sys.path.insert(0, os.getcwd())
        m = mirror()
        m.log(1, {"loss": 1.0})
        m.close()
        print("trained on")
    """)
    assert (done.returncode, done.stdout) == (0, "trained on\n")
    assert done.stderr.count("\n") == 1
    assert "wandb: cannot start offline: RuntimeError: broken installation" in done.stderr


REFUSES = """
import os

class Settings:
    def __init__(self, **_): pass

class Run:
    starting_step = 0
    def define_metric(self, *_, **__): pass
    log = finish = define_metric

def init(mode, dir, **_):
    if mode == "online":
        raise RuntimeError("the API key is wrong")
    os.mkdir(os.path.join(dir, "wandb"))
    return Run()
"""


def test_a_key_that_the_server_refuses_is_one_warning_with_where_the_run_is_tracked_instead(python, tmp_path):
    (tmp_path / "wandb.py").write_text(REFUSES)
    done = python(
        """
        sys.path.insert(0, os.getcwd())
        wandb_tracker._forget_service = lambda: None
        m = mirror("online")
        m.log(1, {"loss": 1.0})
        m.close()
        """,
        WANDB_API_KEY=KEY,
    )
    instead = "; tracked offline, see run/wandb/SYNC.txt\n"
    assert done.stderr.endswith(f" WARNING wandb: cannot start online: RuntimeError: the API key is wrong{instead}")
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "run" / "wandb" / "SYNC.txt").is_file()


@pytest.mark.parametrize(
    ("wanted", "env", "mode"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": KEY}, "online"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, "off"),
        ("online", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "online"),
        ("offline", {"WANDB_API_KEY": KEY}, "offline"),
        ("off", {"WANDB_API_KEY": KEY}, "off"),
    ],
)
def test_mode_follows_config_then_environment_then_key(wanted, env, mode, tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert choose_mode(wanted) == mode


def test_a_netrc_entry_of_the_server_in_use_is_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    (tmp_path / "netrc").write_text(f"machine wandb.example.org login user password {KEY}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert choose_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    assert choose_mode("auto") == "online"


def test_online_without_a_key_says_so_and_is_offline(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with caplog.at_level(logging.WARNING, logger=wandb_tracker.logger.name):
        assert choose_mode("online") == "offline"
    assert caplog.messages == [
        "wandb: online, but no WANDB_API_KEY and no netrc entry for api.wandb.ai; tracking offline"
    ]


def test_the_private_handles_that_a_hung_service_needs_are_still_there():
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib.service import service_connection, service_process

    assert hasattr(wandb_setup._WandbSetup(pid=os.getpid()), "_connection")
    assert "_proc" in service_connection.ServiceConnection.__init__.__code__.co_names
    assert "_process" in service_process.ServiceProcess.__init__.__code__.co_names

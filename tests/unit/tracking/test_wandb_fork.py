"""Forks: the real client of wandb, online, with a server on the loopback that keeps what it is sent."""

import textwrap

import pytest

from pretrain.config.tracking import TrackingConfig
from pretrain.errors import ConfigError
from pretrain.tracking.run_output import check_trackers
from tests.unit.tracking.test_wandb_tracker import KEY, python
from tests.unit.tracking.wandb_server import WandbServer, serve

__all__ = ["python"]

START = textwrap.dedent("""
    from pretrain.tracking import RunOutput

    def output(folder="run", parent=None, id="abc123", **options):
        made = Path(folder)
        made.mkdir(exist_ok=True)
        config = TrackingConfig(wandb="online", wandb_fork=True, stall_alert_s=0, **options)
        return RunOutput(made, config, Identity(id, "name", {}, parent), rank=0, total_steps=100)

    def take(o, first, last):
        for step in range(first, last + 1):
            o.log(step, {"loss": float(step)}, shown=False)
""")


@pytest.fixture
def attempt(python):
    """Runs code with `output` and `take` against a server; returns what the server has."""
    with serve() as server:

        def run(code: str) -> WandbServer:
            done = python(START + code, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.address)
            assert (done.returncode, done.stdout, said(done.stderr)) == (0, "", "")
            return server

        yield run


def said(stderr: str) -> str:
    """Returns what is said besides wandb's line of its login."""
    return "".join(line for line in stderr.splitlines(keepends=True) if "Loaded credentials for" not in line)


def steps(server: WandbServer, run: str) -> list[tuple[int, int]]:
    """Returns step and history step of the rows of a run."""
    return [(row["step"], row["_step"]) for row in server.history[run]]


@pytest.mark.long
def test_each_rollback_begins_a_fork_and_a_crash_does_not(attempt):
    """Rows 1 to 8; killed, and again from 5; back to 6 in the process; back to 4 by a command; again from 9."""
    attempt("o = output(); o.rewind(0, 0); take(o, 1, 8); o.close(LIMIT_S)")
    attempt("o = output(); o.rewind(5, 0); take(o, 6, 9); o.rewind(6, 1); take(o, 7, 8); o.close(LIMIT_S)")
    attempt("o = output(); o.rewind(4, 2); take(o, 5, 9); o.close(LIMIT_S)")
    server = attempt("o = output(); o.rewind(9, 2); take(o, 10, 11); o.close(LIMIT_S)")
    assert steps(server, "abc123") == [(step, step - 1) for step in range(1, 10)]
    assert steps(server, "abc123-1") == [(7, 6), (8, 7)]
    assert steps(server, "abc123-2") == [(step, step - 1) for step in range(5, 12)]
    assert server.branch_points["abc123"] is None
    assert server.branch_points["abc123-1"] == {"run_id": "abc123", "step": 5}
    assert server.branch_points["abc123-2"] == {"run_id": "abc123", "step": 3}


@pytest.mark.long
def test_fine_tuning_begins_a_fork_of_its_parent_at_the_checkpoint(attempt):
    attempt("o = output('base', id='base'); o.rewind(0, 0); take(o, 1, 6); o.close(LIMIT_S)")
    tuned = "output('tuned', ('base', 4), 'tuned')"
    attempt(f"o = {tuned}; o.rewind(0, 0); take(o, 1, 2); o.close(LIMIT_S)")
    server = attempt(f"o = {tuned}; o.rewind(2, 0); take(o, 3, 3); o.close(LIMIT_S)")
    assert server.branch_points["tuned"] == {"run_id": "base", "step": 3}
    assert steps(server, "tuned") == [(5, 4), (6, 5), (7, 6)]


@pytest.mark.long
def test_a_parent_that_wandb_does_not_have_is_a_warning(python):
    code = START + "o = output(parent=('nowhere', 4)); o.rewind(0, 0); take(o, 1, 1); o.close(LIMIT_S)"
    with serve() as server:
        done = python(code, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.address)
        assert said(done.stderr).endswith("WARNING wandb: cannot fork: nowhere has no row up to step 4 in wandb\n")
        assert (steps(server, "abc123"), server.branch_points["abc123"]) == ([(1, 0)], None)


@pytest.mark.parametrize("mode", ["offline", "off", "online", "auto"])
def test_a_fork_offline_is_refused_with_the_reason(monkeypatch, tmp_path, mode):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"needs wandb online: its server copies the history, .*; set WANDB_API_KEY"):
        check_trackers(TrackingConfig(wandb=mode, wandb_fork=True))
    check_trackers(TrackingConfig(wandb=mode))

"""What every tracker shares, by one that fails on purpose; and each real client on a store of its own."""

import json
import logging
import math
import os
import subprocess
import sys
import textwrap
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from pretrain.config.tracking import TrackingConfig
from pretrain.errors import LaunchError
from pretrain.kinds.trackers import NO_TRACKERS, TRACKERS
from pretrain.tracking import run_output
from pretrain.tracking.prometheus_file import PrometheusFile
from pretrain.tracking.run_output import build_trackers, check_trackers
from pretrain.tracking.tracker import Identity, Mirror, Tracker
from tests.helpers.waiting import LIMIT_S, wait_until

ROOT = str(Path(__file__).parents[3])
SECRET = "hunter2hunter2"
IDENTITY = Identity("abc123", "name", {"seed": 1})


class Stub(Tracker):
    """Notes its calls; each failure is raised once, `hangs` waits for an event."""

    name = "stub"

    def __init__(self, failures=(), modes=("",), hangs=None):
        self.modes, self.failures, self.hangs, self.calls = list(modes), list(failures), hangs, []

    def _note(self, *call):
        self.calls.append(call)
        if self.hangs is not None and call[0] == "log":
            self.hangs.wait(LIMIT_S)
        if self.failures and self.failures[0] == call[0]:
            del self.failures[0]
            raise RuntimeError("no room")

    def open(self, mode, facts):
        self._note("open", mode, dict(facts))

    def log(self, step, metrics):
        self._note("log", step)

    def reset(self):
        self._note("reset")

    def rewind(self, step, rollbacks):
        self._note("rewind", step)

    def close(self, *, is_failing):
        self._note("close", is_failing)

    def abandon(self):
        self._note("abandon")


class Rewinding(Stub):
    def hides(self, rollbacks):
        return True


def feed(stub, *steps, **options):
    mirror = Mirror(stub, TrackingConfig(stall_alert_s=0), **options)
    for step in steps:
        mirror.log(step, {"loss": 1.0})
    mirror.close(LIMIT_S)
    return stub.calls


def test_a_row_that_a_client_refuses_is_sent_again_after_a_restart(caplog):
    calls = feed(Stub(failures=["log"]), 1, 2, find_facts=lambda: {"code": 1})
    opened = ("open", "", {"code": 1})
    assert calls == [opened, ("log", 1), ("reset",), opened, ("log", 1), ("log", 2), ("close", False)]
    assert caplog.messages == ["stub: cannot log: RuntimeError: no room"]


def test_a_client_that_always_raises_is_given_up_and_costs_rows_of_its_own_only(caplog):
    calls = feed(Stub(failures=["log"] * 9), 1, 2, 3)
    assert [call for call in calls if call[0] == "log"] == [("log", 1)] * 4
    assert len(caplog.messages) == 4 and ("close", False) not in calls


def test_the_next_mode_is_tried_and_a_store_that_does_not_open_is_one_warning(caplog):
    assert feed(Stub(failures=["open"], modes=["online", "offline"]), 1)[1:3] == [("reset",), ("open", "offline", {})]
    feed(Stub(failures=["open"]), 1)
    failed = "RuntimeError: no room; metrics.jsonl has the rows"
    assert caplog.messages == [f"stub: cannot start online: {failed}", f"stub: cannot start: {failed}"]


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_client_that_hangs_delays_the_end_by_the_timeout_only(caplog, is_failing):
    released = threading.Event()
    stub = Stub(hangs=released)
    mirror = Mirror(stub, TrackingConfig(stall_alert_s=0))
    mirror.log(1, {"loss": 1.0})
    wait_until(lambda: ("log", 1) in stub.calls, "the client hangs")
    mirror.close(0.0, is_failing=is_failing)
    mirror.close(0.0)
    assert stub.calls[-1] == ("abandon",)
    warned = ["stub: not finished after 0.0 s; the run folder has what was not uploaded"]
    assert caplog.messages == ([] if is_failing else warned)
    released.set()
    mirror._thread.join(LIMIT_S)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Stub, ["log 9", "log 10"]), (Rewinding, ["rewind 5", *(f"log {n}" for n in range(6, 11))])],
)
def test_steps_that_come_again_are_left_out_unless_the_store_can_hide_the_first(kind, expected):
    """Resumed at step 5, after a start that had logged up to step 8."""
    stub = kind()
    mirror = Mirror(stub, TrackingConfig(stall_alert_s=0), after_step=8)
    mirror.rewind(5, 8)
    for step in range(6, 11):
        mirror.log(step, {})
    mirror.close(LIMIT_S)
    assert [f"{call[0]} {call[1]}" for call in stub.calls[1:-1]] == expected


def test_any_subset_is_built_and_off_builds_nothing(tmp_path):
    assert build_trackers(tmp_path, TrackingConfig(wandb="off"), IDENTITY) == []
    every = TrackingConfig(wandb="offline", tensorboard=True, mlflow="auto", trackio=True, prometheus=str(tmp_path))
    names = [tracker.name for tracker in build_trackers(tmp_path, every, IDENTITY)]
    assert names == ["wandb", "tensorboard", "mlflow", "trackio", "prometheus"] == list(TRACKERS)
    assert build_trackers(tmp_path, every.model_copy(update=NO_TRACKERS), IDENTITY) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("key", "value"), [("tensorboard", True), ("mlflow", "auto"), ("trackio", True)])
def test_a_missing_package_is_an_error_at_the_start_with_the_install(monkeypatch, key, value):
    monkeypatch.setattr(run_output, "find_spec", lambda name: None)
    check_trackers(TrackingConfig())
    fix = rf"remove tracking.{key}, or run .* install -e '.\[{key}\]'"
    with pytest.raises(LaunchError, match=f"tracking.{key} needs the package {key}, which is not installed; {fix}"):
        check_trackers(TrackingConfig(**{key: value}))


def test_the_file_for_prometheus_has_the_newest_value_of_each_metric(tmp_path):
    config = TrackingConfig(prometheus=str(tmp_path / "collector"))
    tracker = PrometheusFile(tmp_path, config, Identity("abc123", 'a "b"\\', {}))
    tracker.open("", {})
    tracker.log(10, {"loss": 2.5, "grad_norm/decoder_03": 0.5, "loss_a-b": 1.0, "loss_a_b": 3.0})
    tracker.log(20, {"loss": math.nan, "grad_norm/head": math.inf})
    tracker.close(is_failing=False)
    (path,) = (tmp_path / "collector").iterdir()
    assert path.name == "pretrain_abc123.prom"
    run = r'run="a \"b\"\\"'
    lines = [line for line in path.read_text().splitlines() if not line.startswith(("#", "pretrain_row_time"))]
    assert sorted(lines) == sorted(
        [
            f'pretrain_active{{id="abc123",{run}}} 0.0',
            f'pretrain_loss{{id="abc123",{run}}} NaN',
            f'pretrain_grad_norm{{id="abc123",part="decoder_03",{run}}} 0.5',
            f'pretrain_grad_norm{{id="abc123",part="head",{run}}} +Inf',
            f'pretrain_loss_a_b{{id="abc123",metric="loss_a-b",{run}}} 1.0',
            f'pretrain_loss_a_b{{id="abc123",{run}}} 3.0',
            f'pretrain_step{{id="abc123",{run}}} 20.0',
        ]
    )
    if find_spec("prometheus_client"):
        from prometheus_client.parser import text_string_to_metric_families

        families = {family.name: family for family in text_string_to_metric_families(path.read_text())}
        assert [sample.value for sample in families["pretrain_grad_norm"].samples] == [0.5, math.inf]
        assert families["pretrain_loss"].samples[0].labels == {"id": "abc123", "run": 'a "b"\\'}


def test_a_folder_of_prometheus_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    config = TrackingConfig(prometheus=str(tmp_path / "file" / "in"))
    with caplog.at_level(logging.WARNING, logger="pretrain"):
        mirror = Mirror(PrometheusFile(tmp_path, config, IDENTITY), config)
        mirror.log(1, {"loss": 1.0})
        mirror.close(LIMIT_S)
    (said,) = caplog.messages
    assert said.startswith("prometheus: cannot start: DiskError: ") and said.endswith("metrics.jsonl has the rows")


ATTEMPT = """
    import sys
    from pathlib import Path
    from pretrain.config.tracking import SamplesConfig, TrackingConfig
    from pretrain.tracking import RunOutput
    from pretrain.tracking.tracker import Identity
    from pretrain.utils.log import setup_logging

    setup_logging(0, 1)
    samples = SamplesConfig(prompts=["Once"])
    options = {"wandb": "off", **OPTIONS}
    config = TrackingConfig(project="bears", notes="A note", tags=["tiny"], samples=samples, **options)
    identity = Identity("abc123", "name", {"model": {"layers": 2}, "path": "s3://hunter2hunter2@bucket"})
    facts = lambda: {"code": {"dirty": False}}
    output = RunOutput(Path("run"), config, identity, rank=0, total_steps=100, find_facts=facts)
    for committed, last, loss in COURSE:
        output.rewind(committed)
        for step in range(committed + 1, last + 1):
            output.log(step, {"loss": loss, "grad_norm/head": 0.5}, shown=False)
    output.samples(last, [("Once", " upon a time")])
    output.attention(last, Path("drawn.png").read_bytes())
    output.alert("A loss spike", "with hunter2hunter2")
    output.close(600)
"""


@pytest.fixture
def attempt(tmp_path):
    """Runs an attempt of a run with some trackers in a process of its own; nothing may be on its standard output."""
    (tmp_path / "run").mkdir()
    Image.new("RGB", (30, 20)).save(tmp_path / "drawn.png")

    def run(options: dict, *course: tuple[int, int, float]) -> None:
        code = f"OPTIONS, COURSE = {options!r}, {course!r}\n{textwrap.dedent(ATTEMPT)}"
        env = {**os.environ, "PYTHONPATH": ROOT, "HOME": str(tmp_path), "STORE_SECRET": SECRET}
        env["TRACKIO_DIR"] = str(tmp_path / "trackio")
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path, env=env
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        lines = [line for line in done.stderr.splitlines() if "sample 'Once'" not in line]
        assert lines == [], "no client writes to the terminal"

    return run


COURSES = ([(0, 6, 2.0), (4, 8, 1.0)], [(5, 10, 3.0)])
"""A run that goes back from step 6 to 4 within a process, and another start from step 5, of 8."""
AS_LAST = [2.0] * 4 + [1.0] + [3.0] * 5
AS_FIRST = [2.0] * 6 + [1.0] * 2 + [3.0] * 2


def check_no_secret(folder: Path) -> None:
    assert not [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.long
def test_tensorboard_shows_each_step_once_as_it_came_last(attempt, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for course in COURSES:
        attempt({"tensorboard": True}, *course)
    shown = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    scalars = shown.Scalars("train/loss")
    assert [(one.step, one.value) for one in scalars] == list(enumerate(AS_LAST, start=1))
    assert shown.Tags()["images"] == ["attention"]
    texts = {tag: shown.Tensors(f"{tag}/text_summary")[-1] for tag in ("config", "facts", "samples", "alerts")}
    content = {tag: one.tensor_proto.string_val[0].decode() for tag, one in texts.items()}
    assert '"layers": 2' in content["config"] and "s3://***@bucket" in content["config"]
    assert '"dirty": false' in content["facts"] and " upon a time" in content["samples"]
    assert content["alerts"] == "**A loss spike**: with ***" and texts["samples"].step == 10
    check_no_secret(tmp_path / "run")


@pytest.mark.long
def test_mlflow_has_one_run_with_each_step_once_as_it_came_first(attempt, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    for course in COURSES:
        attempt({"mlflow": "auto"}, *course)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("bears")
    (run,) = client.search_runs([experiment.experiment_id])
    history = sorted((one.step, one.value) for one in client.get_metric_history(run.info.run_id, "train/loss"))
    assert history == list(enumerate(AS_FIRST, start=1))
    assert (run.info.run_name, run.info.status) == ("name", "FINISHED")
    assert run.data.params == {"model.layers": "2", "path": "s3://***@bucket"}
    tags = {key: run.data.tags.get(key) for key in ("code.dirty", "tags", "mlflow.note.content", "alert")}
    assert tags == {"code.dirty": "False", "tags": "tiny", "mlflow.note.content": "A note",
                    "alert": "A loss spike: with ***"}  # fmt: skip
    files = tmp_path / "run" / "mlflow" / run.info.run_id / "artifacts"
    found = sorted(str(path.relative_to(files)) for path in files.rglob("*.*"))
    assert found == ["attention/step-00000008.png", "attention/step-00000010.png", "config.json",
                     "samples/step-00000008.json", "samples/step-00000010.json"]  # fmt: skip
    check_no_secret(tmp_path / "run")


@pytest.mark.long
def test_trackio_has_one_run_with_each_step_once_as_it_came_first(attempt, tmp_path):
    pytest.importorskip("trackio")
    for course in COURSES:
        attempt({"trackio": True}, *course)
    code = """
        import json, trackio
        from trackio.sqlite_storage import SQLiteStorage
        (run,) = trackio.Api().runs("bears")
        rows = SQLiteStorage.get_logs("bears", run.name)
        print(json.dumps([run.name, run.config, rows, run.alerts()]))
    """
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env)
    name, config, rows, alerts = json.loads(done.stdout)
    assert name == "name-abc123"
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == list(enumerate(AS_FIRST, start=1))
    assert (config["model"], config["code"], config["path"]) == ({"layers": 2}, {"dirty": False}, "s3://***@bucket")
    assert [(one["title"], one["text"], one["level"]) for one in alerts] == [("A loss spike", "with ***", "error")] * 2
    assert any("upon a time" in row.get("samples", {}).get("_value", "") for row in rows)
    assert len(list((tmp_path / "trackio" / "media").rglob("*.png"))) == 2
    check_no_secret(tmp_path / "trackio")


@pytest.mark.long
def test_several_trackers_at_once(attempt, tmp_path):
    for package in ("tensorboard", "mlflow", "alembic", "trackio", "prometheus_client"):
        pytest.importorskip(package)
    every = {"wandb": "offline", "tensorboard": True, "mlflow": "auto", "trackio": True, "prometheus": "collector"}
    attempt(every, (0, 3, 1.0))
    assert (tmp_path / "run" / "mlflow.db").is_file() and (tmp_path / "trackio" / "bears.db").is_file()
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 1
    text = (tmp_path / "collector" / "pretrain_abc123.prom").read_text()
    assert 'pretrain_step{id="abc123",run="name"} 3.0' in text

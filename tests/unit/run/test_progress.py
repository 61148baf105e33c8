"""Marks, limits and heartbeats."""

import gc
import json
import sys
import threading
from dataclasses import asdict

import pytest

from pretrain.config.engine import EngineConfig
from pretrain.run import heartbeat as progress_module
from pretrain.run.heartbeat import STACK_DEPTH, Beat, Progress, Pulse, limit_of
from tests.helpers.clock import FakeClock

PHASE_S = 8.0
"""`engine.timeout_s`."""


def test_marks_are_counted_and_a_phase_that_goes_on_begins_its_limit_anew(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(progress_module, "time", clock)
    progress = Progress()
    assert progress.now[:3] == (0, "start", 0)
    progress.enter("load")
    progress.enter("data", 7)
    progress.enter("update")
    assert progress.now[:3] == (3, "update", 7)
    clock.sleep(1.5)
    progress.go_on()
    assert progress.now == (4, "update", 7, clock.now)


@pytest.mark.parametrize(
    ("limit", "phases"),
    [(8, "meet data forward-backward update"), (24, "start load compile evaluate save close")],
)
def test_what_may_take_long_may_take_three_times_as_long(limit, phases):
    assert {limit_of(phase, 8) for phase in phases.split()} == {limit}


@pytest.mark.parametrize("timeout_s", [1, 8, 600])
def test_the_process_group_waits_for_longer_than_the_watchdog_does(timeout_s):
    longest = max(limit_of(phase, timeout_s) for phase in ("update", "save"))
    assert EngineConfig(timeout_s=timeout_s).group_timeout_s >= longest + 60


def test_a_heartbeat_has_the_phase_and_where_the_main_thread_is():
    progress = Progress()
    pulse = Pulse(progress, 3, PHASE_S, lambda: 41)
    beats = []

    def take() -> None:
        beats.append(pulse.beat())

    def wait_for_a_collective() -> None:
        progress.enter("update", 12)
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()

    wait_for_a_collective()
    beat = beats[0]
    assert (beat.rank, beat.number, beat.marks, beat.collectives) == (3, 1, 1, 41)
    assert (beat.phase, beat.step, beat.limit_s) == ("update", 12, 8)
    assert any("test_progress.py" in call and call.endswith("wait_for_a_collective") for call in beat.stack)
    assert len(beat.stack) <= STACK_DEPTH
    assert Beat(**json.loads(json.dumps(asdict(beat)))) == beat
    assert pulse.beat().number == 2


@pytest.mark.parametrize("is_collecting", [True, False])
def test_no_garbage_is_collected_while_stacks_are_looked_at(monkeypatch, is_collecting):
    """Python before 3.11.9 may stand still for ever where that happens."""
    look, during = sys._current_frames, []
    monkeypatch.setattr(sys, "_current_frames", lambda: (during.append(gc.isenabled()), look())[1])
    before = gc.isenabled()
    try:
        (gc.enable if is_collecting else gc.disable)()
        Pulse(Progress(), 0, PHASE_S, lambda: 0).beat()
        assert during == [False]
        assert gc.isenabled() == is_collecting
    finally:
        (gc.enable if before else gc.disable)()


def test_a_heartbeat_says_for_how_long_the_phase_has_lasted(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(progress_module, "time", clock)
    progress = Progress()
    progress.enter("save", 5)
    clock.sleep(12.2)
    assert Pulse(progress, 0, PHASE_S, lambda: 0).beat().where() == "in save of step 5 for 12 s"


@pytest.mark.parametrize("timeout_s", [600, 600.0])  # the config has a whole number
def test_a_heartbeat_is_read_as_it_was_written(timeout_s):
    beat = Pulse(Progress(), 1, timeout_s, lambda: 0).beat()
    assert Beat.from_json(json.dumps(asdict(beat))) == beat

"""The timeline under a clock that the test owns."""

import pytest
import torch

from pretrain.tracking.meter import Timeline


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run_step(timeline: Timeline, clock: Clock) -> None:
    """Data 1 s, two micro-batches of forward 2 s and backward 4 s, optimizer 8 + 8 s around communication of 16 s."""
    with timeline.within("data"):
        clock.now += 1
    for _ in range(2):
        timeline.enter("forward")
        clock.now += 2
        timeline.after_forward()
        clock.now += 4
    timeline.enter("optimizer")
    clock.now += 8
    with timeline.within("communication"):
        clock.now += 16
    clock.now += 8
    timeline.enter("other")
    clock.now += 32
    timeline.end_step()


def test_parts_of_a_step_add_up_to_its_time():
    clock = Clock()
    timeline = Timeline(clock=clock)
    for _ in range(3):
        run_step(timeline, clock)
    parts = timeline.take()
    assert parts == {
        "data_s": 1.0,
        "forward_s": 4.0,
        "backward_s": 8.0,
        "optimizer_s": 16.0,
        "communication_s": 16.0,
        "other_s": 32.0,
    }
    assert sum(parts.values()) == (clock.now - 100) / 3


def test_what_was_taken_does_not_come_again():
    clock = Clock()
    timeline = Timeline(clock=clock)
    run_step(timeline, clock)
    first = timeline.take()
    assert timeline.take() == {}
    run_step(timeline, clock)
    assert timeline.take() == first


def test_a_forward_pass_outside_of_training_changes_nothing():
    clock = Clock()
    timeline = Timeline(clock=clock)
    with timeline.within("evaluation"):
        clock.now += 3
        timeline.after_forward()
        clock.now += 4
    timeline.end_step()
    assert timeline.take() == {"evaluation_s": 7.0}


@pytest.mark.gpu
def test_on_cuda_a_part_lasts_as_long_as_the_device_works():
    timeline = Timeline(on_cuda=True)
    matrix = torch.randn(8192, 8192, device="cuda")
    before, first, last, after = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    before.record()
    timeline.enter("forward")
    first.record()
    for _ in range(10):
        matrix @ matrix
    last.record()
    timeline.enter("other")
    after.record()
    timeline.end_step()
    torch.cuda.synchronize()
    lasted = timeline.take()["forward_s"]
    assert 0 < first.elapsed_time(last) / 1e3 <= lasted <= before.elapsed_time(after) / 1e3

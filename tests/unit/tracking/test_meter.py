"""The meter under a clock that the test owns."""

import pytest

from pretrain.tracking.meter import Meter, peak_flops


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(**kwargs) -> tuple[Meter, Clock]:
    clock = Clock()
    return Meter(10, clock=clock, **kwargs), clock


def test_figures_leave_out_the_first_step_which_compiles():
    meter, clock = make(tokens_before=lambda step: 64 * step, flops_before=lambda step: 384.0 * step, peak=1200.0)
    for wait, work in ((0.0, 60.0), (0.5, 1.5), (0.0, 2.0)):
        with meter.data_wait():
            clock.now += wait
        clock.now += work
        meter.end_step(tokens=64)
    assert meter.read(2) == {
        "tokens_per_s": 32.0,
        "step_time_s": 2.0,
        "data_wait": 0.125,
        "eta_s": 16.0,
        "mfu": 32.0 * 6.0 / 1200.0,
    }


def test_the_time_left_counts_the_rows_of_larger_steps():
    meter, clock = make(tokens_before=lambda step: 2 * step if step < 4 else 8 + 6 * (step - 4))
    for _ in range(2):
        clock.now += 3.0
        meter.end_step(tokens=64)
    assert meter.read(2)["eta_s"] == 3.0 * (2 + 6 * 3)
    assert meter.read(10)["eta_s"] == 0.0


def test_time_left_and_mfu_follow_the_flops_of_cheaper_steps():
    def flops(step):
        return 3.0 * step if step < 4 else 12.0 + 6.0 * (step - 4)

    meter, clock = make(tokens_before=lambda step: 8 * step, flops_before=flops, peak=9.0, window_steps=2)
    for _ in range(5):
        clock.now += 1.0
        meter.end_step(tokens=8)
    assert meter.read(4)["eta_s"] == 12.0  # 36 FLOPs at 3 a second
    assert meter.read(4)["mfu"] == 3 / 9
    assert meter.read(5)["mfu"] == 4.5 / 9  # a cheap step, and one of 6


def test_nothing_is_claimed_before_the_first_step():
    assert make()[0].read(0) == {}


def test_the_window_forgets_old_steps():
    meter, clock = make(window_steps=2)
    for seconds in (1.0, 100.0, 1.0, 3.0):
        clock.now += seconds
        meter.end_step(tokens=8)
    assert meter.read(3)["step_time_s"] == 2.0
    assert meter.read(3)["tokens_per_s"] == 4.0


def test_excluded_time_is_no_part_of_a_step():
    meter, clock = make()
    clock.now += 1.0
    with meter.excluded():
        clock.now += 50.0
    clock.now += 1.0
    meter.end_step(tokens=8)
    assert meter.read(1)["step_time_s"] == 2.0


def test_time_left_is_zero_at_the_end_and_beyond():
    meter, clock = make()
    clock.now += 1.0
    meter.end_step(tokens=8)
    assert [meter.read(step)["eta_s"] for step in (9, 10, 11)] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("known", [{}, {"flops_before": float}, {"peak": 1e12}])
def test_no_mfu_unless_both_flops_and_peak_are_known(known):
    meter, clock = make(**known)
    clock.now += 1.0
    meter.end_step(tokens=8)
    assert "mfu" not in meter.read(1)


def test_peaks_by_device_name():
    peaks = {
        "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": None, "NVIDIA H200": 989e12,
        "NVIDIA GH200 480GB": 989e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA GeForce RTX 4090": 165e12, "cpu": None,
    }  # fmt: skip
    assert {name: peak_flops(name) for name in peaks} == peaks

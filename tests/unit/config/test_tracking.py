"""`tracking:` and `profile:`: what is refused, and which rows have norms by layer."""

import pytest

from pretrain.config.tracking import ProfileConfig, TrackingConfig


@pytest.mark.parametrize(
    ("every", "row", "expected"),
    [
        (100, 10, [100, 200]),
        (25, 10, [30, 50, 80, 100]),
        (5, 20, [20, 40, 60]),
        (0, 10, []),
        (50, 7, [56, 105]),
    ],
)
def test_norms_come_with_the_first_row_at_or_after_each_interval(every, row, expected):
    config = TrackingConfig(log_every_steps=row, norms_every_steps=every)
    assert [step for step in range(1, expected[-1] + 1 if expected else 300) if config.measures_norms(step)] == expected


def test_steps_to_profile_are_a_first_and_a_last_one():
    assert ProfileConfig(steps=[3, 3]).steps == [3, 3]
    with pytest.raises(ValueError, match=r"steps=\[5, 3\] must be \[first, last\], from 1 on; use \[5, 7\]"):
        ProfileConfig(steps=[5, 3])
    with pytest.raises(ValueError, match=r"from 1 on"):
        ProfileConfig(steps=[0, 3])

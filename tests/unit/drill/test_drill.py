"""How long a drilled run is, and what is said of one that is short."""

import pytest

from pretrain.config.load import load_config
from pretrain.drill.drill import Drill, plan_steps, steps_for
from pretrain.drill.drill_folder import Pace
from pretrain.utils.status_line import transient_bar


def config(steps: int):
    return load_config("configs/run/quickstart.yaml", [f"train.steps={steps}"])


def test_a_run_is_as_long_as_its_kills_need_and_the_config_allows():
    assert (steps_for(1, 5), steps_for(20, 5), steps_for(500, 2)) == (20, 125, 1250)
    assert (plan_steps(config(10_000), 500, 2), plan_steps(config(160), 500, 2)) == (1250, 160)


@pytest.mark.parametrize(("steps", "lines"), [(1250, 0), (160, 1)])
def test_a_run_that_is_short_for_its_kills_is_told(tmp_path, monkeypatch, capsys, steps, lines):
    monkeypatch.setattr(Drill, "_run_golden", lambda self, bar: Pace(1.0, 1.0, 1.0, 1.0))
    drill = Drill(config(2000), tmp_path / "drill", 2, 0, "any", steps, 2)
    with transient_bar() as bar:
        assert drill.run(500, 0, bar) is None
    expected = (
        "a run of 160 steps is short for 500 kills, which may need 1250: kills near its end come in start-up; raise "
        "train.steps"
    )
    assert capsys.readouterr().err.splitlines() == [expected] * lines

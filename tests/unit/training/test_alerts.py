"""Which steps of a run are worth an alert: the first of several that went wrong."""

from dataclasses import replace
from types import SimpleNamespace

from pretrain.checkpoint.state import TrainState
from pretrain.data.loader import StepCounts
from pretrain.training.loop import _alert
from pretrain.training.step import StepTotals


def test_the_first_bad_step_and_the_first_spike_of_a_row_are_told():
    told: list[tuple[str, str]] = []
    tracker = SimpleNamespace(alert=lambda title, text: told.append((title, text)))
    run = SimpleNamespace(tracker=tracker, health=SimpleNamespace(judge=lambda step, measures, tell: None))
    agreed = StepTotals({}, StepCounts(), None, 0, stop=False)
    fine = TrainState(data_hash="", tokenizer_hash="")
    for step, (bad, spikes) in enumerate([(0, 0), (1, 0), (2, 0), (0, 0), (0, 1), (0, 2), (0, 0)], start=1):
        state = replace(fine, step=step, bad_steps_in_a_row=bad, spikes_in_a_row=spikes)
        _alert(run, state, float("nan") if bad else 9.5, agreed)
    assert told == [
        ("A step was not finite", "step 2, loss nan: it was skipped"),
        ("A loss spike", "step 5, loss 9.5"),
    ]

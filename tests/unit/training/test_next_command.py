"""The command that a run that is done ends with."""

import pytest

from pretrain.config.load import load_config
from pretrain.config.objective import ObjectiveConfig
from pretrain.training.run import next_command, time_of_starts
from tests.unit.report.run_folders import write_lines

CHAT = "pretrain chat runs/instruction"
LIKE = "--prompt 'A text like those of the data'"


@pytest.mark.parametrize(
    ("recipe", "overrides", "has_template", "command"),
    [
        ("quickstart", [], False, "pretrain generate runs/quickstart"),
        (
            "bert_quickstart",
            [],
            False,
            "pretrain generate runs/bert-quickstart --prompt 'Once upon a [M",
        ),
        ("captions_synthetic", [], False, "pretrain generate runs/captions-synthetic --image cat.jpg"),
        ("multi30k", [], False, f"pretrain generate runs/multi30k {LIKE}"),
        ("quickstart", ["run.name=instruction", "objective.kind=supervised"], True, CHAT),
        (
            "quickstart",
            ["objective.kind=supervised"],
            False,
            f"pretrain generate runs/quickstart {LIKE}",
        ),
    ],
)
def test_it_asks_the_model_for_what_it_was_trained_on(recipe, overrides, has_template, command):
    config = load_config(recipe, overrides)
    assert next_command(config, has_template=has_template, has_validation=True).startswith(command)


def test_a_run_is_to_be_evaluated_only_where_there_is_a_validation_split():
    config = load_config("vit_digits", [])
    found = [next_command(config, has_template=False, has_validation=held_out) for held_out in (True, False)]
    assert found == ["pretrain evaluate runs/vit-digits", "pretrain inspect runs/vit-digits"]
    texts = load_config("bert_quickstart", []).model_copy(update={"objective": ObjectiveConfig(kind="classify")})
    command = next_command(texts, has_template=False, has_validation=False)
    assert command.startswith("pretrain classify runs/bert-quickstart --text ")


def test_the_time_of_a_run_has_that_of_a_start_that_was_killed(tmp_path):
    first = {"started": "2126-03-01T08:00:00+00:00"}
    second = {"started": "2126-03-01T09:00:00+00:00", "ended": "2126-03-01T09:00:14+00:00", "from_step": 300}
    rows = [{"step": step, "tokens": step, "step_time_s": 0.2} for step in range(50, 500, 50)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    assert time_of_starts(tmp_path / "metrics.jsonl", [second]) == "0:14"
    assert time_of_starts(tmp_path / "metrics.jsonl", [first, second]) == "about 1:30"

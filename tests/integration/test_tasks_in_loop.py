"""`eval.tasks`: downstream tasks at steps of their own, the same training with them as without, and failures."""

import json
from pathlib import Path

import pytest
import yaml

from pretrain.checkpoint.format import list_checkpoints
from pretrain.config.load import load_config
from pretrain.errors import ConfigError
from pretrain.evaluation.tasks import TaskChoice, evaluate_tasks
from tests.helpers.runs import RunMaker, assert_same_folders
from tests.unit.artifact.runs import TEXTS, write_texts
from tests.unit.evaluation.task_files import CHOICES, NAMES, write_tasks

pytestmark = pytest.mark.long

CONFIG = """
seed: 7
run: {{dir: {runs}, name: run}}
data: {{path: {data}}}
model:
  preset: llama-tiny
  max_seq_len: 64
  decoder: {{width: 32, heads: 4, kv_heads: 2, ff_width: 48, dropout: 0.1}}
batch: {{global_tokens: 128, seq_len: 32, micro: 2}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 2}}}}
train: {{steps: 7}}
engine: {{kind: deepspeed, zero_stage: 2, precision: fp32, device: cpu}}
checkpoint: {{every_steps: 3}}
tracking: {{log_every_steps: 1, wandb: off}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A maker of runs over texts, with tasks in `folder/tasks`; nothing is fetched."""
    folder = tmp_path_factory.mktemp("tasks")
    write_texts(folder / "texts", TEXTS * 8)
    tasks = write_tasks(folder / "tasks")
    broken = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"validation": str(folder / "absent.jsonl")}}}
    (tasks / "broken.yaml").write_text(yaml.safe_dump(broken | CHOICES | {"task": "broken"}))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_HOME", str(folder / "cache"))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache" / "datasets"))
        yield RunMaker(folder, folder / "texts", CONFIG)


def asked(runs: RunMaker, *names: str) -> tuple[str, ...]:
    tasks = runs.config().parent / "tasks"
    return (f"eval.tasks.names=[{','.join(names)}]", f"eval.tasks.path={tasks}", "eval.tasks.every_steps=3")


def scores(runs: RunMaker, name: str) -> dict[int, dict[str, float]]:
    rows = map(json.loads, runs.folder(name).metrics.read_text().splitlines())
    found = {}
    for row in rows:
        if own := {key: value for key, value in row.items() if key.startswith("tasks/")}:
            found[row["step"]] = own
    return found


def of_checkpoint(path: Path, tasks: Path) -> dict[str, float]:
    report = evaluate_tasks(path, TaskChoice(NAMES, tasks), resamples=0)
    return {f"tasks/{score.task}/{score.metric.partition(',')[0]}": score.value for score in report.scores}


def test_scores_are_those_of_evaluate_on_the_checkpoint_and_training_is_the_same(runs):
    runs.train("with", *asked(runs, *NAMES))
    found = scores(runs, "with")
    assert sorted(found) == [3, 6, 7]
    newest = list_checkpoints(runs.folder("with").checkpoints)[-1]
    expected = of_checkpoint(newest, runs.config().parent / "tasks")
    assert found[7].keys() == expected.keys() and len(expected) == 5
    # Batches of two ranks are those of one; sums are in fp32.
    assert found[7] == pytest.approx(expected, rel=1e-6)
    runs.train("without")
    assert_same_folders(runs.folder("with"), runs.folder("without"), 7)


def test_a_resumed_run_has_the_scores_of_an_uninterrupted_one(runs):
    runs.train("stopped", *asked(runs, NAMES[0]), "train.stop_after=4", ranks=1)
    first = scores(runs, "stopped")
    # The end of a part of the run is no end of the run.
    runs.train("stopped", *asked(runs, NAMES[0]), ranks=1)
    runs.train("whole", *asked(runs, NAMES[0]), ranks=1)
    assert scores(runs, "stopped").items() >= scores(runs, "whole").items() and first[3] == scores(runs, "whole")[3]


def test_at_zero_stage_3_all_ranks_answer_together(runs):
    runs.train("sharded", *asked(runs, *NAMES), "engine.zero_stage=3", "train.steps=3")
    runs.train("replicated", *asked(runs, *NAMES), "train.steps=3")
    # Weights are sums over ranks in another order.
    assert scores(runs, "sharded")[3] == pytest.approx(scores(runs, "replicated")[3], rel=1e-4)


def test_a_task_that_fails_is_named_and_stops_nothing(runs):
    output = runs.train("failing", *asked(runs, "broken", NAMES[0]), "train.steps=3", ranks=1)
    assert "eval.tasks: broken has no score:" in output and "absent.jsonl" in output
    assert scores(runs, "failing")[3].keys() == {f"tasks/{NAMES[0]}/acc", f"tasks/{NAMES[0]}/acc_norm"}


def test_an_encoder_answers_no_tasks(tmp_path):
    path = tmp_path / "encoder.yaml"
    path.write_text(
        "run: {name: run}\ndata: {path: none}\nmodel: {preset: bert-tiny}\nobjective: {kind: masked}\n"
        "batch: {global_tokens: 128, seq_len: 32, micro: 2}\noptim: {lr: 1e-3}\ntrain: {steps: 7}\n"
        "eval: {tasks: {names: [our_choices]}}\n"
    )
    with pytest.raises(
        ConfigError, match=r"eval.tasks are for models with a decoder alone and its head; leave them out"
    ):
        load_config(path)


def test_an_unknown_task_is_refused_at_the_start(runs):
    output = runs.train("unknown", *asked(runs, "our_choises"), expect=64, ranks=1)
    assert "there is no task 'our_choises'; give eval.tasks.path, or another name" in output

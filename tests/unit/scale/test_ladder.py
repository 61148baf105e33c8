"""A ladder: its runs, its folder, its command, and what cannot work; fit and score over runs written by hand."""

import json
import re
import shlex
from pathlib import Path

import pytest

from pretrain import cli
from pretrain.cli.scale import scale_plan_command
from pretrain.config.data import plan_batch
from pretrain.config.load import load_config
from pretrain.plan.course import StoredData
from pretrain.run.folder import RunDir
from pretrain.scale.ladder import describe_run, load_ladder, place_items
from pretrain.scale.law import ScalingLaw
from pretrain.scale.prediction import write_prediction
from pretrain.scale.scaling_rule import size_of
from tests.helpers.shards import make_shards
from tests.repo.source import ROOT
from tests.unit.report.run_folders import attempt
from tests.unit.scale.test_scaling_rule import REFERENCE

TRUE = ScalingLaw(e=1.2, a=60.0, b=300.0, alpha=0.35, beta=0.38)
PLAN = ("scale", "plan", "ref.yaml", "--budget", "1e16", "--output", "ladder")


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "ref.yaml").write_text(REFERENCE.replace("heads: 8, kv_heads: 4", "heads: 32, kv_heads: 16"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finish(config: Path, loss: float | None = None, **facts: object) -> Path:
    """Writes the folder of a finished run with the loss of the law, or another."""
    loaded = load_config(config)
    run, size, steps = RunDir(loaded.folder), size_of(loaded), loaded.train.steps
    (run.checkpoints / f"step-{steps:08d}").mkdir(parents=True)
    (run.checkpoints / f"step-{steps:08d}" / "manifest.json").write_text("{}")
    record = {"id": "a", "name": loaded.run.name, "created": "2126-03-01T08:00:00+00:00"}
    run.record.write_text(json.dumps(record | {"attempts": [attempt(1, 0.0, 1.0, 0) | facts]}))
    run.config.write_text(config.read_text())
    loss = TRUE.loss(size.parameters, size.tokens) if loss is None else loss
    run.metrics.write_text(json.dumps({"step": steps, "val_loss": loss}) + "\n")
    return run.path


def test_each_budget_has_three_sizes_and_the_largest_one(here, capsys):
    assert cli.run([*PLAN, "--rungs", "4"]) == 0
    assert "next: pretrain scale run ladder" in capsys.readouterr().out
    ladder = load_ladder(Path("ladder"))
    assert len(ladder.runs) == 10
    assert ladder.flops == pytest.approx(sum(run.flops for run in ladder.runs))
    assert [run.flops for run in ladder.runs[:4]] == pytest.approx(
        [1e16 / 300 * 10 ** (rung / 3) for rung in range(4)], rel=0.05
    )
    assert ladder.target.flops == pytest.approx(1e16, rel=0.01)
    for run in (*ladder.runs, ladder.target):
        config = load_config(Path("ladder/configs") / f"{run.name}.yaml")
        size = size_of(config)
        assert (size.parameters, size.tokens, config.optim.lr) == (run.parameters, run.tokens, run.lr)
        assert config.eval.every_steps == config.train.steps == run.steps


def test_each_size_on_the_line_is_repeated_by_seed(here):
    assert cli.run([*PLAN, "--rungs", "4", "--seeds", "3"]) == 0
    runs = load_ladder(Path("ladder")).runs
    assert len(runs) == 4 * 3 + 6
    configs = [load_config(Path("ladder/configs") / f"{run.name}.yaml") for run in runs]
    line, beside = configs[:12], configs[12:]
    assert [config.seed - configs[0].seed for config in line] == [0] * 4 + [1] * 4 + [2] * 4
    assert {config.seed for config in beside} == {configs[0].seed}
    for repeat in (4, 8):
        assert [run.tokens for run in runs[:4]] == [run.tokens for run in runs[repeat : repeat + 4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--widths", "64,82,128"), "width=82 is no multiple of 8"),
        (("--widths", "64,a"), "--widths: '64,a' is no list of widths; for example 64,96,128"),
        (("--rungs", "2"), "--rungs: 2 sizes give too few runs for a law, which takes 6; give at least 3 sizes"),
        (("--smallest", "2e16", "--largest", "3e16"), "--budget: 1e+16 FLOPs are below the 2e+16 of the smallest run"),
        (("--largest", "2e16"), "--budget: 1e+16 FLOPs are not above the 2e+16 of the largest run of the ladder"),
        (("--rungs", "30"), "--rungs: two budgets have the same size, width "),
        (("--budget", "1e300"), "--budget: 1e+300 FLOPs are beyond any run; use at most 1e+28"),
        (("--largest", "inf"), "--largest: inf FLOPs are beyond any run; use at most 1e+28"),
        (
            ("model.decoder.value_residual=true",),
            "width=16; --rule depth_by_width=0 keeps the layers: decoder: value_residual=true needs 2 layers or more",
        ),
        (("--rule", "tokens=3"), "--rule tokens: unknown key 'tokens'"),
        (("batch.global_tokens=67108864",), "tokens are too few to learn from, at least 30 are needed"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(here, capsys, options, message):
    assert cli.run([*PLAN, *options]) == 64
    assert message in capsys.readouterr().err
    assert not Path("ladder").exists()


def test_data_that_would_be_read_too_often_are_refused(here, capsys):
    make_shards(here / "data")
    assert cli.run([*PLAN, "data.path=data", "data.lanes=1", "model.vocab_size=1000"]) == 64
    assert "times; beyond 4 the law does not hold; prepare more text" in capsys.readouterr().err


def test_epochs_are_tokens_of_the_run_over_those_of_the_data():
    stored = StoredData(tokens=10_000_000, shards=1, token_bytes=2, vocab_size=2048)
    config = load_config("quickstart", ["batch.global_tokens=2048", "train.steps=1000"])
    assert describe_run(config, 2048, stored).epochs == pytest.approx(2048 * 1000 / 10_000_000)


def documented_plans() -> list[list[str]]:
    """The commands of `pretrain scale plan` in its help and in docs/scaling_laws.md."""
    texts = [scale_plan_command.__doc__ or "", (ROOT / "docs/scaling_laws.md").read_text()]
    lines = [line.strip().removeprefix("Example: ") for text in texts for line in text.splitlines()]
    return [shlex.split(line)[3:] for line in lines if line.startswith("pretrain scale plan ")]


def test_documented_ladders_can_be_planned_with_the_quickstarts_data(monkeypatch, tmp_path):
    stored = StoredData(tokens=9_500_000, shards=1, token_bytes=2, vocab_size=2048)
    monkeypatch.setattr("pretrain.cli.scale.find_stored", lambda config: stored)
    monkeypatch.chdir(tmp_path)
    plans = documented_plans()
    assert len(plans) >= 2
    for number, arguments in enumerate(plans):
        folder = tmp_path / f"ladder-{number}"
        assert cli.run(["scale", "plan", *arguments, "--output", str(folder)]) == 0
        for config in (folder / "configs").iterdir():  # on two ranks, as the document trains them
            assert plan_batch(load_config(config).batch, 2).accumulation >= 1


def test_widths_that_collide_are_answered_with_a_command_that_works(here, capsys):
    assert cli.run([*PLAN, "--rungs", "30"]) == 64
    found = re.search(
        r"use (--widths \S+ --budget \S+) \(its large run reads [\d.]+ \w tokens\)", capsys.readouterr().err
    )
    assert found is not None
    assert cli.run([*PLAN, *found[1].split()]) == 0


def test_widths_that_the_data_are_too_few_for_are_not_the_first_remedy(here, capsys, monkeypatch):
    stored = StoredData(tokens=1_000_000, shards=1, token_bytes=2, vocab_size=2048)
    monkeypatch.setattr("pretrain.cli.scale.find_stored", lambda config: stored)
    assert cli.run([*PLAN, "--rungs", "30"]) == 64
    remedy = r"use narrower heads in the config, or prepare (\S+) M tokens .there are 1.00 M. for (.*) .its"
    found = re.search(remedy, capsys.readouterr().err)
    assert found is not None
    # With data of that size the command works.
    stored = StoredData(tokens=round(float(found[1]) * 1.05e6), shards=1, token_bytes=2, vocab_size=2048)
    assert cli.run([*PLAN, *found[2].split()]) == 0


def test_fit_predicts_and_score_compares(here, capsys):
    assert cli.run([*PLAN, "--rungs", "4"]) == 0
    assert cli.run(["scale", "fit", "ladder"]) == 65
    assert "0 finished runs are too few for a law of five values" in capsys.readouterr().err
    ladder = load_ladder(Path("ladder"))
    configs = [Path("ladder/configs") / f"{run.name}.yaml" for run in ladder.runs]
    finish(configs[0], exit_code=77, reason="loss is nan")
    for config in configs[2:]:
        finish(config)
    assert cli.run(["scale", "fit", "ladder"]) == 0
    done = capsys.readouterr()
    assert "ref-0 is left out: diverged: loss is nan" in done.err
    assert "ref-1 is left out: not started" in done.err
    facts = json.loads(Path("ladder/prediction.json").read_text())
    predicted = facts["predicted"][0]
    truth = TRUE.loss(ladder.target.parameters, ladder.target.tokens)
    assert predicted["loss"] == pytest.approx(truth, rel=0.02)
    assert "ref-0 is left out" in Path("ladder/scale.html").read_text()
    assert "L(C) = " in done.out
    assert "L(C) = " in Path("ladder/scale.html").read_text()

    target = finish(Path("ladder/configs/ref-target.yaml"), loss=truth)
    assert cli.run(["scale", "fit", "ladder"]) == 73
    assert "has begun, and has a prediction already" in capsys.readouterr().err
    assert cli.run(["scale", "score", "ladder", str(target), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] == pytest.approx(truth)
    assert found["error"] == pytest.approx(predicted["loss"] / truth - 1)
    assert found["is_before"]
    assert "measured" in Path("ladder/scale.html").read_text()

    # A prediction that was written before there was a law of the line.
    first = {key: value for key, value in facts.items() if key not in ("line_law", "sha256")} | {"version": 1}
    write_prediction(Path("ladder/prediction.json"), first)
    assert cli.run(["scale", "score", "ladder", str(target)]) == 0
    assert "L(C)" not in Path("ladder/scale.html").read_text()
    Path("ladder/prediction.json").write_text(json.dumps(facts))

    record = json.loads((target / "run.json").read_text()) | {"created": "2020-01-01T00:00:00+00:00"}
    (target / "run.json").write_text(json.dumps(record))
    assert cli.run(["scale", "score", "ladder", str(target)]) == 0
    assert "after the fact: the run began 2020-01-01" in capsys.readouterr().err
    assert cli.run(["scale", "score", "ladder", "ladder/runs/ref-2"]) == 65
    assert "no run of its size was predicted" in capsys.readouterr().err

    predicted["loss"] = truth
    Path("ladder/prediction.json").write_text(json.dumps(facts))
    assert cli.run(["scale", "score", "ladder", str(target)]) == 65
    assert "prediction.json: was edited: its content has another SHA-256" in capsys.readouterr().err


def test_a_ladder_that_was_moved_has_its_runs_below_its_new_folder(here, capsys, monkeypatch):
    assert cli.run([*PLAN, "--rungs", "4"]) == 0
    target = load_ladder(Path("ladder")).target.name
    assert place_items(Path("ladder"), target) == []
    assert place_items(here / "ladder", target) == []
    Path("ladder").rename("moved")
    assert place_items(Path("moved"), target) == ["run.dir=moved/runs"]
    trained: list[Path] = []

    def train(config: str, overrides: list[str], ranks: int) -> int:
        trained.append(load_config(config, overrides).folder)
        return 0

    monkeypatch.setattr("pretrain.cli.scale.train_local", train)
    assert cli.run(["scale", "run", "moved"]) == 0
    runs = [run.name for run in load_ladder(Path("moved")).runs]
    assert trained == [Path("moved/runs") / name for name in runs]
    Path("moved/runs").mkdir()
    for name in runs:
        finish(Path("moved/configs") / f"{name}.yaml").rename(Path("moved/runs") / name)
    capsys.readouterr()
    assert cli.run(["scale", "fit", "moved"]) == 0
    command = f"next: pretrain launch local moved/configs/{target}.yaml run.dir=moved/runs"
    assert command in capsys.readouterr().out


def test_the_folder_of_a_ladder_stands_for_its_runs_that_were_submitted(here, capsys):
    assert cli.run([*PLAN, "--rungs", "3"]) == 0
    names = [run.name for run in load_ladder(Path("ladder")).runs]
    assert cli.run(["launch", "cancel", "ladder"]) == 64
    assert "ladder: no run here" in capsys.readouterr().err
    for name in (names[2], names[0]):
        folder = RunDir(Path("ladder/runs") / name)
        folder.launch.mkdir(parents=True)
        (folder.launch / "spec.json").write_text("{}")
    assert cli.run(["launch", "cancel", "ladder"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{name}: has no Slurm job" for name in (names[0], names[2])]

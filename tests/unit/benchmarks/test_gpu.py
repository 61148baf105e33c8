"""The GPU campaign: rehearsed on a CPU, its rows, and a runner that no arm can stop."""

import importlib
import json
import re
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.gpu import ARMS, Arm, list_arms, run_campaign
from benchmarks.gpu_bench import Bench
from benchmarks.gpu_carry import BUILT, DOWNLOADED, _locked_versions
from benchmarks.gpu_layouts import GROUPS
from benchmarks.gpu_peers import MicroBatches, Step, Work, plan_model, random_steps
from benchmarks.gpu_plan import beside_plan, compare_plans, read_rows
from benchmarks.gpu_published import characters, race, translation
from benchmarks.gpu_steps import Comparison, engine_of, pack_rows, pad_rows, with_documents
from pretrain.plan.cluster import Calibration
from pretrain.plan.gpus import CONSTANTS
from pretrain.types import IGNORE_INDEX
from tests.repo.source import ROOT

HERE = "tests.unit.benchmarks.gpu_arms"
OF_A_ROW = {"arm", "question", "case", "shape", "environment"}
OF_A_TIME = {"ms", "host_ms", "peak_allocated_bytes", "peak_reserved_bytes", "clocks"}
OF_THE_PLACE = {"gpu", "driver", "cuda", "cudnn", "packages", "commit", "command"}


def campaign(folder, arms, minutes=60.0):
    """Runs arms in the rehearsal; returns the exit code and the rows."""
    scratch = folder / "scratch"
    scratch.mkdir()
    job = {
        "out": str(folder),
        "scratch": str(scratch),
        "rehearse": True,
        "command": "a command",
        "commit": "0123abc",
        "nanogpt": None,
    }
    code = run_campaign(arms, job, minutes)
    file = folder / "rows.jsonl"
    return code, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.long
def test_the_whole_campaign_rehearses_on_a_cpu(tmp_path):
    """Every row must be complete, and every arm must have a figure."""
    code, rows = campaign(tmp_path, ARMS)
    wrong = [row for row in rows if "error" in row]
    assert (code, wrong) == (0, [])
    for row in rows:
        assert row.keys() >= OF_A_ROW, row
        assert row["environment"].keys() >= OF_THE_PLACE, row
        assert "ms" not in row or row.keys() >= OF_A_TIME, row
    assert {row["arm"] for row in rows if "refused" not in row} == set(ARMS)


@pytest.mark.long
def test_a_case_that_fails_leaves_the_others_and_the_arm_fails(tmp_path, capsys):
    arms = {"half": Arm(f"{HERE}:half_fails", 600, "?"), "dead": Arm(f"{HERE}:dies", 600, "?")}
    code, rows = campaign(tmp_path, arms)
    half, dead = ([row for row in rows if row["arm"] == name] for name in arms)
    assert code == 1
    assert [row.get("case") for row in half] == ["case 0", "case 1", "case 2", "case 3", None]
    assert half[1]["error"] == "ValueError: no such number"
    assert half[2]["refused"] == "this machine has no such kernel; use another"
    assert half[3]["ms"].keys() == {"median", "low", "high"}
    assert half[4]["error"] == "exit code 1"
    assert "failed: case 1" in half[4]["log"]
    assert [row.get("value") for row in dead] == [1, None]
    assert dead[1]["error"] == "exit code 3"
    assert "--only half dead" in capsys.readouterr().out


def test_an_arm_that_hangs_is_ended_and_is_a_row(tmp_path):
    code, rows = campaign(tmp_path, {"hung": Arm(f"{HERE}:hangs", 0.1, "?")})
    assert code == 1
    assert [row["error"] for row in rows] == ["ran past its limit of 0.5 s"]


def test_arms_without_time_are_named_and_are_no_failure(tmp_path, capsys):
    code, rows = campaign(tmp_path, {name: ARMS[name] for name in ("probe", "loss")}, minutes=0.0)
    assert (code, rows) == (0, [])
    assert "left for lack of time: --only probe loss" in capsys.readouterr().out


def test_every_arm_is_there_and_says_what_it_answers():
    for arm in ARMS.values():
        module, _, name = arm.function.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
        assert arm.question.endswith("?") and arm.target
    assert len(list(list_arms(ARMS))) == len(ARMS)


@pytest.fixture
def bench(tmp_path):
    return Bench("arm", "?", tmp_path, tmp_path, rehearse=True, command="", commit="", nanogpt=None)


@pytest.fixture
def work():
    return Work(plan_model("llama-tiny", 61), seq_len=32, micro=4, accumulation=2)


@pytest.mark.long
def test_a_case_with_other_losses_fails_and_keeps_its_figures(bench, work):
    closed = []

    def build(loss):
        return lambda: Step(lambda micro: torch.tensor(loss), lambda: closed.append(loss))

    found = Comparison(bench, work, [MicroBatches([], [])])
    for name, loss in (("ours", 2.0), ("peer", 2.01), ("wrong", 2.1), ("ours again", 2.0)):
        found.run(name, build(loss))
    found.judge("ours", "ours again", {"peer": 0.0, "wrong": 1e9, "absent": 1.0}, {"peer": 1e9})
    found.judge_best("ms", ["ours", "ours again", "absent"], least=1e9, must=0.0)
    found.judge_best("mfu", ["ours"], must=0.5)  # unknown on a CPU
    rows = [json.loads(line) for line in (bench.out / "rows.jsonl").read_text().splitlines()]
    assert [row.get("same_work") for row in rows] == [True, True, False, True, None, None]
    assert bench.failed == ["wrong: losses differ by 0.05"]
    assert closed == [2.0, 2.01, 2.1, 2.0]
    assert all(row["tokens_per_s"] > 0 and row["losses"] for row in rows[:-2])
    assert rows[-2]["held"] == {"peer": True, "wrong": False} and rows[-2]["aim_held"] == {"peer": False}
    assert rows[-2]["aa"] == pytest.approx(found.ms["ours again"] / found.ms["ours"], abs=1e-4)
    assert rows[-1]["value"] == min(found.ms["ours"], found.ms["ours again"])
    assert rows[-1]["held"] == {"least": True, "must": False}


def test_a_row_beside_the_plan_can_be_planned_again_by_a_calibration(bench, work):
    engine = engine_of(bench, 1)
    figures = {"ms": {"median": 8.0}, "peak_allocated_bytes": 10**6}
    found = beside_plan(bench, work, engine, figures)
    assert found["memory_held"] == (abs(10**6 / found["planned_allocated_bytes"] - 1) <= 0.1)
    assert found["time_error"] == pytest.approx(8.0 / found["planned_ms"] - 1, abs=1e-4)
    bench.write("ours", work.shape, **figures, **found)
    bench.write("a row without a plan", {}, **figures)
    rows = read_rows([bench.out / "rows.jsonl", bench.out / "absent.jsonl"])
    assert len(rows) == 1
    plain = CONSTANTS.shares["cpu"]
    # A device that reaches all that the constants say, and whose steps take twice their kernels' time.
    calibration = Calibration(
        gpu="cpu",
        device="cpu",
        host="here",
        measured="now",
        versions={},
        products=plain.products,
        half_width=plain.half_width,
        attention=plain.flash,
        memory_share=CONSTANTS.memory_share,
        link_share=None,
        network_share=None,
        efficiency=0.5,
        overhead_bytes=0,
        group_bytes=None,
        memory_bytes=2**30,
    )
    rows[0]["ms"]["median"] = 1.9 * found["planned_ms"]
    compared = compare_plans(rows, calibration)
    assert compared["each"]["arm: ours"]["before"] == pytest.approx(found["planned_ms"], abs=1e-3)
    assert compared["each"]["arm: ours"]["after"] == pytest.approx(2 * found["planned_ms"], rel=1e-3)
    assert compared["value"]["before"]["largest"] == pytest.approx(1 - 1 / 1.9, abs=1e-3)
    assert compared["held"] == {"before": False, "after": True}


@pytest.mark.parametrize(
    ("arm", "option"), [(characters, "--tinyshakespeare"), (translation, "--multi30k"), (race, "--nanogpt")]
)
def test_a_published_result_without_its_text_is_a_row_that_names_the_option(bench, arm, option):
    bench.rehearse = False
    with mock.patch.object(Bench, "free"):  # it would ask for a GPU
        arm(bench)
    (row,) = (json.loads(line) for line in (bench.out / "rows.jsonl").read_text().splitlines())
    assert row["refused"].startswith("skipped: ") and option in row["refused"]
    assert bench.failed == []


def test_the_lists_of_the_document_are_short_and_say_how_long_they_take():
    """A lent machine allows ten minutes a command, of which one is for what must be installed."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    lists = re.findall(r"^    python -m benchmarks\.gpu --only (.+?) +# (\d+) s$", text, re.MULTILINE)
    assert lists
    groups: list[str] = []
    for command, seconds in lists:
        words = [option.split() for option in command.split(" --")]
        options = {name: values for name, *values in words[1:]}
        arms = {name: ARMS[name].expected_s for name in words[0]}
        if "ranks" in arms:
            groups += options["groups"]
            arms["ranks"] = sum(GROUPS[group] for group in options["groups"])
        assert sum(arms.values()) == int(seconds) <= 540
        needed = {"profile": "nanogpt", "characters": "tinyshakespeare", "translation": "multi30k"}
        assert {needed[name] for name in arms if name in needed} <= options.keys()
    assert len(set(groups)) == len(groups)
    assert all(0 < arm.expected_s <= arm.limit_s for arm in ARMS.values())
    # A race of a quarter of an hour fits no such command, and is started apart from it.
    assert [name for name, arm in ARMS.items() if arm.limit_s > 600] == ["race"]


def test_the_rows_of_a_step_are_the_same_in_any_micro_batch(work):
    (once,) = random_steps(Work(work.model, 32, 8), torch.device("cpu"))
    (twice,) = random_steps(work, torch.device("cpu"))
    assert torch.equal(once.batches[0].tokens_BT, torch.cat([batch.tokens_BT for batch in twice.batches]))
    assert sum(once.num_targets) == sum(twice.num_targets) == 8 * 32


def test_documents_of_a_row_have_positions_of_their_own(work):
    (step,) = random_steps(work, torch.device("cpu"))
    batch = with_documents(step).batches[0]
    assert batch.documents_BT[0].unique(return_counts=True)[1].tolist() == [4, 12, 8, 8]
    assert batch.positions_BT[0].tolist() == [*range(4), *range(12), *range(8), *range(8)]


def test_packed_and_padded_texts_have_the_same_targets():
    lengths = np.array([5, 8, 3, 4, 2])
    texts = [torch.arange(size) + 10 * number for number, size in enumerate(lengths)]
    chosen = [torch.arange(size) % 2 == 0 for size in lengths]
    padded, packed = pad_rows(texts, chosen, 8), pack_rows(texts, chosen, lengths, 8)
    targets = [batch.targets_BT[batch.targets_BT != IGNORE_INDEX].sort().values for batch in (padded, packed)]
    assert torch.equal(*targets) and len(packed.tokens_BT) == 3
    assert torch.equal(packed.targets_BT.flatten()[packed.target_positions_P].sort().values, targets[1])
    real = packed.documents_BT >= 0
    assert int(real.sum()) == lengths.sum()
    assert torch.equal(packed.positions_BT[real], packed.tokens_BT[real] % 10)


def test_what_is_carried_is_what_the_lock_has():
    locked = _locked_versions()
    unlocked = {name for name in (*BUILT, *DOWNLOADED) if name not in locked}
    assert unlocked == {"cut-cross-entropy", "liger-kernel"}
    assert f"deepspeed=={locked['deepspeed']}" in (ROOT / ".ci/constraints.txt").read_text()

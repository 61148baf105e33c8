"""`pretrain doctor` as it is run: quickly on a node, over ranks, as a test of training, and to calibrate plan."""

import json
import os
import re
import socket
import subprocess
import sys

import numpy
import pytest

from pretrain import cli
from pretrain.checkpoint.format import list_checkpoints
from pretrain.doctor.check import Check, Report
from pretrain.doctor.selftest import compare_gradients
from pretrain.plan.cluster import load_calibration
from tests.helpers.cli import run_cli
from tests.helpers.ranks import run_in_ranks
from tests.helpers.runs import SOURCE_PATH
from tests.helpers.waiting import LIMIT_S


def test_the_quick_look_is_a_line_of_json_without_torch(make_run, tmp_path):
    program = "import sys; from pretrain import cli; code = cli.run(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    arguments = ["doctor", "--quick", "--json", str(make_run.config()), "--ranks", "2"]
    environment = {**os.environ, "PYTHONPATH": SOURCE_PATH}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    line, ending = done.stdout.splitlines()
    assert ending == "0 False", done.stdout + done.stderr
    facts = json.loads(line)
    assert facts["host"] == socket.gethostname()
    assert {"atomic rename", "exclusive link", "room", "batch", "data", "hostname"} <= {
        c["name"] for c in facts["checks"]
    }
    assert facts["versions"]["numpy"] == numpy.__version__
    assert "fail" not in {check["status"] for check in facts["checks"]}


def test_a_table_names_what_fails_with_its_fix_and_the_exit_code_is_its(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run(["doctor", "--quick", "configs/run/quickstart.yaml", "--ranks", "3"]) == 64
    out = capsys.readouterr().out
    assert re.search(r"fail +batch +batch\.global_tokens=2048 must be a multiple", out)
    assert re.search(r"fail +data +data/stdlib: no such shard folder", out)
    assert re.search(
        r"fix: run `pretrain prepare` with --output data/stdlib .*or correct the path \(data\.path\)", out, re.DOTALL
    )
    assert out.splitlines()[-1].endswith("2 fail")


def test_what_nodes_have_printed_is_compared(tmp_path, capsys):
    good = Check("fsync", "pass", "3 ms")
    bad = Check("room", "fail", "1 GiB free", "free space", 74)
    reports = [Report("n1", [good], {"torch": "2.9.0"}), Report("n2", [good, bad], {"torch": "2.8.0"})]
    (tmp_path / "nodes").write_text("".join(json.dumps(report.facts()) + "\n" for report in reports))
    assert cli.run(["doctor", "--compare", str(tmp_path / "nodes"), "--json"]) == 74
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["room"]["detail"] == "n2: 1 GiB free"
    assert checks["same versions"]["detail"] == "torch is 2.9.0 on n1, 2.8.0 on n2"
    (tmp_path / "nodes").write_text("srun: error\n")
    assert cli.run(["doctor", "--compare", str(tmp_path / "nodes")]) == 64
    assert "nodes: contains no report of a node; collect the output" in capsys.readouterr().err
    assert cli.run(["doctor", "--compare", str(tmp_path / "none")]) == 64
    assert "none: cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--selftest", "--calibrate"])
def test_what_needs_a_config_says_so(option, capsys):
    assert cli.run(["doctor", option]) == 64
    assert f"{option} needs a CONFIG" in capsys.readouterr().err


def test_a_device_that_is_not_known_is_refused_before_it_is_measured(make_run, capsys):
    assert cli.run(["doctor", str(make_run.config()), "--calibrate", "--gpu", "h10"]) == 64
    assert "--gpu: unknown GPU 'h10'; use h100" in capsys.readouterr().err


def test_ranks_meet_and_see_the_same_folder(tmp_path):
    """Real ranks over gloo, forked from a process that has imported torch."""
    for found in run_in_ranks("tests.integration.doctor_workers:look", 2, {"folders": [str(tmp_path / "run")] * 2}):
        assert {check["name"]: check["status"] for check in found} == dict.fromkeys(
            ["torch", "rendezvous", "same versions", "shared folder", "all-reduce"], "pass"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_sees_another_folder_is_named(tmp_path):
    places = [tmp_path / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
    arguments = {"folders": [str(place) for place in places], "waits": False}
    for checks in run_in_ranks("tests.integration.doctor_workers:look", 2, arguments):
        (seen,) = [check for check in checks if check["name"] == "shared folder"]
        assert (seen["status"], seen["exit_code"]) == ("fail", 74)
        assert seen["detail"].endswith(f"does not see in {places[1]} what rank 0 made in {places[0]}")


def test_a_rank_with_another_package_is_named_by_every_rank():
    """Fault 28. The package is one that Python finds on one rank only."""
    said = run_in_ranks("tests.integration.doctor_workers:agree", 2, {"packages": {"numpy": "1.0.999"}})
    for line, code in said:
        assert code == "69"
        here = re.escape(socket.gethostname())
        assert re.search(rf"numpy is {re.escape(numpy.__version__)} on {here}, 1\.0\.999 on n2", line)
        assert line.endswith("install the same packages on every node, or one environment on a shared file system")


def test_a_rank_with_another_wandb_trains():
    assert run_in_ranks("tests.integration.doctor_workers:agree", 2, {"packages": {"wandb": "0.0.1"}}) == [[], []]


@pytest.mark.long
def test_the_whole_examination_starts_its_own_ranks(make_run, tmp_path):
    done = run_cli("doctor", str(make_run.config()), "--ranks", "2", "--json", cwd=tmp_path)
    assert done.code == 0, done.stdout + done.stderr
    names = [check["name"] for check in json.loads(done.stdout)["checks"]]
    assert names[-4:] == ["rendezvous", "same versions", "shared folder", "all-reduce"]


def test_gradients_of_compiled_blocks_are_those_of_plain_ones_or_it_fails(make_run):
    """The moments of real first steps. Of a parameter whose gradient is 0, rounding is compared with that of others."""
    for name, seed in (("plain", 1), ("again", 1), ("other", 2)):
        make_run.train(name, "train.stop_after=1", f"seed={seed}", "engine.precision=fp32", ranks=1)
    plain, again, other = (
        list_checkpoints(make_run.folder(name).checkpoints)[-1] for name in ("plain", "again", "other")
    )
    assert compare_gradients(plain, again).status == "pass"
    found = compare_gradients(plain, other)
    assert (found.status, found.exit_code) == ("fail", 77)
    assert re.search(r"gradients of \d+ parameters within \S+ of those of plain blocks \(\S+weight\)", found.detail)


@pytest.mark.long
def test_the_selftest_compares_compiled_blocks_with_plain_ones(make_run, tmp_path):
    """On a CPU, with dropout, of which compiled blocks draw other numbers."""
    options = ("engine.compile=true", "model.decoder.dropout=0.1", "--selftest", "--ranks", "1", "--json")
    done = run_cli("doctor", str(make_run.config()), *options, cwd=tmp_path, timeout=None)
    assert done.code == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["compiled blocks"]["status"] == "pass"


@pytest.mark.long
def test_the_selftest_passes_on_two_ranks_and_leaves_nothing(make_run, tmp_path):
    """Four stages and a drill, ten starts of two ranks: 90 s of CPU."""
    options = ("--selftest", "--ranks", "2", "--json")
    done = run_cli("doctor", str(make_run.config()), *options, cwd=tmp_path, timeout=None)
    assert done.code == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert list(checks) == [*(f"stage {stage}" for stage in range(4)), "stages agree", "kill and resume"]
    assert "equal in bits" in checks["kill and resume"]["detail"]
    assert not list((tmp_path / "runs").glob(".doctor*"))


@pytest.mark.long
def test_the_selftest_of_a_job_kills_a_rank_and_resumes(make_run, tmp_path):
    """Two ranks as torchrun or srun starts them, a node each: seven starts of both."""
    results = run_in_ranks(
        "tests.integration.doctor_workers:selftest", 2, {"config": str(make_run.config())}, timeout=None
    )
    checks = {check["name"]: check for check in results[0]}
    assert {check["status"] for check in checks.values()} <= {"pass", "warn"}
    assert re.search(
        r"rank 1 killed at step \d+, 24 steps; the ledgers are equal in bits", checks["kill and resume"]["detail"]
    )


@pytest.mark.long
def test_a_cpu_is_calibrated_and_plan_reads_it(make_run, tmp_path):
    config, file = str(make_run.config()), tmp_path / "cpu.json"
    engine = "engine={kind: single, zero_stage: 0}"
    options = ("--calibrate", "--ranks", "1", "--output", str(file))
    done = run_cli("doctor", config, engine, *options, cwd=tmp_path, timeout=None)
    assert done.code == 0, done.stdout + done.stderr
    found = load_calibration(file)
    assert found.gpu == "cpu" and found.passes >= 1 and found.memory_bytes > 2**28
    assert found.update_share > 0 and found.launch_s is None and found.efficiency == 1
    planned = run_cli("plan", config, engine, "--calibration", str(file), "--json", cwd=tmp_path)
    assert json.loads(planned.stdout)["calibration"]["measured"] == found.measured


@pytest.mark.gpu
def test_a_gpu_is_measured_and_reaches_a_share_of_its_data_sheet():
    """For a GPU that nobody else uses: the memory of a context is what the device lacks."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from pretrain.doctor.calibrate import build_calibration
    from pretrain.doctor.spawn import run_ranks

    shape = {"device": "cuda", "precision": "bf16", "heads": 16, "head_width": 128, "seq_len": 4096, "causal": True}
    found = build_calibration(run_ranks("pretrain.doctor.calibrate:measure", 1, {"shape": shape}, 300), None)
    assert 0.2 < found.products < 1.1
    assert 0.3 < found.memory_share < 1.1
    assert 0.1 < found.attention < 1.5  # half of the pairs are hidden, and counted
    assert 100 * 2**20 < found.overhead_bytes < 4 * 2**30

"""A run that was stopped, killed or torn goes on as if nothing had happened: same digests and losses, bit for bit."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import s3fs

from pretrain.checkpoint.format import list_checkpoints
from pretrain.errors import EXIT_LOCKED, EXIT_RESUME_ME, EXIT_UNAVAILABLE
from pretrain.run.stop import SAME_REQUEST_S
from pretrain.tracking.audit import read_audit
from pretrain.utils.net import reserved_port
from tests.helpers.cli import run_light
from tests.helpers.fork_server import SOURCE_PATH
from tests.helpers.holds import HELD, Hold
from tests.helpers.lying import serve_lies
from tests.helpers.runs import RunMaker, assert_same_run, kill_rank
from tests.helpers.servers import serve_s3
from tests.helpers.waiting import finish, pass_time, wait_until

STEPS = 160
# Hangs in the save of step 40, and notes that, and that a stop was asked for.
SLOW_SAVE = """
import os
from pathlib import Path
from pretrain.run.stop import StopFlag
from pretrain.utils.io import set_fault_hook
from tests.helpers.waiting import hang

HANDLE = StopFlag._handle

def note(what):
    Path(os.environ["NOTES"], what + "-" + os.environ["RANK"]).touch()

def handle(flag, number):
    HANDLE(flag, number)
    note("asked")

def hook(operation, path):
    if ".tmp-step-00000040" in str(path):
        note("saving")
        hang()

StopFlag._handle = handle
set_fault_hook(hook)
"""


def assert_uninterrupted(make_run: RunMaker, name: str) -> None:
    """The ledger, the final weights and the steps of the metrics equal those of a run that nobody interrupted."""
    assert_same_run(make_run, name, "golden", STEPS)
    rows = [json.loads(line) for line in make_run.folder(name).metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(10, STEPS + 1, 10)), "each row once"
    saves = [row["checkpoint_step"] for row in rows if "checkpoint_step" in row]
    assert saves == sorted(set(saves)), "and what a save cost at most once: a kill may lose it"
    assert len(saves) == sum("loss" not in row for row in rows), "there are no others"


@pytest.fixture(scope="module")
def golden(tmp_path_factory, corpus):
    """An uninterrupted run, and a maker of others beside it."""
    maker = RunMaker(tmp_path_factory.mktemp("resume"), corpus)
    maker.train("golden")
    return maker


@pytest.mark.long
def test_a_run_that_is_stopped_again_and_again_continues_bit_for_bit(golden, tmp_path):
    stopped_at = 0
    for number, step in ((signal.SIGTERM, 33), (signal.SIGUSR1, 75), (signal.SIGINT, 104)):
        process = golden.start("stopped", HELD, **Hold(tmp_path, "stopped", step=step + 10).environment)
        golden.wait_for_step("stopped", step, process)
        process.send_signal(number)
        output = finish(process)[0]
        assert process.returncode == EXIT_RESUME_ME, output
        if stopped_at:
            assert f"at step {stopped_at} of {STEPS}: DeepSpeed ZeRO-2" in output
        stopped_at = read_audit(golden.folder("stopped").audit)[-1].step
        assert f"stopped by {number.name} at step {stopped_at}" in output
        saved = list_checkpoints(golden.folder("stopped").checkpoints)[-1]
        assert saved.name == f"step-{stopped_at:08d}", "not a step is lost"
    golden.complete("stopped")
    assert_uninterrupted(golden, "stopped")
    attempts = json.loads(golden.folder("stopped").record.read_text())["attempts"]
    assert [attempt["exit_code"] for attempt in attempts] == [EXIT_RESUME_ME] * 3 + [0]


@pytest.mark.long
def test_a_run_whose_rank_was_killed_continues_bit_for_bit(golden, tmp_path):
    for rank, step in ((1, 30), (0, 90)):
        process = golden.start("killed", HELD, **Hold(tmp_path, "killed", step=step + 20).environment)
        golden.wait_for_step("killed", step, process)
        kill_rank(process, rank)
        output = finish(process)[0]
        assert process.returncode == 128 + signal.SIGKILL, output
        assert re.search(rf"rank {rank} on \S+ was killed by SIGKILL", output)
    golden.complete("killed")
    assert_uninterrupted(golden, "killed")


@pytest.mark.long
def test_a_run_killed_in_the_middle_of_a_save_continues_bit_for_bit(golden, tmp_path):
    # A user module, named under `extend`, that kills one rank at one write operation of the third save.
    (tmp_path / "kill_in_save.py").write_text(
        "import os, signal\n"
        "from pretrain.utils.io import set_fault_hook\n"
        "def hook(operation, path):\n"
        "    if 'step-00000060' in str(path) and operation == os.environ['KILL_AT'] "
        "and os.environ['RANK'] == os.environ['KILL_RANK']:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "set_fault_hook(hook)\n"
    )
    for operation, rank in (("write", "1"), ("rename", "0")):
        output = golden.complete(
            "torn",
            "extend=[kill_in_save]",
            expect=128 + signal.SIGKILL,
            PYTHONPATH=str(tmp_path),
            KILL_AT=operation,
            KILL_RANK=rank,
        )
        assert re.search(rf"rank {rank} on \S+ was killed by SIGKILL", output)
        names = [path.name for path in list_checkpoints(golden.folder("torn").checkpoints)]
        assert names == ["step-00000020", "step-00000040"]
    golden.complete("torn")
    assert_uninterrupted(golden, "torn")


@pytest.mark.long
def test_a_run_killed_while_it_begins_has_a_whole_tokenizer_afterwards(golden, corpus, tmp_path):
    (tmp_path / "kill_at_begin.py").write_text(
        "import os, signal\n"
        "from pretrain.utils.io import set_fault_hook\n"
        "def hook(operation, path):\n"
        "    if 'begun' in str(path) and path.name.startswith('tokenizer.json') and operation == 'fsync':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "set_fault_hook(hook)\n"
    )
    alone = ("engine={kind: single, zero_stage: 0}", "train.stop_after=1")
    killed = 128 + signal.SIGKILL
    golden.complete("begun", *alone, "extend=[kill_at_begin]", ranks=1, expect=killed, PYTHONPATH=str(tmp_path))
    assert not golden.folder("begun").tokenizer.exists()
    assert [path.name.partition("-")[0] for path in golden.folder("begun").path.glob("*.tmp-*")] == [
        "tokenizer.json.tmp"
    ]
    golden.complete("begun", *alone, ranks=1)
    assert not list(golden.folder("begun").path.glob("*.tmp-*"))
    assert golden.folder("begun").tokenizer.read_bytes() == (corpus / "tokenizer.json").read_bytes()


@pytest.mark.long
def test_a_second_signal_stops_at_once_and_the_last_commit_stays(golden, tmp_path):
    # Saving hangs, as on a dead file system: the first signal cannot finish, the second one need not.
    (tmp_path / "slow_save.py").write_text(SLOW_SAVE)
    process = golden.start("second", "extend=[slow_save]", PYTHONPATH=str(tmp_path), NOTES=str(tmp_path))
    for what in ("saving", "asked"):
        if what == "asked":
            process.send_signal(signal.SIGTERM)
        told = [tmp_path / f"{what}-{rank}" for rank in (0, 1)]
        wait_until(lambda told=told: all(path.exists() for path in told), what, process)
    pass_time(2 * SAME_REQUEST_S)  # nearer ones are one request
    assert process.poll() is None, "the save should still be hanging"
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert process.returncode == 128 + signal.SIGTERM
    assert [path.name for path in list_checkpoints(golden.folder("second").checkpoints)] == ["step-00000020"]


@pytest.mark.long
def test_another_world_size_sees_the_same_samples(golden):
    golden.train("three", "train.stop_after=40", ranks=3)
    ours, reference = (read_audit(golden.folder(name).audit) for name in ("three", "golden"))
    assert [(row.digest, row.tokens) for row in ours] == [(row.digest, row.tokens) for row in reference[:40]]


@pytest.mark.long
def test_zero_3_with_recomputed_blocks_and_validation_trains_the_same(golden):
    output = golden.train(
        "zero3",
        "train.stop_after=12",
        "engine={zero_stage: 3, activation_checkpointing: full}",
        "eval={every_steps: 6, max_tokens: 2000}",
    )
    assert len(re.findall(r"step +\d+/\d+ +val_loss", output)) == 2
    ours, reference = (read_audit(golden.folder(name).audit) for name in ("zero3", "golden"))
    assert len(ours) == 12
    for row, expected in zip(ours, reference, strict=False):
        assert row.digest == expected.digest
        # Dropout draws the same noise; ZeRO 3 adds gradients in another order.
        assert float.fromhex(row.loss) == pytest.approx(float.fromhex(expected.loss), rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "PORT"],
        ["-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2", "--main_process_port", "PORT"],
        ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "PORT"],
    ],
    ids=["torchrun", "accelerate", "deepspeed"],
)
def test_every_launcher_trains_the_same(golden, launcher):
    name = launcher[1].split(".")[0]
    module = "--module" if name == "deepspeed" else "-m"
    with reserved_port(None) as port:
        items = [str(port) if item == "PORT" else item for item in launcher]
        command = [sys.executable, *items, module, "pretrain", "train"]
        golden.complete(name, "train.stop_after=20", launcher=command, DS_ACCELERATOR="cpu")
    ours, reference = (read_audit(golden.folder(folder).audit) for folder in (name, "golden"))
    assert [(r.digest, r.loss, r.grad_norm) for r in ours] == [(r.digest, r.loss, r.grad_norm) for r in reference[:20]]


@pytest.mark.long
def test_two_machines_that_are_started_each_by_its_command_are_stopped_and_continue_bit_for_bit(golden, tmp_path):
    def start(port: int, node: int, *hold: str, **env: str):
        place = ["--nodes", "2", "--node-rank", str(node), "--address", "127.0.0.1", "--port", str(port)]
        command = [sys.executable, "-m", "pretrain", "launch", "local", "--ranks", "1", *place]
        return golden.start("machines", *hold, launcher=command, **env)

    with reserved_port(None) as port:
        hold = Hold(tmp_path, "machines", step=60).environment
        machines = [start(port, node, HELD, **hold) for node in (1, 0)]
        golden.wait_for_step("machines", 33, machines[1])
        for machine in machines:
            machine.send_signal(signal.SIGTERM)
        outputs = [finish(machine)[0] for machine in machines]
        assert [machine.returncode for machine in machines] == [EXIT_RESUME_ME] * 2, outputs
        assert "starting 1 rank of" in outputs[0] and "machine 1 of 2" in outputs[0]
    with reserved_port(None) as port:
        machines = [start(port, node) for node in (1, 0)]
        outputs = [finish(machine)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert_uninterrupted(golden, "machines")


@pytest.mark.long
def test_a_component_of_torchx_starts_two_machines_that_train_the_same(golden, tmp_path):
    client = tmp_path / "torchx"
    subprocess.run([sys.executable, "-m", "venv", client], check=True)  # torchx wants an older urllib3 than s3fs
    subprocess.run([client / "bin/pip", "install", "--quiet", "torchx==0.7.0"], check=True)
    options = ("--to", "torchx", "--nodes", "2", "--ranks-per-node", "1", "--gpus-per-node", "0")
    place = ("--python", sys.executable, "--volume", f"shared:{tmp_path}")
    config = str(golden.config("torchx"))
    written = run_light("launch", "manifest", config, "train.stop_after=20", *options, *place, cwd=tmp_path)
    assert written.code == 0, written.stderr
    run = [client / "bin/torchx", "run", "--workspace", "", "--scheduler", "local_cwd"]
    with reserved_port(None) as port:
        (tmp_path / "run.py").write_text(written.stdout.replace("--port 29500", f"--port {port}"))
        process = subprocess.Popen(
            [*run, "--wait", "run.py:train"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE_PATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output, _ = finish(process)
    assert process.returncode == 0, output
    assert "SUCCEEDED" in output
    ours, reference = (read_audit(golden.folder(folder).audit) for folder in ("torchx", "golden"))
    assert len(ours) == 20
    assert [(r.digest, r.loss, r.grad_norm) for r in ours] == [(r.digest, r.loss, r.grad_norm) for r in reference[:20]]


@pytest.mark.long
def test_a_run_whose_machine_is_lost_continues_from_the_bucket_bit_for_bit(golden, tmp_path):
    upload = "checkpoint.upload=s3://lab/runs"
    (tmp_path / "empty").mkdir()
    with serve_s3({"lab": tmp_path / "empty"}):
        files = s3fs.S3FileSystem(use_listings_cache=False)
        process = golden.start("lost", HELD, upload, **Hold(tmp_path, "lost", step=90).environment)

        def is_uploaded() -> bool:  # not each step is: those between two uploads are left out
            return any(f"step-000000{step}/manifest.json" in name for name in files.find("lab") for step in (60, 80))

        wait_until(is_uploaded, "step 60 or 80 is uploaded", process, pause_s=1)
        process.kill()
        finish(process)
        shutil.rmtree(golden.folder("lost").path)
        hold = Hold(tmp_path, "again", step=150)
        job = golden.start_warm("lost", HELD, upload, **hold.environment)
        wait_until(lambda: "uploaded step-" in job.output(), "a step is uploaded", job.is_running, pause_s=0.1)
        hold.release()
        assert job.end() == 0
        output = job.output()
        found = {name.split("/")[3] for name in files.find("lab/runs") if name.endswith("manifest.json")}
    step = int(re.search(r"fetched step (\d+) from s3://lab/runs/run", output)[1])
    assert step >= 60 and f"at step {step} of {STEPS}: DeepSpeed ZeRO-2" in output
    # Where one takes longer than the steps to the next save, that in between is left out.
    assert len(found) == 2 and max(found) == "step-00000160"
    assert_same_run(golden, "lost", "golden", STEPS)
    rows = [json.loads(line) for line in golden.folder("lost").metrics.read_text().splitlines()]
    assert any("checkpoint_upload_s" in row for row in rows)


@pytest.mark.long
def test_a_second_launcher_of_a_run_in_a_bucket_is_refused_and_costs_nothing(golden, tmp_path):
    """Before the first one has saved, and after it; each has a run folder of its own, as on two machines."""
    upload = "checkpoint.upload=s3://lab/two"
    (tmp_path / "empty").mkdir()
    with serve_s3({"lab": tmp_path / "empty"}):
        files = s3fs.S3FileSystem(use_listings_cache=False)
        for step, there in ((10, "owner.json"), (30, "step-00000020/manifest.json")):
            hold = Hold(tmp_path, f"held-{step}", step=step)
            first = golden.start(f"first-{step}", HELD, upload, **hold.environment)
            wait_until(lambda there=there: files.exists(f"lab/two/run/{there}"), f"{there} is there", first, pause_s=1)
            output = golden.train("elsewhere", upload, expect=EXIT_LOCKED)
            assert re.search(r"s3://lab/two/run: in use by process \d+ on .*; wait for it, stop it, or give", output)
            if step == 10:  # an attempt on another machine takes the folder
                owner = json.loads(files.cat_file("lab/two/run/owner.json"))
                files.pipe_file("lab/two/run/owner.json", json.dumps(owner | {"attempt": "another"}).encode())
            hold.release()
            output, _ = finish(first)
            if step == 10:
                assert first.returncode == EXIT_LOCKED, output
                assert re.search("s3://lab/two/run: another attempt of the run, on .*, writes there since then", output)
            before = {name for name in files.find("lab/two") if name.endswith("manifest.json")}
        assert first.returncode == 0
        assert max(before).split("/")[3] == f"step-{STEPS:08d}" and len(before) == 2
        assert "is complete" in golden.train("elsewhere", upload)
        assert {name for name in files.find("lab/two") if name.endswith("manifest.json")} == before
    assert_same_run(golden, "elsewhere", "golden", STEPS)


@pytest.mark.long
def test_a_finished_run_does_not_start_over_because_of_a_page_in_place_of_the_listing(golden, tmp_path):
    steps = ("checkpoint.upload=s3://lab/page", "checkpoint.every_steps=4", "train.steps=8")
    (tmp_path / "empty").mkdir()
    with serve_s3({"lab": tmp_path / "empty"}), serve_lies() as lying:
        files = s3fs.S3FileSystem(use_listings_cache=False)
        golden.train("page", *steps, ranks=1)

        def found() -> dict[str, bytes]:
            return {name: files.cat_file(name) for name in files.find("lab/page/run") if "/step-" in name}

        before = found()
        for kind in ("html", "empty list"):
            shutil.rmtree(golden.folder("page").path)
            lying.lie = lambda request, kind=kind: kind if request.is_list else None
            output = golden.train("page", *steps, ranks=1, expect=EXIT_UNAVAILABLE)
            assert "owner.json names step 8, and the listing has no checkpoint; start again" in output
            assert not golden.folder("page").audit.exists()
        lying.lie = lambda request: None
        assert "is complete" in golden.train("page", *steps, ranks=1)
        assert found() == before


def test_two_attempts_with_dropout_of_attention_weights_alone_equal_one(tmp_path, corpus):
    runs = RunMaker(tmp_path, corpus)
    alone = [
        *("engine.kind=single", "engine.zero_stage=0", "train.steps=6", "checkpoint.every_steps=2"),
        *("model.decoder.dropout=0", "model.decoder.attention_dropout=0.3"),
    ]
    runs.train("one", *alone, ranks=1)
    runs.train("two", *alone, "train.stop_after=3", ranks=1)
    runs.train("two", *alone, ranks=1)
    assert_same_run(runs, "two", "one", 6)
    assert {row.attempt for row in read_audit(runs.folder("two").audit)} == {1, 2}
    runs.train("without", *alone, "model.decoder.attention_dropout=0", "train.stop_after=1", ranks=1)
    first, without = (read_audit(runs.folder(name).audit)[0] for name in ("one", "without"))
    assert first.digest == without.digest and first.loss != without.loss, "the same samples, and noise"

"""Runs that are submitted to a real Slurm: what they compute, where they meet, and what nobody gets to see.

Seconds were measured on two cores beside other work, at a load of 13: nearly all of them go to importing torch.
"""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pretrain import cli
from pretrain.run.folder import RunDir
from pretrain.tracking.audit import read_audit
from pretrain_launch.rendezvous import ports_of
from tests.helpers.hostile_names import hostile_names
from tests.helpers.runs import assert_same_folders
from tests.helpers.slurm_runs import SITE, STEPS, SlurmRun, on_two_ranks

SECRETS = {
    name: f"canary{number}" * 5 for number, name in enumerate(("WANDB_API_KEY", "HF_TOKEN", "MY_LAB_SECRET", "OTHER"))
}


def samples_of(folder: RunDir) -> list[tuple[int, str]]:
    """Step and digest of its samples, of every step."""
    return [(row.step, row.digest) for row in read_audit(folder.audit)]


def test_two_nodes_train_what_two_local_ranks_do_and_nobody_is_told_a_secret(lab, make_job, golden):
    """37 s. The doctor looks at both. Secrets reach the ranks in their environment, and are nowhere else."""
    template = on_two_ranks(2)
    lab.env.update(SECRETS)
    job = make_job(lab, template=template)
    site = SITE.replace("[RES_OPTIONS]", "[RES_OPTIONS, MY_LAB_SECRET]").replace("doctor: false", "doctor: true")
    (job.folder.path.parents[1] / "site.yaml").write_text(f"{site}sbatch: [--hold]\n")
    job.hold(25)
    number = job.submit("--nodes", "2")
    lab.run("scontrol", "release", str(number))  # else it might begin before its submission is noted
    job.wait_held(25)
    reports = [json.loads(line) for line in (job.folder.launch / "doctor.jsonl").read_text().splitlines()]
    assert len(reports) == 2 and all(report["checks"] for report in reports)
    assert not lab.has_own_hosts or {report["host"] for report in reports} == {"n1", "n2"}
    ranks = job.processes("-m pretrain train")
    assert len(ranks) == 2
    for pid in ranks:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert all(SECRETS[name].encode() in environment for name in ("WANDB_API_KEY", "HF_TOKEN", "MY_LAB_SECRET"))
        assert SECRETS["OTHER"].encode() not in environment  # no name of it was given
    seen = [lab.run("scontrol", "show", "job", "-dd", str(number)), lab.run("ps", "-eo", "args", "-ww")]
    seen.append(lab.run("scontrol", "write", "batch_script", str(number), "-"))
    assert seen[2].startswith(Path("slurm/train.sbatch.tmpl").read_text())
    job.release(25)
    job.wait_end()
    assert_same_folders(job.folder, golden(template), STEPS)
    attempt = job.attempts()[-1]
    assert attempt["slurm"] == {"job": str(number), "array": None, "restart": 0, "nodes": "n[1-2]", "num_nodes": 2}
    assert (attempt["exit_code"], attempt["reason"]) == (0, "done")
    assert [row["event"] for row in job.journal()] == ["submit", "start", "end"]
    assert job.journal("start")[0]["nodes"] == ["n1", "n2"]
    assert (job.journal("end")[0]["exit_code"], job.journal("end")[0]["step"]) == (0, STEPS)
    files = [path.read_bytes() for path in job.folder.path.rglob("*") if path.is_file()]
    texts = [*files, *(text.encode() for text in seen), *(path.read_bytes() for path in (lab.folder / "log").iterdir())]
    assert not any(secret.encode() in text for text in texts for secret in SECRETS.values())


def test_an_elastic_run_goes_on_with_one_node_when_the_other_is_drained(lab, make_job, golden):
    """23 s. The same samples each step, on two ranks and then on one."""
    template = on_two_ranks(None)
    job = make_job(lab, template=template)
    job.hold(25)
    number = job.submit("--nodes", "2", "--mode", "srun", "launch.elastic=true")
    job.wait_held(25)
    lab.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    lab.run("scancel", "--batch", "--signal=USR1", str(number))
    job.wait_told("asked to stop by SIGUSR1")
    job.wait_asked(25)
    job.release(25)
    job.wait_restart(1)
    job.wait_end()
    assert [row["nodes"] for row in job.journal("start")] == [["n1", "n2"], ["n1"]]
    assert [row["world_size"] for row in job.journal("start")] == [2, 1]
    assert [row["decision"] for row in job.journal("end")] == ["requeue", "end"]
    assert samples_of(job.folder) == samples_of(golden(template))


def test_nodes_meet_over_ipv6_alone_and_at_another_port_where_the_first_is_in_use(lab, make_job):
    """15 s. And a network that one node is not part of is named, with both, within a minute."""
    if not lab.has_own_hosts:
        pytest.skip("nodes have no networks of their own here")
    for number in (1, 2):
        add = (
            f"ip link add link eth0 name six type macvlan mode bridge && ip -6 addr add fd00::{number}/64 dev six nodad"
        )
        lab.on_node(f"n{number}", "sh", "-c", f"{add} && ip link set six up")
    lab.on_node("n1", "sh", "-c", "ip link add link eth0 name iso type macvlan mode private")
    lab.on_node("n1", "sh", "-c", "ip addr add 10.9.9.1/24 dev iso && ip link set iso up")
    job = make_job(lab, template=on_two_ranks(None))
    site = job.folder.path.parents[1] / "site.yaml"
    site.write_text(f"{SITE}interface: six\nsbatch: [--hold]\n")
    first = job.submit("--nodes", "2", "--mode", "srun", "train.stop_after=5")
    port, other, *_ = ports_of(str(first), 0)
    listen = (
        f"import signal, socket; s = socket.create_server(('', {port})); print('ready', flush=True); signal.pause()"
    )
    command = ["slurm_node", "exec", "n1", sys.executable, "-c", listen]
    with subprocess.Popen(command, env=lab.env, stdout=subprocess.PIPE, text=True) as taken:
        try:
            assert taken.stdout is not None
            assert taken.stdout.readline() == "ready\n"
            lab.run("scontrol", "release", str(first))
            job.wait_end()
        finally:
            taken.kill()
    assert f"rendezvous at [fd00::1]:{other}\n" in job.output
    assert RunDir(job.folder.path).read_record()["attempts"][-1]["world_size"] == 2

    site.write_text(f"{SITE}interface: iso\n")
    lonely = SlurmRun(lab, job.folder.path.parents[1] / "runs.yaml", RunDir(job.folder.path.with_name("lonely")))
    lonely.submit("--nodes", "2", "run.name=lonely")
    lonely.wait_end("FAILED")
    assert re.search(r"rendezvous: n2 cannot reach n1 \(10\.9\.9\.1:\d+\): ", lonely.journal("end")[0]["reason"])
    assert (lonely.journal("end")[0]["exit_code"], lonely.journal("end")[0]["decision"]) == (69, "end")


def test_hostile_names_are_refused_before_slurm_hears_of_them(lab, make_job, tmp_path, monkeypatch, capsys):
    """11 s. Names of runs, partitions and clusters, and times; what is refused leaves no run folder."""
    job = make_job(lab)
    monkeypatch.chdir(job.folder.path.parents[1])
    for name, value in lab.env.items():
        monkeypatch.setenv(name, value)
    canary, config = tmp_path / "canary", str(job.folder.path.parents[1] / "runs.yaml")
    before = set(tmp_path.rglob("*"))
    for text in hostile_names(canary):
        for arguments in (
            [f"run.name={json.dumps(text)}"],
            ["--partition", text],
            ["--time", text],
            ["--cluster", f"x{text}"],
        ):
            code = cli.run(["launch", "slurm", config, "--nodes", "1", *arguments])
            assert code == 64, (arguments, capsys.readouterr())
    assert not canary.exists()
    assert set(tmp_path.rglob("*")) == before
    assert lab.run("squeue", "-h") == ""


def test_a_dry_run_prints_script_command_and_spec_and_submits_nothing(lab, make_job):
    """12 s. So does a refusal: a batch that three nodes do not divide, and what Slurm itself refuses."""
    job = make_job(lab)
    site = str(job.folder.path.parents[1] / "site.yaml")
    command = ("--extend", "held", "launch", "slurm", str(job.folder.path.parents[1] / "runs.yaml"), "--cluster", site)
    said = job.pretrain(*command, "--dry-run")
    script = Path("slurm/train.sbatch.tmpl").read_text()
    assert said.startswith(script)
    assert "$ sbatch --parsable --job-name=run --nodes=1 " in said
    assert f"{job.folder.path}/launch/spec.json:\n{{\n" in said
    assert re.search(r"; Slurm would start it at \S+ using 1 processors on nodes n1 in partition main\n", said), said
    assert not job.folder.path.exists()
    said = job.pretrain(*command, "--nodes", "3", "engine.kind=ddp", "engine.zero_stage=0", expect=64)
    assert "batch.global_tokens=256 must be a multiple of seq_len 32 x micro 2 x ranks 3 = 192; use " in said
    assert not job.folder.path.exists()
    for options in ((), ("--dry-run",)):
        said = job.pretrain(*command, "--partition", "nowhere", *options, expect=64)
        assert "error: sbatch: Slurm refuses the job: invalid partition specified: nowhere; the partitions are " in said
        said = job.pretrain(*command, "engine.device=auto", *options, expect=64)
        see = "" if options else "; see `--dry-run`"
        assert f"Invalid generic resource (gres) specification{see}; it requests GPUs (1 a node): none with" in said
    lab.drain("n1")
    lab.drain("n2")
    said = job.pretrain(*command, "--dry-run")  # the job would wait
    assert "as its nodes are now, Slurm would not start it: Requested node configuration is not available" in said
    assert lab.run("squeue", "-h") == ""


def test_of_two_commands_at_once_one_submits_and_a_job_in_the_queue_is_the_only_one(lab, make_job):
    """12 s. Two nodes are burnt for nothing else, and the loser's end would be told as the run's."""
    job = make_job(lab)
    site = job.folder.path.parents[1] / "site.yaml"
    site.write_text(f"{SITE}sbatch: [--hold]\n")
    command = (
        "--extend",
        "held",
        "launch",
        "slurm",
        str(job.folder.path.parents[1] / "runs.yaml"),
        "--cluster",
        str(site),
    )
    with ThreadPoolExecutor() as pool:
        said = list(pool.map(lambda _: job.pretrain(*command, expect=None), range(2)))
    assert sorted("submitted as job" in text for text in said) == [False, True], said
    config = (job.folder.launch / "config.yaml").read_bytes()
    refused = job.pretrain(*command, "optim.lr=1", expect=73)
    assert (
        "error: " in refused and "of this run is PENDING; wait for it, or cancel it: pretrain launch cancel" in refused
    )
    assert (job.folder.launch / "config.yaml").read_bytes() == config
    assert len(lab.run("squeue", "-h").splitlines()) == len(job.journal("submit")) == 1
    refused = job.pretrain(*command, "--singleton", "optim.lr=1", expect=73)
    assert "is PENDING, submitted with other settings (optim.lr: 0.001 -> 1.0); submit without" in refused
    assert "1 run would join jobs in the queue" in job.pretrain(*command, "--singleton", "--dry-run")
    assert "submitted as job" in job.pretrain(*command, "--singleton")
    assert (job.folder.launch / "config.yaml").read_bytes() == config
    assert len({row["chain"] for row in job.journal("submit")}) == 1 and len(job.journal("submit")) == 2


def test_a_job_that_never_came_to_its_driver_is_told_as_slurm_tells_it(lab, make_job):
    """5 s. An interpreter that a node lacks, and a job that was cancelled while it waited."""
    job = make_job(lab)
    site = job.folder.path.parents[1] / "site.yaml"
    site.write_text(f"{SITE}python: /nowhere/python\n")
    number = job.submit()
    job.wait_end("FAILED")
    status = job.status()
    assert (status["state"], status["exit_code"]) == ("failed", 127)
    assert status["reason"].startswith(f"job {number} ended before the run began: FAILED, NonZeroExitCode, ")
    assert "/nowhere/python" in status["reason"]
    site.write_text(f"{SITE}sbatch: [--hold]\n")
    number = job.submit()
    said = job.pretrain("launch", "logs", str(job.folder.path), "--rank", "0", expect=64)
    assert f"there are slurm-{number - 1}.out" in said
    lab.run("scancel", str(number))
    job.wait_end("CANCELLED")
    status = job.status()
    assert (status["state"], status["reason"]) == ("cancelled", f"job {number} was cancelled before it began")


def test_a_job_with_gpus_that_torch_does_not_see_trains_on_no_cpu(start_lab, make_job):
    """30 s. Two nodes with a GPU each by Slurm's word alone."""
    job = make_job(start_lab(nodes=2, gpus=1), template=on_two_ranks(None).replace("device: cpu", "device: auto"))
    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    number = job.submit("--nodes", "2")
    assert job.lab.job(number)["TresPerNode"] == "gres:gpu:1"
    job.wait_end("FAILED")
    (end,) = job.journal("end")
    assert (end["exit_code"], end["decision"], end["step"]) == (69, "end", 0)
    assert "the job has 1 GPU a node, torch sees none (torch " in end["reason"]
    assert "engine.device=cpu if that is meant" in end["reason"]
    assert not job.folder.metrics.exists()


def test_jobs_of_a_chain_follow_each_other_where_none_may_requeue_itself(lab, make_job):
    """19 s. The second goes on where the first was stopped; the third finds the run done."""
    job = make_job(lab)
    site = job.folder.path.parents[1] / "site.yaml"
    site.write_text(f"{SITE}requeue: false\n")
    job.hold(25)
    first = job.submit("--jobs", "3", "--mode", "srun", "train.stop_after=30")
    job.wait_held(25)
    lab.run("scancel", "--batch", "--signal=USR1", str(first))
    job.wait_told("asked to stop by SIGUSR1")
    job.wait_asked(25)
    job.release(25)
    job.job = first + 2
    job.wait_end()
    assert [(row["job"], row["decision"]) for row in job.journal("end")] == [
        (str(first), "next"),
        (str(first + 1), "end"),
    ]
    assert (lab.state(first), lab.state(first + 1)) == ("FAILED", "COMPLETED")
    assert [step for step, _ in samples_of(job.folder)] == list(range(1, 31))
    assert not any((job.folder.launch / "exits").iterdir())

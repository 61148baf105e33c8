"""The cluster of these tests is one: jobs run on several hosts, come back after faults, and are taken down."""

import pytest

from tests.helpers.slurm_lab import SlurmLab


def write_job(folder, *lines):
    """Writes a batch script."""
    script = folder / "job.sh"
    script.write_text("\n".join(["#!/bin/sh", f"#SBATCH --output={folder}/out.txt --open-mode=append", *lines, ""]))
    return str(script)


def test_a_job_runs_on_every_node(lab, tmp_path):
    """2 s."""
    job = lab.submit("--nodes=2", "--time=1", write_job(tmp_path, "srun --ntasks-per-node=1 hostname"))
    assert lab.wait_for(job) == "COMPLETED"
    hosts = sorted((tmp_path / "out.txt").read_text().split())
    assert hosts == lab.nodes if lab.has_own_hosts else len(hosts) == 2


def test_a_job_comes_back_on_another_node_after_one_was_rebooted(start_lab, tmp_path):
    """8 s."""
    lab: SlurmLab = start_lab(nodes=2)
    job = lab.submit("--requeue", "--time=20", write_job(tmp_path, "echo on $SLURMD_NODENAME", "exec sleep 1000"))
    lab.wait_for(job, "RUNNING")
    (first,) = lab.nodes_of(job)
    lab.wait_until((tmp_path / "out.txt").exists, "the job has begun")
    lab.drain(next(node for node in lab.nodes if node != first))
    lab.reboot(first)
    lab.wait_until(lambda: lab.restarts(job) == 1, "requeued")
    lab.resume(next(node for node in lab.nodes if node != first))
    lab.drain(first)
    lab.start_now(job)
    lab.wait_for(job, "RUNNING")
    assert lab.nodes_of(job) != [first]


@pytest.mark.parametrize("how", ["kill_controller", "stop_controller"])
def test_a_job_outlives_its_controller(lab, tmp_path, how):
    """11 s: the state is saved every five."""
    go = tmp_path / "go"
    job = lab.submit("--time=20", write_job(tmp_path, f"while [ ! -e {go} ]; do sleep 0.1; done"))
    lab.wait_for(job, "RUNNING")
    lab.wait_saved(job)
    getattr(lab, how)()
    lab.start_controller()
    assert lab.state(job) == "RUNNING"
    go.touch()
    assert lab.wait_for(job) == "COMPLETED"
    assert lab.restarts(job) == 0

"""A run that is ended again and again, in every way that a cluster has, is the run that nobody ended."""

import json

from tests.helpers.runs import assert_same_folders
from tests.helpers.slurm_runs import STEPS, on_two_ranks

ZERO_2 = on_two_ranks(2).replace("wandb: off", "wandb: offline")


def steps_of(path):
    """The steps of a file of rows."""
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_chain_of_six_requeues_is_the_uninterrupted_run(start_lab, make_job, golden):
    """164 s on two cores, beside another test. Seven starts of two ranks.

    ZeRO-2 on two nodes: time limit, preemption, reboot, a killed rank, a node taken down, and a signal.
    """
    lab = start_lab(nodes=3)
    job = make_job(lab, template=ZERO_2)
    job.hold(15)
    number = job.submit("--nodes", "2")

    job.wait_held(15)
    lab.expire(number, 150)
    job.wait_told("asked to stop by SIGUSR1")
    lab.expire(number, 1800)  # for the starts to come
    job.wait_asked(15)
    job.hold(25)
    job.release(15)
    job.wait_restart(1)

    job.wait_held(25)
    options = ("--partition=urgent", "--nodes=3", "--exclusive", "--time=30", "--output=none")
    urgent = lab.submit(*options, "--wrap=sleep 1")
    job.wait_told("asked to stop", 2)
    job.wait_asked(25)
    job.hold(35)
    job.release(25)
    lab.wait_for(urgent, "COMPLETED")
    job.wait_restart(2)

    job.wait_held(35)
    rebooted = job.journal("start")[-1]["nodes"][1]
    lab.reboot(rebooted)
    job.hold(45)
    job.release(35)
    job.wait_restart(3)
    lab.resume(rebooted)  # Slurm has seen only by now that it was gone

    job.wait_held(45)
    job.kill_rank(1)
    job.hold(55)
    job.release(45)
    job.wait_restart(4)

    job.wait_held(55)
    down = job.journal("start")[-1]["nodes"][1]
    lab.fail(down)
    job.hold(65)
    job.wait_restart(5)  # the ranks wait until Slurm has ended them: it does so some time after it has said so
    job.release(55)
    assert down not in job.journal("start")[-1]["nodes"]

    job.wait_held(65)
    lab.run("scancel", "--batch", "--signal=USR1", str(number))
    job.wait_told("asked to stop by SIGUSR1", 3)
    job.wait_asked(65)
    job.release(65)
    job.wait_restart(6)
    job.wait_end()

    assert_same_folders(job.folder, golden(ZERO_2), STEPS)
    assert "torch/distributed/elastic" not in job.output  # stacks of torchrun after the killed rank
    assert "ChildFailedError" in "".join(path.read_text() for path in job.folder.logs.glob("launcher-*.log"))
    metrics = steps_of(job.folder.metrics)
    assert metrics == sorted(metrics)
    assert len({path.name.rpartition("-")[2] for path in (job.folder.path / "wandb").glob("offline-run-*")}) == 1

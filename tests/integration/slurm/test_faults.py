"""Faults of a cluster, one at a time: what comes back does so elsewhere or later, and what was cancelled does not.

Seconds were measured on two cores, two tests at a time.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

from tests.helpers.documents import read_blocks
from tests.helpers.runs import assert_same_folders
from tests.helpers.slurm_runs import STEPS, on_two_ranks

SRUN = ("--mode", "srun")
"""Without torchrun a start costs half."""


def test_the_ranks_of_a_killed_slurmd_come_back_on_another_node(start_lab, make_job, golden):
    """70 s. The old rank lives on beside the new ones: it may write nothing."""
    template = on_two_ranks(None)
    lab = start_lab(nodes=3)
    job = make_job(lab, template=template)
    job.hold(25)
    job.submit("--nodes", "2", *SRUN)
    job.wait_held(25)
    _, lost = job.journal("start")[0]["nodes"]
    lab.kill_slurmd(lost)
    lab.wait_until(lambda: lab.restarts(job.job) == 1, "given up by Slurm", say=job.tell)
    job.release(25)
    job.wait_restart(1)
    job.wait_end()
    assert lost not in job.journal("start")[1]["nodes"]
    assert [attempt["slurm"]["num_nodes"] for attempt in job.attempts()] == [2, 2]
    assert_same_folders(job.folder, golden(template), STEPS)


def test_a_node_on_which_ranks_were_killed_twice_is_excluded_from_the_requeue(start_lab, make_job, golden):
    """60 s. Slurm takes the first free node again, until the job excludes it."""
    lab = start_lab(nodes=2)
    job = make_job(lab)
    job.die_at(25)
    job.submit(*SRUN)
    lab.wait_until(lambda: len(job.journal("end")) == 2, "the second rank was killed", job.tell)
    job.live_at(25)
    job.wait_end()
    first, second, third = [row["nodes"] for row in job.journal("start")]
    assert first == second != third
    assert [row.get("failed_node") for row in job.journal("end")] == [*first, *first, None]
    assert f"{first[0]}: ranks were killed there 2 times; excluded from the requeue" in job.output
    assert_same_folders(job.folder, golden(), STEPS)


def test_the_next_job_of_a_chain_does_without_a_node_on_which_ranks_were_killed_twice(
    start_lab, make_job, golden, tmp_path
):
    """60 s. A site on which no job may requeue itself."""
    lab = start_lab(nodes=2)
    job = make_job(lab)
    site = tmp_path / "site.yaml"
    site.write_text(f"{site.read_text()}requeue: false\n")
    job.die_at(25)
    job.submit(*SRUN, "--jobs", "3")
    lab.wait_until(lambda: len(job.journal("end")) == 2, "the second rank was killed", job.tell)
    job.live_at(25)
    job.job = job.journal("submit")[-1]["job"]
    job.wait_end()
    first, second, third = [row["nodes"] for row in job.journal("start")]
    assert first == second != third
    assert [row["decision"] for row in job.journal("end")] == ["next", "next", "end"]
    assert f"{first[0]}: ranks were killed there 2 times; excluded from the next job" in job.output
    assert_same_folders(job.folder, golden(), STEPS)


def test_a_resubmission_does_without_a_node_on_which_ranks_were_killed_twice(start_lab, make_job, golden):
    """50 s. The second death ends the job: a restart brought no checkpoint."""
    lab = start_lab(nodes=2)
    job = make_job(lab)
    job.die_at(25)
    job.submit(*SRUN, "launch.max_idle_restarts=1")
    job.wait_restart(1)
    job.wait_end("FAILED")
    job.live_at(25)
    first, second = [row["nodes"] for row in job.journal("start")]
    assert first == second
    said = [""]

    def has_submitted() -> bool:
        said.append(job.pretrain("launch", "resubmit", str(job.folder.path), expect=None))
        return len(job.journal("submit")) == 2

    lab.wait_until(has_submitted, "the lease of the killed rank has run out", lambda: said[-1])
    assert f"{first[0]}: ranks were killed there 2 times; excluded from this job\nsubmitted as job" in said[-1]
    job.job = job.journal("submit")[-1]["job"]
    job.wait_end()
    assert job.journal("start")[-1]["nodes"] != first
    assert lab.job(job.job)["ExcNodeList"] == first[0]
    assert_same_folders(job.folder, golden(), STEPS)


def test_a_job_that_slurm_stops_at_its_time_limit_is_recorded_so(lab, make_job):
    """50 s. The limit is moved to where Slurm signals at its next look."""
    job = make_job(lab)
    job.hold(25)
    number = job.submit(*SRUN)
    job.wait_held(25)
    lab.expire(number, 150)
    job.wait_told("asked to stop by SIGUSR1")
    job.wait_asked(25)
    job.release(25)
    lab.wait_until(lambda: job.journal("end"), "the end of the first start", job.tell)
    lab.run("scancel", str(number))
    (end, *_) = job.journal("end")
    assert (end["reason"], end["exit_code"], end["decision"]) == ("stopped at the time limit", 75, "requeue")
    assert job.attempts()[0]["reason"] == "stopped at the time limit"


def test_a_job_that_the_user_cancels_by_scancel_stays_cancelled(start_lab, make_job):
    """9 s. Its rank has saved before it went."""
    lab = start_lab(nodes=2, settings=["KillWait=50", "MessageTimeout=60"])
    job = make_job(lab)
    job.hold(25)
    number = job.submit(*SRUN)
    job.wait_held(25)
    lab.run("scancel", str(number))
    job.wait_asked(25)
    job.release(25)
    job.wait_end("CANCELLED")
    assert lab.restarts(number) == 0
    status = job.status()
    assert (status["state"], status["queue"], status["restarts"]) == ("cancelled", [], 0)
    assert status["checkpoint_step"] >= 24


def test_a_run_is_cancelled_and_submitted_again(lab, make_job, golden):
    """36 s. `cancel` saves and does not requeue, `resubmit` goes on where it was, `logs -f` ends with the run."""
    job = make_job(lab)
    job.hold(25)
    number = job.submit(*SRUN)
    job.wait_held(25)
    with ThreadPoolExecutor() as pool:
        cancelling = pool.submit(job.pretrain, "launch", "cancel", str(job.folder.path))
        job.wait_asked(25)
        job.release(25)
        said = cancelling.result()
    assert said.splitlines() == [f"job {number}: asked to save and end", "run: cancelled"]
    assert job.status()["state"] == "cancelled"
    assert job.journal("end")[-1]["decision"] == "end"
    assert "had ended already: cancelled" in job.pretrain("launch", "cancel", str(job.folder.path))

    job.hold(45)
    again = job.pretrain("launch", "resubmit", str(job.folder.path))
    job.job = int(again.split()[-1])
    assert job.job != number
    refused = job.pretrain("launch", "resubmit", str(job.folder.path), expect=73)
    assert f"job {job.job} of this run is" in refused
    job.release(45)
    assert "launch: the run is done" in job.pretrain("launch", "logs", "-f", str(job.folder.path))
    job.wait_end()
    assert_same_folders(job.folder, golden(), STEPS)
    rows = job.journal()
    complete = f"{job.folder.path} is complete: 80 steps; raise train.steps to go on\n"
    assert job.pretrain("launch", "resubmit", str(job.folder.path)) == complete
    assert job.pretrain("launch", "cancel", str(job.folder.path)) == f"run: job {job.job} had ended already: done\n"
    assert job.journal() == rows
    shown = job.pretrain("runs", str(job.folder.path.parent))
    assert "80/80" in shown and "done" in shown


def test_a_controller_that_is_killed_and_comes_back_loses_nothing(lab, make_job, golden):
    """86 s. It is away while the run is asked to stop: the driver keeps on until the requeue is taken."""
    job = make_job(lab)
    job.hold(25)
    number = job.submit(*SRUN)
    job.wait_held(25)
    lab.wait_saved(number)
    lab.kill_controller()
    (driver,) = job.processes("-m pretrain_launch.job")
    os.kill(driver, signal.SIGUSR1)
    job.wait_told("asked to stop")
    job.wait_asked(25)
    job.release(25)
    job.wait_told("the controller is away")
    lab.start_controller()
    job.wait_restart(1)
    job.wait_end()
    assert lab.restarts(number) == 1
    assert [row["exit_code"] for row in job.journal("end")] == [75, 0]
    assert_same_folders(job.folder, golden(), STEPS)


def test_of_an_array_only_the_element_that_was_stopped_comes_back(lab, make_job):
    """25 s. Two elements; the second is asked to stop."""
    job = make_job(lab)
    job.hold(25)
    number = job.submit(*SRUN, "--vary", "seed=1,2")
    elements = [job.element(task) for task in (0, 1)]
    for element in elements:
        element.wait_told(", rendezvous at ")
    elements[1].wait_held(25)
    lab.run("scancel", "--batch", "--signal=USR1", f"{number}_1")
    elements[1].wait_asked(25)
    job.release(25)
    elements[1].wait_restart(1)
    for element in elements:
        element.wait_end()
    assert [lab.restarts(element.job) for element in elements] == [0, 1]
    assert [len(element.attempts()) for element in elements] == [1, 2]
    assert [element.attempts()[-1]["slurm"]["array"] for element in elements] == [f"{number}_0", f"{number}_1"]
    assert [element.status()["state"] for element in elements] == ["done", "done"]


def test_three_restarts_without_a_new_checkpoint_end_a_job(lab, make_job):
    """50 s. A rank that always dies at the same step."""
    job = make_job(lab)
    job.die_at(8)
    number = job.submit(*SRUN)
    for count in (1, 2, 3):
        job.wait_restart(count)
    job.wait_end("FAILED")
    assert lab.restarts(number) == 3
    ends = job.journal("end")
    assert [(row["exit_code"], row["decision"]) for row in ends] == [(137, "requeue")] * 3 + [(137, "end")]
    assert "3 restarts in a row without a new checkpoint" in ends[-1]["reason"]
    status = job.status()
    assert (status["state"], status["exit_code"], status["restarts"]) == ("failed", 137, 3)


def test_a_preemption_without_a_signal_of_its_own_costs_nothing_either(start_lab, make_job, golden):
    """24 s. Slurm sends SIGTERM to the ranks, and requeues the job by itself."""
    lab = start_lab(nodes=1, settings=["SlurmctldParameters=enable_configless"])
    job = make_job(lab)
    job.hold(25)
    job.submit(*SRUN)
    job.wait_held(25)
    urgent = lab.submit("--partition=urgent", "--exclusive", "--time=30", "--output=none", "--wrap=sleep 1")
    job.wait_asked(25)
    job.release(25)
    lab.wait_for(urgent, "COMPLETED")
    job.wait_restart(1)
    job.wait_end()
    assert [attempt["exit_code"] for attempt in job.attempts()] == [75, 0]
    assert "SIGTERM" in job.attempts()[0]["reason"]
    assert job.attempts()[-1]["from_step"] >= 24
    assert_same_folders(job.folder, golden(), STEPS)


def test_the_script_of_the_readme_needs_no_tool(lab, make_job, tmp_path, golden):
    """31 s. Two nodes, plain sbatch; the ranks get the signal, the script requeues."""
    template = on_two_ranks(None)
    job = make_job(lab, template=template)
    (block,) = [block for block in read_blocks("slurm/README.md") if block.file == "own.sbatch"]
    script = tmp_path / block.file
    script.write_text(block.text)
    job.hold(25)
    job.job = job.sbatch("--nodes=2", "--time=30", f"--output={tmp_path}/own.out", str(script), "runs.yaml")
    job.wait_held(25)
    lab.run("scancel", "--signal=USR1", str(job.job))
    job.wait_asked(25)
    job.release(25)
    job.wait_end()
    assert lab.restarts(job.job) == 1
    assert [attempt["exit_code"] for attempt in job.attempts()] == [75, 0]
    assert_same_folders(job.folder, golden(template), STEPS)

"""Whatever starts the ranks of a node, they train the same: srun, accelerate and deepspeed; others use torchrun."""

from pretrain.run.folder import RunDir
from pretrain.tracking.audit import read_audit
from tests.helpers.slurm_runs import SlurmRun, on_two_ranks

MODES = ("srun", "accelerate", "deepspeed")
STEPS = 20


def test_srun_accelerate_and_deepspeed_start_the_same_run(lab, make_job, golden):
    """33 s. Side by side on two nodes; none needs ssh."""
    template = on_two_ranks(None)
    job = make_job(lab, template=template)
    jobs = {}
    for mode in MODES:
        config = job.folder.path.parents[1] / "runs.yaml"
        jobs[mode] = SlurmRun(lab, config, RunDir(job.folder.path.with_name(mode)))
        jobs[mode].submit("--nodes", "2", "--mode", mode, f"run.name={mode}", f"train.stop_after={STEPS}")
    expected = read_audit(golden(template).audit)[:STEPS]
    for one in jobs.values():
        one.wait_end()
        rows = read_audit(one.folder.audit)
        assert [(row.step, row.digest, row.loss) for row in rows] == [
            (row.step, row.digest, row.loss) for row in expected
        ]
        assert one.attempts()[-1]["slurm"]["num_nodes"] == 2

"""What is told of a run beside its config."""

import subprocess

from pretrain import __version__
from pretrain.tracking import run_facts
from pretrain.tracking.run_facts import code_facts, machine_facts, slurm_variables


def test_a_checkout_has_a_commit_and_is_dirty_once_a_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(run_facts, "_GIT_S", 150)

    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b@c", *arguments], cwd=tmp_path, check=True)

    assert code_facts(tmp_path) == {"version": __version__}
    git("init", "-q")
    (tmp_path / "a.py").write_text("1\n")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    (tmp_path / "new.txt").write_text("not of the code\n")
    clean = code_facts(tmp_path)
    assert len(clean["commit"]) == 40 and not clean["dirty"]
    (tmp_path / "a.py").write_text("2\n")
    assert code_facts(tmp_path) == clean | {"dirty": True}


def test_slurm_is_told_by_known_names_only(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_JWT", "secret")
    found = slurm_variables()
    assert (found["job_id"], found["ntasks"]) == ("12", "4")
    assert "secret" not in found.values()


def test_the_machine_has_cores_and_memory():
    found = machine_facts()
    assert found["cores"] >= 1 and found["memory_bytes"] > 2**28

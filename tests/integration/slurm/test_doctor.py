"""`pretrain doctor` under srun: it looks at all nodes of an allocation, and names the one that differs."""

import json
import sys

import pytest

PROGRAM = """
import socket, sys
if socket.gethostname() == "n2":
    sys.path.insert(0, {packages!r})
from pretrain import cli
raise SystemExit(cli.run(sys.argv[1:]))
"""


def srun(lab, folder, *command):
    """Runs a command once on each of two nodes; returns what each has printed, errors apart."""
    where = ("--nodes=2", "--ntasks-per-node=1", "--export=ALL,OMP_NUM_THREADS=1")
    # Of lines that are longer than 1 KiB srun itself would make a mixture.
    lab.run("srun", *where, f"--output={folder}/out-%t", "--error=all", sys.executable, *command)
    return "".join((folder / f"out-{task}").read_text() for task in (0, 1))


def test_ranks_of_two_nodes_meet_and_one_report_tells_of_both(lab, make_run, tmp_path):
    """3 s, most of it two imports of torch."""
    output = srun(lab, tmp_path, "-m", "pretrain", "doctor", str(make_run.config()), "--json")
    (report,) = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    checks = {check["name"]: check for check in report["checks"]}
    assert {check["status"] for check in checks.values()} <= {"pass", "warn"}
    assert checks["shared folder"]["status"] == checks["rendezvous"]["status"] == "pass"
    if lab.has_own_hosts:
        assert report["host"] == "n1, n2"
        assert checks["same versions"]["detail"] == "2 ranks on 2 hosts run the same"


def test_a_node_with_another_package_is_named_by_the_quick_look(lab, make_run, tmp_path):
    """2 s. Fault 28, without torch: what the head of a job does."""
    if not lab.has_own_hosts:
        pytest.skip("the nodes of this cluster share a name")
    folder = tmp_path / "packages" / "numpy-1.0.999.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0.999\n")
    program = PROGRAM.format(packages=str(folder.parent))
    arguments = ("doctor", str(make_run.config()), "--quick", "--json", "--ranks", "2")
    (tmp_path / "nodes").write_text(srun(lab, tmp_path, "-c", program, *arguments))
    compared = lab.run(sys.executable, "-m", "pretrain", "doctor", "--compare", str(tmp_path / "nodes"), expect=69)
    assert "numpy is" in compared and "1.0.999 on n2" in " ".join(compared.split())

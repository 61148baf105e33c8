"""What the doctor says of the nodes of a job, read by its driver."""

import json
import sys

from pretrain_launch.exits import StepExit
from pretrain_launch.job_start import examine_nodes, first_failure, warnings_of
from tests.unit.launch.test_submit import spec


def report(host: str, **statuses: str) -> str:
    checks = [
        {"name": name, "status": status, "detail": "found", "fix": "mend it", "exit_code": 74 if name == "room" else 69}
        for name, status in statuses.items()
    ]
    return json.dumps({"host": host, "checks": checks, "versions": {}, "exit_code": 69})


def test_the_first_failure_of_a_node_keeps_a_job_from_training():
    lines = [
        "a greeting of the site",
        report("n1", packages="pass", room="warn"),
        report("n2", room="fail", GPUs="fail"),
    ]
    assert first_failure("\n".join(lines)) == StepExit(74, "n2: room: found; mend it", False)


def test_warnings_and_addresses_which_the_rendezvous_tries_out_do_not():
    assert first_failure(report("n1", packages="warn", hostname="fail", interfaces="fail")) is None
    assert first_failure("") is None
    assert first_failure('{"host": "n1"}\n[]\nnull') is None


def test_a_warning_of_several_nodes_is_one():
    lines = [report("n1", cores="warn", room="warn"), "a greeting of the site", report("n2", cores="warn", room="pass")]
    assert warnings_of("\n".join(lines)) == {"cores: found; mend it": ["n1", "n2"], "room: found; mend it": ["n1"]}


SRUN = """
import sys
from pathlib import Path
outputs = [argument.removeprefix("--output=") for argument in sys.argv if argument.startswith("--output=")]
said = [Path({folder!r}, f"report-{{task}}").read_text() for task in (0, 1)]
if outputs:
    for task in (0, 1):
        Path(outputs[0].replace("%t", str(task))).write_text(said[task])
else:
    for start in range(0, max(map(len, said)), 1024):
        for text in said:
            sys.stdout.write(text[start : start + 1024])
"""
"""As srun is: of lines that are longer than 1 KiB, those of two nodes come in pieces, mixed."""


def test_what_two_nodes_say_at_once_is_not_mixed(tmp_path, capsys):
    many = {f"check{number}": "pass" for number in range(40)}
    (tmp_path / "report-0").write_text(report("n1", **many, cores="warn") + "\n")
    (tmp_path / "report-1").write_text(report("n2", **many, room="fail") + "\n")
    (tmp_path / "srun.py").write_text(SRUN.format(folder=str(tmp_path)))
    one = spec(run=str(tmp_path / "run"), ranks_per_node=1, nodes=2, node_counts=[2], python=sys.executable)
    one.folder.launch.mkdir(parents=True)
    assert examine_nodes(one, [sys.executable, str(tmp_path / "srun.py")], 2) == StepExit(
        74, "n2: room: found; mend it", False
    )
    assert [path.name for path in one.folder.launch.iterdir()] == ["doctor.jsonl"]
    assert capsys.readouterr().out == "launch: warning: n1: cores: found; mend it\n"

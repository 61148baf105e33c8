"""What the doctor says of the nodes of a job, read by its driver."""

import json

from launch.examine import Finding, first_failure


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
    assert first_failure("\n".join(lines)) == Finding(74, "n2: room: found; mend it")


def test_warnings_and_addresses_which_the_rendezvous_tries_out_do_not():
    assert first_failure(report("n1", packages="warn", hostname="fail", interfaces="fail")) is None
    assert first_failure("") is None
    assert first_failure('{"host": "n1"}\n[]\nnull') is None

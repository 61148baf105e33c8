"""Reports of hosts: JSON and back, merged, compared, and the exit code they end with."""

import json

import pytest

from pretrain.doctor.check import Check, Report, exit_code, merge_reports, read_reports
from pretrain.doctor.versions import compare_reports, digest_of, find_differences, own_versions, refuse_differences
from pretrain.errors import LaunchError

GOOD = Check("fsync", "pass", "3 ms")
FULL = Check("room", "fail", "1 GiB free", "free space", 74)
ALONE = Check("hostname", "fail", "n2 does not resolve", "have it in DNS")


def report(host, *checks, **versions):
    return Report(host, list(checks), {"torch": "2.9.0", "numpy": "2.1", **versions})


def test_a_report_comes_back_from_its_json_and_other_lines_are_skipped():
    reports = [report("n1", GOOD), report("n2", GOOD, FULL)]
    text = "\n".join(["srun: job 7 queued", *(json.dumps(one.facts()) for one in reports), "[1, 2]", '{"host": 3}'])
    assert read_reports(text) == reports


def test_json_has_the_keys_that_a_batch_script_reads():
    facts = report("n1", FULL).facts()
    assert set(facts) == {"host", "checks", "versions", "exit_code"}
    assert {"name", "status", "detail", "fix"} <= set(facts["checks"][0])


@pytest.mark.parametrize(("checks", "code"), [([GOOD], 0), ([GOOD, FULL, ALONE], 74), ([ALONE, FULL], 69), ([], 0)])
def test_the_first_failure_gives_the_exit_code(checks, code):
    assert exit_code(checks) == code
    assert exit_code([Check("wandb", "warn", "away"), *checks]) == code


def test_what_passes_everywhere_is_told_once_and_the_rest_names_its_host():
    merged = merge_reports([report("n1", GOOD, GOOD), report("n2", GOOD, FULL), report("n3", GOOD)])
    assert [(check.name, check.status) for check in merged] == [("fsync", "pass"), ("room", "fail")]
    assert merged[1].detail == "n2: 1 GiB free"
    assert merged[1].exit_code == 74


def test_of_hosts_that_pass_with_other_numbers_the_first_is_told():
    (merged,) = merge_reports([report("n1", GOOD), report("n2", Check("fsync", "pass", "9 ms"))])
    assert merged.detail == "n1: 3 ms; 1 more pass"


def test_what_is_wrong_on_many_hosts_is_one_line():
    slow = Check("fsync", "warn", "a small file takes 0.9 s", "another file system")
    (merged,) = merge_reports([report(f"n{number}", slow) for number in range(1, 65)])
    assert merged.detail == "n1, n2, n3, n4 and 60 more: a small file takes 0.9 s"


def test_a_differing_package_is_named_with_the_host_that_has_it():
    hosts = [(f"n{number}", {"torch": "2.9.0", "numpy": "2.1"}) for number in range(1, 9)]
    hosts += [("n9", {"torch": "2.8.0", "numpy": "2.1"}), ("n1", {"torch": "2.9.0", "numpy": "2.1"})]
    assert find_differences(hosts) == ["torch is 2.8.0 on n9, 2.9.0 on n1, n2, n3, n4 and 4 more"]
    with pytest.raises(
        LaunchError, match=r"the ranks do not run the same: torch is 2\.8\.0 on n9, .*; install the same"
    ):
        refuse_differences(hosts)


def test_a_package_that_is_absent_on_a_host_differs_and_wandb_does_not_matter():
    hosts = [("n1", {"torch": "2.9.0", "wandb": "0.31"}), ("n2", {"torch": "2.9.0", "deepspeed": "0.19"})]
    assert find_differences(hosts) == ["deepspeed is absent on n1, 0.19 on n2"]
    assert digest_of({"a": "1", "wandb": "2"}) == digest_of({"a": "1", "wandb": "3"})
    assert digest_of({"a": "1"}) != digest_of({"a": "2"})


def test_reports_of_nodes_are_compared_by_their_versions():
    *_, same = compare_reports([report("n1", GOOD), report("n2", GOOD)])
    assert (same.status, same.detail) == ("pass", "2 ranks on 2 hosts run the same")
    *_, other = compare_reports([report("n1", GOOD), report("n2", GOOD, torch="2.8.0")])
    assert (other.status, other.exit_code) == ("fail", 69)
    assert other.detail == "torch is 2.9.0 on n1, 2.8.0 on n2"


def test_our_own_code_counts_as_a_version(tmp_path, monkeypatch):
    import pretrain

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("x = 1\n")
        (tmp_path / name / "module.py").write_text(f"y = '{name}'\n")
    digests = []
    for name in ("a", "b", "a"):
        monkeypatch.setattr(pretrain, "__file__", str(tmp_path / name / "__init__.py"))
        digests.append(own_versions()["code"])
    assert digests[0] == digests[2] != digests[1]

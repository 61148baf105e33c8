"""`make drills`: a summary by group, and a second call that runs only what failed or did not run."""

import json

import pytest

from tests.drills import __main__ as drills

GOOD = "import pytest\npytestmark = pytest.mark.long\ndef test_a(): pass\n"
BAD = GOOD + "def test_b(): assert False\n"


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs drills of two groups in a folder; returns exit code and output."""
    for name, text in (("good", GOOD), ("bad", BAD)):
        (tmp_path / f"test_{name}.py").write_text(text)
    groups = [drills.Group(name, (str(tmp_path / f"test_{name}.py"),), (f"src/{name}",)) for name in ("bad", "good")]
    monkeypatch.setattr(drills, "STATE", tmp_path / "state")
    monkeypatch.setattr(drills, "read_groups", lambda: groups)

    def run(*arguments: str) -> tuple[object, str]:
        monkeypatch.setattr("sys.argv", ["drills", "--jobs", "1", *arguments])
        with pytest.raises(SystemExit) as ended:
            drills.main()
        return ended.value.code, capfd.readouterr().out

    return run


@pytest.mark.long
def test_what_failed_runs_again_and_what_passed_does_not(run, tmp_path):
    code, output = run()
    rows = {line.split()[0]: line.split()[2:] for line in output.splitlines()[-2:]}
    assert (code, rows) == (True, {"bad": ["2", "1", "0"], "good": ["1", "0", "0"]})
    state = tmp_path / "state" / "state.json"
    assert json.loads(state.read_text()) == {"bad": "failed", "good": "passed"}
    (tmp_path / "test_bad.py").write_text(BAD.replace("assert False", "pass"))
    code, output = run("--last-failed")
    assert (code, output.splitlines()[0]) == (False, "groups: bad")
    assert output.splitlines()[-1].split()[2:] == ["1", "0", "0"]
    code, output = run("--last-failed")
    assert (code, output.splitlines()[0]) == (False, "groups: none")
    state.write_text(json.dumps({"bad": "passed", "good": "not run"}))  # as after an interruption
    assert run("--last-failed")[1].startswith("groups: good\n")


def test_groups_are_chosen_by_name_and_by_the_files_of_a_diff(run, monkeypatch):
    monkeypatch.setattr(drills, "run_group", lambda group, jobs, last_failed: dict.fromkeys(
        ("tests", "failures", "errors", "skipped", "code"), 0))  # fmt: skip
    assert run("--only", "good")[1].startswith("groups: good\n")
    code, _ = run("--only", "good,ugly")
    assert code == "there is no group ugly of drills; there are: bad, good"
    monkeypatch.setattr(drills, "changed_files", lambda base: ["src/bad/file.py", "src/goodness"])
    assert run("--changed", "HEAD")[1].startswith("groups: bad\n")
    monkeypatch.setattr(drills, "changed_files", lambda base: ["README.md"])
    assert run("--changed", "HEAD")[0] is False

"""`make drills`: the long tests, by group.

    python -m tests.drills                          all groups
    python -m tests.drills --only kills,slurm       the named groups
    python -m tests.drills --changed origin/main    the groups that a diff against that commit asks for
    python -m tests.drills --last-failed            of the groups chosen last: failed tests, and what did not run

The groups, their tests and the paths that ask for them are the table of CONTRIBUTING.md, section "Drills". A summary of
times and counts comes last, also after Ctrl-C.
"""

import argparse
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.waiting import stopwatch

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".pytest_cache" / "drills"
MARKERS = "long or slurm"
TIMEOUT_S = 3600
"""The limit of one test, for what hangs."""
SPREAD = {"slurm", "mutations"}
"""Groups whose tests share no fixture that is slow to make: each test goes to the next free worker."""


@dataclass(frozen=True)
class Group:
    """A row of the table.

    Attributes:
        name: What `--only` takes.
        tests: Files and folders, relative to the repository.
        paths: Files and folders of which a change asks for this group.
    """

    name: str
    tests: tuple[str, ...]
    paths: tuple[str, ...]

    def is_asked_for_by(self, file: str) -> bool:
        """Whether a change of `file` asks for this group."""
        return any(file == path or file.startswith(f"{path.rstrip('/')}/") for path in (*self.tests, *self.paths))


def read_groups(document: Path = ROOT / "CONTRIBUTING.md") -> list[Group]:
    """Reads the table of groups."""
    section = document.read_text().partition("\n## Drills\n")[2].partition("\n## ")[0]
    groups = []
    for line in section.splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            (name,), _, tests, paths = cells
            groups.append(Group(name, tuple(tests), tuple(paths)))
    return groups


def changed_files(base: str) -> list[str]:
    """Returns the files that differ from a commit: committed, in the work tree, and new ones that are not ignored."""
    commands = [["diff", "--name-only", f"{base}...HEAD"], ["diff", "--name-only", "HEAD"]]
    commands.append(["ls-files", "--others", "--exclude-standard"])
    outputs = [subprocess.run(["git", *c], cwd=ROOT, capture_output=True, text=True, check=True) for c in commands]
    return sorted({file for output in outputs for file in output.stdout.splitlines()})


def run_group(group: Group, jobs: int, *, last_failed: bool) -> dict[str, int]:
    """Runs the tests of a group; returns its counts, with pytest's exit code as `code`."""
    folder = STATE / group.name
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", MARKERS, "-rs", "--timeout", str(TIMEOUT_S)]
    command += ["-n", str(jobs), "--dist", "load" if group.name in SPREAD else "loadscope"]
    command += ["-o", f"cache_dir={folder / 'cache'}", f"--junitxml={report}"]
    command += ["--last-failed"] if last_failed else []
    code = subprocess.run([*command, *group.tests], cwd=ROOT).returncode
    suites = ElementTree.parse(report).getroot().iter("testsuite") if report.exists() else []
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        counts = {name: count + int(suite.get(name, 0)) for name, count in counts.items()}
    return counts | {"code": code}


def choose_groups(arguments: argparse.Namespace) -> list[Group]:
    """Returns the groups that the command line asks for."""
    groups = read_groups()
    if arguments.only:
        names = arguments.only.split(",")
        unknown = sorted(set(names) - {group.name for group in groups})
        if unknown:
            known = ", ".join(group.name for group in groups)
            sys.exit(f"there is no group {', '.join(unknown)} of drills; there are: {known}")
        return [group for group in groups if group.name in names]
    if arguments.changed:
        files = changed_files(arguments.changed)
        return [group for group in groups if any(group.is_asked_for_by(file) for file in files)]
    return groups


def show_summary(rows: dict[str, dict[str, float]]) -> None:
    """Prints a line for each group that ran."""
    print(f"\n{'group':12} {'minutes':>8} {'tests':>6} {'failed':>7} {'skipped':>8}")
    for name, row in rows.items():
        failed = row["failures"] + row["errors"] or ("stopped" if row["code"] else 0)
        print(f"{name:12} {row['seconds'] / 60:8.1f} {row['tests']:6} {failed:>7} {row['skipped']:8}")


def main() -> None:
    """Runs the chosen groups, one after the other; ends with 1 where one failed or none was chosen by name."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description="Runs the long tests, by group.")
    parser.add_argument("--only", metavar="GROUPS", help="names, with commas between them")
    parser.add_argument("--changed", metavar="COMMIT", help="groups that the diff against COMMIT asks for")
    parser.add_argument("--last-failed", action="store_true", help="what failed or did not run the last time")
    parser.add_argument("--jobs", type=int, default=2, help="test processes (2)")
    arguments = parser.parse_args()
    ledger = STATE / "state.json"
    state: dict[str, str] = json.loads(ledger.read_text()) if arguments.last_failed and ledger.exists() else {}
    groups = choose_groups(arguments)
    if state:
        groups = [group for group in groups if state.get(group.name, "passed") != "passed"]
    else:
        state = {group.name: "not run" for group in groups}
    print("groups:", ", ".join(group.name for group in groups) or "none", flush=True)
    rows: dict[str, dict[str, float]] = {}
    STATE.mkdir(parents=True, exist_ok=True)
    try:
        for group in groups:
            ledger.write_text(json.dumps(state))
            print(f"\n=== drills: {group.name}", flush=True)
            seconds = stopwatch()
            found = run_group(group, arguments.jobs, last_failed=state[group.name] == "failed")
            rows[group.name] = {**found, "seconds": seconds()}
            interrupted = found["code"] == 2  # pytest's: of the tests that did not run, it remembers nothing
            state[group.name] = "not run" if interrupted else "failed" if found["code"] else "passed"
            if interrupted:
                break
    except KeyboardInterrupt:
        pass
    ledger.write_text(json.dumps(state))
    show_summary(rows)
    sys.exit(any(state[group.name] != "passed" for group in groups))


if __name__ == "__main__":
    main()

"""No clock in an assertion: tests wait for events, with the helpers and the one limit of `tests/helpers/waiting.py`.

Outside the helpers, a test file neither sleeps nor reads a clock nor writes a timeout of its own, and neither does the
source of a child process that it has in a string.
"""

import ast
import re

import pytest

from tests.repo.source import ROOT, TEST_FILES, findings_by_file

EXEMPT = {ROOT / "tests" / file for file in ("helpers/waiting.py", "helpers/clock.py", "repo/test_clocks.py")}
CLOCKS = {"sleep", "time", "monotonic", "perf_counter", "process_time", "time_ns", "monotonic_ns", "perf_counter_ns"}
LIMITS = re.compile("timeout|within_s|wait_s")
WAITS = {"wait", "join", "result", "alarm", "communicate", "timeout"}
"""Methods whose first argument is a limit; `pytest.mark.timeout` is one."""
IN_STRING = re.compile(r"\btime\.(?:" + "|".join(sorted(CLOCKS)) + r")\(|\bfrom time import\b")


def _is_literal(node: ast.expr) -> bool:
    """Whether an expression is a number, or arithmetic on numbers."""
    if isinstance(node, ast.BinOp):
        return _is_literal(node.left) and _is_literal(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def _findings_of_call(call: ast.Call) -> list[str]:
    found = [
        f"{keyword.arg}={ast.unparse(keyword.value)}"
        for keyword in call.keywords
        if keyword.arg and LIMITS.search(keyword.arg) and _is_literal(keyword.value)
    ]
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method in WAITS and call.args and _is_literal(call.args[0]):
        found.append(f"{method}({ast.unparse(call.args[0])})")
    return found


def clocks(tree: ast.Module) -> list[str]:
    """Returns every clock, sleep and limit in a file, with its line."""
    found = []
    for node in ast.walk(tree):
        what: list[str] = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "time" and node.attr in CLOCKS:
            what = [f"time.{node.attr}"]
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            what = ["from time import"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            what = [f"{match} in a string" for match in IN_STRING.findall(node.value)]
        elif isinstance(node, ast.Call):
            what = _findings_of_call(node)
        found += [f"line {node.lineno}: {item}" for item in what]
    return found


def test_tests_wait_for_events_and_not_for_a_time():
    assert all(path.is_file() for path in EXEMPT)
    assert findings_by_file((path for path in TEST_FILES if path not in EXEMPT), clocks) == {}


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("time.sleep(1)", 1),
        ("from time import sleep", 1),
        ("begun = time.monotonic()\nassert time.monotonic() - begun < 5", 2),
        ("CODE = 'import time; time.sleep(600)'", 1),
        ("process.wait(timeout=10)", 1),
        ("thread.join(0.5)", 1),
        ("wait_until_gone(mark, timeout_s=60 * 2)", 1),
        ("@pytest.mark.timeout(1800)\ndef test_x(): ...", 1),
        ("process.wait(timeout=LIMIT_S)", 0),
        ("', '.join(words)\nevent.wait(LIMIT_S)", 0),
        ("'time.sleeping is a word'", 0),
    ],
)
def test_the_rule_itself(code, count):
    assert len(clocks(ast.parse(code))) == count

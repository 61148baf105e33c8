"""Fresh Python processes: where a start is what is tested; all else is forked from a warm server of tests/helpers."""

import ast

from tests.repo.source import ROOT, TEST_FILES, name, parse

STARTS = {
    "tests/integration/slurm/test_doctor.py",
    "tests/integration/slurm/test_submit.py",
    "tests/integration/test_bad_input.py",
    "tests/integration/test_cli.py",
    "tests/integration/test_data_commands.py",
    "tests/integration/test_distribution.py",
    "tests/integration/test_doctor.py",
    "tests/integration/test_exchange.py",
    "tests/integration/test_extending.py",
    "tests/integration/test_generate.py",
    "tests/integration/test_gone_terminal.py",
    "tests/integration/test_hangs.py",
    "tests/integration/test_launch_slurm.py",
    "tests/integration/test_plan_command.py",
    "tests/integration/test_push.py",
    "tests/integration/test_python_use.py",
    "tests/integration/test_readme_commands.py",
    "tests/integration/test_released_runs.py",
    "tests/integration/test_resume.py",
    "tests/integration/test_serve.py",
    "tests/integration/test_signals.py",
    "tests/integration/test_start.py",
    "tests/unit/drill/test_attempt.py",
    "tests/unit/drill/test_processes.py",
    "tests/unit/launch/test_command.py",
    "tests/unit/launch/test_examine.py",
    "tests/unit/launch/test_job.py",
    "tests/unit/launch/test_local.py",
    "tests/unit/launch/test_modes.py",
    "tests/unit/preparation/convert/test_restart.py",
    "tests/unit/preparation/test_pool.py",
    "tests/unit/run/test_stop.py",
    "tests/unit/run/test_watchdog_ranks.py",
    "tests/unit/test_dist.py",
    "tests/unit/tokenizer/test_kinds.py",
    "tests/unit/tracking/test_console.py",
    "tests/unit/tracking/test_jsonl.py",
    "tests/unit/tracking/test_run_output.py",
    "tests/unit/tracking/test_trackers.py",
    "tests/unit/tracking/test_wandb_tracker.py",
    "tests/unit/utils/test_log.py",
    "tests/unit/utils/test_status_line.py",
    "tests/unit/utils/test_streams.py",
}
"""Test files that start one; the list only shrinks."""


def starts_python(tree: ast.Module) -> bool:
    """Whether a file names the interpreter, or calls what starts a command in it."""
    nodes = list(ast.walk(tree))
    is_named = any(isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable" for node in nodes)
    return is_named or any(isinstance(node, ast.Call) and ast.unparse(node.func) == "run_cli" for node in nodes)


def test_no_other_file_starts_a_fresh_python():
    gate = [
        path for path in TEST_FILES if path.relative_to(ROOT / "tests").parts[0] in ("unit", "integration", "parity")
    ]
    assert {name(path) for path in gate if starts_python(parse(path))} == STARTS

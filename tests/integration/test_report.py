"""`pretrain report`: the command, its page, its facts and its errors."""

import json

from tests.helpers.cli import Result, run_light, run_warm
from tests.unit.report.run_folders import metric_row, write_run


def test_the_command_writes_a_page_and_prints_facts(tmp_path):
    for name, rows in (("a", 4), ("b", 6)):
        write_run(tmp_path / "runs" / name, [metric_row(step) for step in range(1, rows)], name=name)
    result = run_warm("report", "runs/a", "runs/b", "--output", "new/page.html", "--json", cwd=tmp_path)
    assert (result.code, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    assert [(run["name"], run["state"], run["steps"]) for run in facts["runs"]] == [("a", "done", 3), ("b", "done", 5)]
    assert facts["config_differs"] == {}
    assert (tmp_path / facts["path"]).stat().st_size == facts["bytes"]


def test_a_page_that_cannot_be_written_is_told_with_the_option_for_another(tmp_path):
    write_run(tmp_path / "run", [metric_row(1)])
    (tmp_path / "report.html").mkdir()
    result = run_warm("report", "run", cwd=tmp_path)
    (line,) = result.errors
    assert result.code == 74
    assert line.startswith("report.html: cannot write: ") and line.endswith(", or give another --output")


def test_a_report_needs_no_torch(tmp_path):
    write_run(tmp_path / "run", [metric_row(1)])
    slow = ("torch", "transformers", "wandb")
    done = run_light("report", "run", cwd=tmp_path, without=slow)
    assert done.code == 0, done.stderr
    assert "report.html: " in done.stdout and (tmp_path / "report.html").is_file()


def test_what_is_no_run_is_an_error_and_leaves_no_page(tmp_path):
    write_run(tmp_path / "run", [metric_row(1)])
    result = run_warm("report", "run", "nowhere", cwd=tmp_path)
    assert result.code == 64 and result.errors == ["nowhere: no run here (no run.json); check the path"]
    folder = run_warm("report", ".", cwd=tmp_path)
    assert folder.errors == [".: no run here (no run.json); name a run in it, such as run"]
    assert not (tmp_path / "report.html").exists()


def test_there_are_no_runs_before_the_first(tmp_path):
    assert run_light("runs", cwd=tmp_path) == Result(0, "no runs in runs\n", "")
    assert run_light("runs", "elsewhere", cwd=tmp_path).errors[0].startswith("elsewhere: no such folder")


def test_a_run_with_a_damaged_record_is_left_out_with_a_note_on_the_page(tmp_path):
    for name in ("good", "garbage"):
        write_run(tmp_path / name, [metric_row(1)], name=name)
    (tmp_path / "garbage" / "run.json").write_text("{")
    result = run_warm("report", "good", "garbage", cwd=tmp_path)
    assert result.code == 0 and "garbage is left out: run.json cannot be read: " in result.stderr
    page = (tmp_path / "report.html").read_text()
    assert "<li>garbage is left out: run.json cannot be read: " in page

"""What a report reads of a run: leniently, and with a note for whatever is left out."""

import json
import math
import os
from datetime import UTC

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain.errors import ConfigError
from pretrain.report import metric_columns
from pretrain.report.metric_columns import read_tables, split_metrics
from pretrain.report.run_data import MAX_METRICS, flatten, label_runs, read_lines, read_records, read_run_data
from tests.unit.checkpoint.stand_in import save
from tests.unit.report.run_folders import metric_row, write_lines, write_run


def test_a_folder_without_a_run_is_refused_with_its_name(tmp_path):
    with pytest.raises(ConfigError, match="no run here"):
        read_run_data(tmp_path, "x", [], "done")


def test_a_damaged_record_leaves_its_run_out_unless_it_is_the_only_one(tmp_path):
    good, garbage = write_run(tmp_path / "good", [metric_row(1)]), write_run(tmp_path / "garbage", [])
    (garbage / "run.json").write_text("{")
    records, notes = read_records([good, garbage])
    assert list(records) == [good]
    assert len(notes) == 1 and notes[0].startswith(f"{garbage} is left out: run.json cannot be read: ")
    for paths in ([garbage], [garbage, garbage]):
        with pytest.raises(ConfigError, match="restore it, or remove it: the run continues at its last checkpoint"):
            read_records(paths)
    with pytest.raises(ConfigError, match="no run here"):  # a mistyped path is no damage
        read_records([good, tmp_path / "absent"])


def test_metrics_are_columns_over_steps_and_null_is_not_finite(tmp_path):
    rows = [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": None, "word": "x", "flag": True},
        {"step": 3, "loss": 10**400},
    ]
    run = read_run_data(write_run(tmp_path / "run", rows), "x", [], "done")
    assert list(run.metrics) == ["loss"]
    assert run.metrics["loss"].steps.tolist() == [1, 2, 3]
    assert np.isnan(run.metrics["loss"].values).tolist() == [False, True, True]
    assert run.finite("loss").by_step() == {1: 2.5} and run.finite("nothing").by_step() == {}
    assert run.last_step == 3


def test_steps_that_were_done_again_replace_the_rows_of_before(tmp_path):
    write_lines(tmp_path / "m.jsonl", [{"step": step, "try": 1} for step in (1, 2, 2, 3, 4)] + [{"step": 2, "try": 2}])
    notes: list[str] = []
    rows = read_lines(tmp_path / "m.jsonl", notes)
    assert [(row["step"], row["try"]) for row in rows] == [(1, 1), (2, 2)]
    assert notes == ["m.jsonl: 4 rows of steps that were done again are left out"]


KEYS = ("loss", "lr", "val_loss", "word")
VALUES = st.sampled_from([0, -1.5, 10**400, -math.inf, math.nan, None, True, "x", [1]]) | st.floats(-1e9, 1e9)
ROWS = st.lists(st.tuples(st.integers(0, 9), st.dictionaries(st.sampled_from(KEYS), VALUES)), max_size=40)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS)
def test_columns_are_the_numbers_of_the_rows_in_their_order(tmp_path, rows):
    rows = [{"step": step} | row for step, row in rows]
    write_lines(tmp_path / "m.jsonl", rows)
    notes: list[list[str]] = [[], []]
    expected: dict[str, list[tuple[float, str]]] = {}
    for row in read_lines(tmp_path / "m.jsonl", notes[0]):
        for name, value in row.items():
            if name != "step" and type(value) in (int, float, type(None)):
                number = float(value) if value is not None and abs(value) < 2**1000 else math.nan
                expected.setdefault(name, []).append((row["step"], repr(number)))
    tables = read_tables(tmp_path / "m.jsonl", notes[1])
    metrics = split_metrics(tables, {name for table in tables for name in table.columns} - {"step"})
    found = {name: list(zip(steps.tolist(), map(repr, values.tolist()), strict=True))
             for name, (steps, values) in metrics.items()}  # fmt: skip
    assert found == expected and notes[0] == notes[1]


def test_a_long_file_is_parsed_many_rows_at_a_time(tmp_path, monkeypatch):
    texts: list[bytes] = []
    monkeypatch.setattr(metric_columns, "parse_json", lambda text: texts.append(text) or json.loads(text))
    write_lines(tmp_path / "m.jsonl", [metric_row(step) for step in range(3000)])
    assert sum(len(table.steps) for table in read_tables(tmp_path / "m.jsonl", [])) == 3000
    assert len(texts) < 15
    (tmp_path / "m.jsonl").write_text('{"step":1},{"step":2}\n{"step":3,"of":[{"a":1}\n{"step":4}\n')
    assert [table.steps.tolist() for table in read_tables(tmp_path / "m.jsonl", [])] == [[4]]


def test_a_row_that_is_being_written_is_none_and_damaged_ones_are_counted(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step":1}\n{"st\n[]\n{"step":"x"}\n{"loss":1}\n{"step":2}\n{"step":3}')
    notes: list[str] = []
    assert [row["step"] for row in read_lines(path, notes)] == [1, 2]
    assert notes == ["m.jsonl: 4 damaged lines are left out"]
    assert read_lines(tmp_path / "absent.jsonl", notes) == [] and len(notes) == 1


def test_a_run_has_a_limited_number_of_curves(tmp_path):
    rows = [{"step": step, "loss": 2.5} | {f"m{number}": 1.0 for number in range(2000)} for step in (1, 2)]
    run = read_run_data(write_run(tmp_path / "run", rows), "x", [], "done")
    assert list(run.metrics) == ["loss", *(f"m{number}" for number in range(MAX_METRICS - 2))]
    assert "metrics.jsonl: all but the first 1,000 metrics are left out" in run.notes


def test_a_file_of_holes_is_left_off_at_its_first_long_line(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step":1}\n')
    os.truncate(tmp_path / "m.jsonl", 20 * 2**30)
    notes = []
    assert read_lines(tmp_path / "m.jsonl", notes) == [{"step": 1}]
    assert notes == ["m.jsonl cannot be read: a line of more than 16,777,216 bytes"]


def test_what_is_damaged_is_left_out_with_a_note(tmp_path):
    folder = write_run(tmp_path / "run", [metric_row(1)])
    (folder / "config.yaml").write_text("a: [")
    save(folder / "checkpoints", 1, 2)
    (folder / "checkpoints/step-00000002/manifest.json").write_text("{}")
    run = read_run_data(folder, "x", [], "done")
    assert run.config == {} and [saved.step for saved in run.checkpoints] == [1]
    assert run.notes[0].startswith("config.yaml cannot be read") and run.notes[1].startswith(
        "step-00000002: the manifest"
    )


def test_checkpoints_tell_size_tokens_and_parameters(tmp_path):
    folder = write_run(tmp_path / "run", [metric_row(1)])
    (path,) = save(folder / "checkpoints", 7)
    run = read_run_data(folder, "x", [], "done")
    (saved,) = run.checkpoints
    assert (saved.step, saved.tokens, saved.at.tzinfo, run.parameters) == (7, 70, UTC, 17)
    assert saved.num_bytes == (path / "rank-00000.safetensors").stat().st_size


def test_texts_are_pairs_by_step(tmp_path):
    texts = [{"step": 5, "samples": [{"prompt": "a", "text": "b"}, "odd"]}, {"step": 6, "samples": None}]
    run = read_run_data(write_run(tmp_path / "run", [], samples=texts), "x", [], "done")
    assert run.samples == [(5, [("a", "b")])]


def test_runs_of_one_name_are_told_apart(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    assert label_runs(["x", "y"], [a, b]) == ["x", "y"]
    assert label_runs(["x", "x"], [a, b]) == [f"x ({a})", f"x ({b})"]
    assert len(set(label_runs(["x", "x"], [a, a]))) == 2


def test_keys_of_nested_sections_are_dotted():
    values = {"a": {"b": 1}, "c": [{"d": 2}, {"d": 3}], "e": [1, 2], "f": {}}
    assert dict(flatten(values)) == {"a.b": 1, "c[0].d": 2, "c[1].d": 3, "e": [1, 2]}
    assert json.loads(json.dumps(dict(flatten(values))))

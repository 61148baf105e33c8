"""The ledger: exact floats, rewinding, and the first difference of two."""

import json
import math
import os
from pathlib import Path

import pytest

from pretrain.errors import DataError, DiskError, LockedError
from pretrain.tracking.audit import AuditDifference, AuditLedger, compare, read_audit


def write(path, steps, *, attempt=1, **changes):
    """Rows of a made-up run; `changes` maps a field to {step: value}."""
    ledger = AuditLedger(path)
    for step in steps:
        row = {"tokens": 64, "digest": f"{step:016x}", "loss": 1 / step, "grad_norm": 0.1 * step, "attempt": attempt}
        row |= {field: values[step] for field, values in changes.items() if step in values}
        ledger.append(step=step, **row)
    ledger.sync()
    return ledger


def test_a_row_has_the_documented_keys_with_floats_in_hex(tmp_path):
    write(tmp_path / "a", [3]).close()
    assert json.loads((tmp_path / "a").read_text()) == {
        "step": 3,
        "tokens": 64,
        "digest": "0000000000000003",
        "loss": (1 / 3).hex(),
        "grad_norm": (0.1 * 3).hex(),
        "attempt": 1,
    }


def test_floats_come_back_bit_for_bit_and_a_skipped_step_has_no_norm(tmp_path):
    losses = {1: 0.1 + 0.2, 2: 5e-324, 3: math.nan, 4: math.inf}
    write(tmp_path / "a", losses, loss=losses, grad_norm={3: None}).close()
    rows = read_audit(tmp_path / "a")
    back = [float.fromhex(row.loss) for row in rows]
    assert back[:2] == [0.1 + 0.2, 5e-324]
    assert math.isnan(back[2])
    assert back[3] == math.inf
    assert [row.grad_norm is None for row in rows] == [False, False, True, False]


def test_a_resumed_ledger_equals_an_uninterrupted_one(tmp_path):
    write(tmp_path / "whole", range(1, 11)).close()
    write(tmp_path / "halves", range(1, 9)).close()
    again = AuditLedger(tmp_path / "halves")
    again.rewind(5)
    again.close()
    write(tmp_path / "halves", range(6, 11), attempt=2).close()
    assert compare(tmp_path / "whole", tmp_path / "halves") is None
    assert [row.attempt for row in read_audit(tmp_path / "halves")] == [1] * 5 + [2] * 5


def test_an_attempt_that_has_lost_the_run_adds_no_row(tmp_path):
    owners = ["ours", "ours", "another's"]

    def fence() -> None:
        if owners.pop(0) != "ours":
            raise LockedError("taken over")

    ledger = AuditLedger(tmp_path / "a", fence)
    with pytest.raises(LockedError, match="taken over"):
        for step in (1, 2, 3):
            ledger.append(step=step, tokens=64, digest="", loss=1.0, grad_norm=1.0, attempt=1)
    ledger.close()
    assert [row.step for row in read_audit(tmp_path / "a")] == [1, 2]


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", 65), ("digest", "f" * 16), ("loss", math.nextafter(1 / 7, 1)), ("grad_norm", None)],
)
def test_the_first_difference_names_step_and_field(tmp_path, field, value):
    write(tmp_path / "a", range(1, 10)).close()
    write(
        tmp_path / "b",
        range(1, 10),
        **{field: {7: value}, "tokens": {8: 1, **({7: value} if field == "tokens" else {})}},
    ).close()
    difference = compare(tmp_path / "a", tmp_path / "b")
    assert difference is not None
    assert (difference.step, difference.field) == (7, field)
    assert str(difference).startswith(f"step 7: {field} is ")


def test_one_ledger_that_ends_early_differs_in_the_step_itself(tmp_path):
    write(tmp_path / "a", [1, 2, 3]).close()
    write(tmp_path / "b", [1, 2]).close()
    assert compare(tmp_path / "a", tmp_path / "b") == AuditDifference(3, "step", 3, None)
    assert compare(tmp_path / "b", tmp_path / "a") == AuditDifference(3, "step", None, 3)


def test_a_missing_or_repeated_step_differs(tmp_path):
    write(tmp_path / "a", [1, 2, 3]).close()
    write(tmp_path / "gap", [1, 3]).close()
    write(tmp_path / "twice", [1, 1, 2, 3]).close()
    assert compare(tmp_path / "a", tmp_path / "gap") == AuditDifference(2, "step", 2, 3)
    assert compare(tmp_path / "a", tmp_path / "twice") == AuditDifference(1, "step", 2, 1)


def test_chosen_fields_only(tmp_path):
    write(tmp_path / "a", [1, 2]).close()
    write(tmp_path / "b", [1, 2], loss={2: 9.0}).close()
    assert compare(tmp_path / "a", tmp_path / "b", fields=("tokens", "digest")) is None


def test_rows_of_another_kind_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"val_loss":2.0}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl: a row is not of an audit ledger: .*; restore the file"):
        read_audit(tmp_path / "metrics.jsonl")


def test_rows_that_a_full_disk_refuses_wait_and_are_written_before_the_next_and_said_once(
    tmp_path, monkeypatch, caplog
):
    ledger = write(tmp_path / "a", [1])
    monkeypatch.setattr(os, "ftruncate", lambda descriptor, length: None)
    file = ledger._lines._file
    with Path("/dev/full").open("ab", buffering=0) as full:
        ledger._lines._file = full
        for step in (2, 3):
            ledger.append(step=step, tokens=64, digest=f"{step:016x}", loss=1.0, grad_norm=None, attempt=1)
        assert caplog.text.count("No space left on device; free space") == 1
        assert "rows of the ledger wait in memory" in caplog.text
        with pytest.raises(DiskError, match="cannot append: No space left on device"):
            ledger.sync()
    ledger._lines._file = file
    ledger.rewind(2)
    ledger.sync()
    assert [row.step for row in read_audit(tmp_path / "a")] == [1, 2]
    ledger.append(step=3, tokens=64, digest=f"{3:016x}", loss=1.0, grad_norm=None, attempt=1)
    ledger.close()
    assert [row.step for row in read_audit(tmp_path / "a")] == [1, 2, 3]

"""Comparison of two courses: in bits in one environment, by samples and a tolerance in another."""

from dataclasses import replace

import pytest

from pretrain.config.load import load_config
from pretrain.errors import CheckpointError
from pretrain.release.released_course import (
    WINDOW,
    Course,
    compare_course,
    compare_hashes,
    environment_of,
    find_reasons,
    hash_course,
    load_ledger_hashes,
)
from pretrain.tracking.audit import AuditRow
from pretrain.utils.io import write_json
from tests.helpers.documents import ROOT

ATTEMPT = {
    "versions": {"torch": "2.13.0", "python": "3.11.7"},
    "numerics": {"device": "a processor", "isa": "AVX512", "threads": 1},
    "world_size": 2,
    "engine": "DeepSpeed ZeRO-2, fp32, 2 x cpu",
}
OTHER = ATTEMPT | {"versions": {"torch": "2.11.0"}}


def course(*attempts: dict, changes: dict[int, dict] | None = None, num_steps: int = 40) -> Course:
    """A course of equal starts, with some fields of rows changed."""
    rows = [
        AuditRow(step, 100, f"{step:016x}", (4.0 - step / 100).hex(), (1.0).hex(), 1)
        for step in range(1, num_steps + 1)
    ]
    for step, fields in (changes or {}).items():
        rows[step - 1] = replace(rows[step - 1], **fields)
    return Course(rows, list(attempts or (ATTEMPT,)))


def test_an_environment_has_what_bits_depend_on_and_nothing_else():
    facts = {"torch": "2.13.0", "device": "a processor", "isa": "AVX512", "threads": "1", "ranks": "2"}
    assert environment_of(ATTEMPT) == facts | {"engine": ATTEMPT["engine"]}
    assert find_reasons(environment_of(ATTEMPT), environment_of(ATTEMPT | {"host": "n1"})) == []
    assert find_reasons(environment_of(ATTEMPT), environment_of(OTHER)) == ["torch is 2.11.0, and was 2.13.0"]
    assert "is not recorded" in find_reasons(environment_of(ATTEMPT), environment_of({"versions": {}}))[0]


@pytest.mark.parametrize(
    ("here", "changes", "difference"),
    [
        (ATTEMPT, {}, ""),
        (ATTEMPT, {12: {"loss": (3.88 + 1e-12).hex()}}, "DIFFERENT at step 12: loss is "),
        (ATTEMPT, {13: {"grad_norm": None}}, "DIFFERENT at step 13: grad_norm is None, released "),
        (ATTEMPT, {10: {"loss": (9.0).hex()}}, ""),  # the checkpoint is of step 10
        (OTHER, {12: {"loss": (3.88 + 1e-4).hex()}}, ""),
        (OTHER, {12: {"loss": (3.88 + 1e-2).hex()}}, "DIFFERENT at step 12: the loss is 1.0e-02 from the released one"),
        (OTHER, {12: {"loss": "nan"}}, "DIFFERENT at step 12: the loss is nan from"),
        (OTHER, {10 + WINDOW + 1: {"loss": (9.0).hex()}}, ""),  # rounding has grown by then
        (OTHER, {35: {"digest": "0" * 16}}, "DIFFERENT at step 35: digest is 0000000000000000, released "),
    ],
)
def test_rows_are_judged_by_their_environment(here, changes, difference):
    comparison = compare_course(course(), course(here, changes=changes), 10, 1e-3)
    assert (comparison.first, comparison.last, bool(comparison.reasons)) == (11, 40, here is OTHER)
    assert comparison.difference.startswith(difference) and bool(comparison.difference) == bool(difference)


def test_losses_with_other_masks_are_shown_and_not_judged():
    comparison = compare_course(course(), course(OTHER, changes={12: {"loss": (9.0).hex()}}), 10, None)
    assert comparison.difference == "" and "dropout draws other masks" in comparison.lines()[0]
    assert compare_course(course(num_steps=10), course(), 10, None) is None


def test_hashes_name_the_first_row_that_differs(tmp_path):
    hashes = hash_course(course(), "data", "tokenizer")
    write_json(tmp_path / "ledger.json", hashes.to_json())
    hashes = load_ledger_hashes(tmp_path / "ledger.json")
    assert hashes.num_steps == 40 and len((tmp_path / "ledger.json").read_bytes()) < 1000
    assert compare_hashes(hashes, course(ATTEMPT, ATTEMPT, changes={30: {"attempt": 2}}), "data") == ("", [])
    assert compare_hashes(hashes, course(changes={7: {"tokens": 1}}), "data")[0].startswith("DIFFERENT at step 7")
    assert compare_hashes(hashes, course(num_steps=5), "data") == ("", [])
    assert compare_hashes(hashes, course(OTHER), "others") == (
        "",
        ["the data are others", "torch is 2.11.0, and was 2.13.0"],
    )


def test_the_released_quickstart_has_the_steps_of_its_recipe():
    assert load_ledger_hashes(ROOT / ".ci/quickstart_ledger.json").num_steps == load_config("quickstart").train.steps


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"rows": "xyz"},
        {"rows": 7},
        {"environments": [[1, {"torch": 2}]]},
        {"environments": [1]},
        {"more": 1},
    ],
)
def test_a_strangers_hashes_are_read_strictly(tmp_path, change):
    write_json(tmp_path / "ledger.json", hash_course(course(), "data", "tokenizer").to_json() | change)
    with pytest.raises(
        CheckpointError, match=r"ledger.json: no hashes of a ledger: .*; give the ledger.json of a release"
    ):
        load_ledger_hashes(tmp_path / "ledger.json")

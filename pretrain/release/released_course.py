"""Comparison of two courses of a run, by their ledgers and by what the bits of a loss depend on.

    rows, attempts of run.json   ->  LedgerHashes: ledger.json, ten bytes a step
    the same environment         ->  rows must be equal in every bit
    another one                  ->  samples must be equal, losses of the first steps within a tolerance

Sums are rounded by the order of their terms, which versions, the instructions of the processor, the
number of threads and the layout of the ranks decide. A difference in the last bit grows with each
step, so that a tolerance holds for a few steps only.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import CheckpointError, DataError
from pretrain.run.folder import RunDir
from pretrain.tracking.audit import COMPARED_FIELDS, AuditRow, read_audit
from pretrain.utils.safe_read import check_fields, read_json

LEDGER = "ledger.json"
PACKAGES = ("pretrain", "torch", "numpy", "deepspeed", "accelerate")
"""Packages whose version may change a bit."""
WINDOW = 20
"""Steps after a checkpoint within which losses are compared by a tolerance."""
TOLERANCES = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Largest difference of a loss within the window, nats, by `engine.precision`."""
_SAME_SAMPLES = ("tokens", "digest")
_HASH_DIGITS = 8
_HASHES = {"data_sha256": str, "tokenizer_sha256": str, "environments": list, "rows": str}
_ROW = {
    "tokens": int,
    "digest": str,
    "pixels": str,
    "loss": str,
    "multi_token_loss": str,
    "grad_norm": str,
    "attempt": int,
}
SCHEMA = 1

Environment = dict[str, str]
"""Names and values on which bits depend; without `device`, it is not known."""


def environment_of(attempt: Mapping[str, Any]) -> Environment:
    """Returns the environment of a start, as run.json has it."""
    versions = attempt.get("versions") or {}
    facts = {name: versions[name] for name in PACKAGES if name in versions}
    facts |= attempt.get("numerics") or {}
    facts |= {"ranks": attempt.get("world_size"), "engine": attempt.get("engine")}
    return {name: str(value) for name, value in facts.items()}


def find_reasons(released: Environment, here: Environment) -> list[str]:
    """Returns the reasons why bits are not comparable; empty: they are."""
    if "device" not in released or "device" not in here:
        return ["the processor of one is not recorded, as in runs of earlier versions"]
    names = [name for name in released | here if released.get(name) != here.get(name)]
    absent = "absent"
    return [f"{name} is {here.get(name, absent)}, and was {released.get(name, absent)}" for name in names]


@dataclass(frozen=True, slots=True)
class Course:
    """The steps of a run so far, and its starts."""

    rows: list[AuditRow]  # from step 1, each once
    attempts: list[dict[str, Any]]

    def environment(self, row: AuditRow) -> Environment:
        """Returns the environment of a step."""
        return environment_of(self.attempts[row.attempt - 1])

    def environments(self) -> list[tuple[int, Environment]]:
        """Returns the last step of each environment, in order."""
        stages: list[tuple[int, Environment]] = []
        for row in self.rows:
            environment = self.environment(row)
            if stages and stages[-1][1] == environment:
                stages.pop()
            stages.append((row.step, environment))
        return stages


def read_course(run: RunDir, last_step: int | None = None) -> Course:
    """Reads the ledger of a run, up to a step, and its starts.

    Raises:
        ConfigError: run.json is missing or damaged.
        DataError: A row is damaged, a step is missing, or its start is not in run.json.
    """
    attempts = run.read_record()["attempts"]
    rows = read_audit(run.audit)[:last_step]
    for number, row in enumerate(rows, 1):
        try:
            if row.step != number:
                raise ValueError("the row is missing")
            check_fields(asdict(row), _ROW)
            float.fromhex(row.loss)
            if not 0 < row.attempt <= len(attempts):
                raise ValueError(f"start {row.attempt} is not in {run.record.name}")
        except (TypeError, ValueError, OverflowError) as error:
            text = f"step {number}: {error}"
            raise DataError(text, where=str(run.audit), fix="restore the file") from None
    return Course(rows, attempts)


def hash_row(row: AuditRow) -> str:
    """Returns 8 hex digits over the fields of a row that two equal runs share."""
    values = [row.step, *(getattr(row, field) for field in COMPARED_FIELDS)]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:_HASH_DIGITS]


@dataclass(frozen=True, slots=True)
class LedgerHashes:
    """Content of ledger.json: the course of a run from step 1, without its values."""

    data_sha256: str
    tokenizer_sha256: str
    environments: list[tuple[int, Environment]]  # last step of each
    rows: str  # 8 hex digits a step

    @property
    def num_steps(self) -> int:
        """Steps of the course."""
        return len(self.rows) // _HASH_DIGITS

    def environment(self, step: int) -> Environment:
        """Returns the environment that a step was done in."""
        return next((one for last, one in self.environments if step <= last), {})

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return {"schema": SCHEMA} | asdict(self)


def hash_course(course: Course, data_sha256: str, tokenizer_sha256: str) -> LedgerHashes:
    """Returns the hashes of a course."""
    rows = "".join(map(hash_row, course.rows))
    return LedgerHashes(data_sha256, tokenizer_sha256, course.environments(), rows)


def load_ledger_hashes(path: Path) -> LedgerHashes:
    """Reads a ledger.json. Raises: CheckpointError: Missing, damaged or of another format."""
    try:
        raw = check_fields(read_json(path), _HASHES)
        if raw.pop("schema") != SCHEMA:
            raise ValueError("written in another format than this version reads")
        stages = [(last, environment) for last, environment in raw.pop("environments")]
        for last, environment in stages:
            if type(last) is not int or not all(type(value) is str for value in environment.values()):
                raise ValueError("an environment is no list of names and texts")
        hashes = LedgerHashes(environments=stages, **raw)
        bytes.fromhex(hashes.rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"no hashes of a ledger: {error}", where=str(path), fix=f"give the {LEDGER} of a release"
        ) from None
    return hashes


@dataclass(frozen=True, slots=True)
class CourseComparison:
    """Result of the comparison of some steps with the released ones."""

    first: int
    last: int
    reasons: list[str]  # why bits were not compared; empty: they were
    difference: str = ""  # the first one that may not be; empty: none
    loss_gap: float = 0.0  # largest difference of a loss, nats
    window_gap: float = 0.0  # the same within `WINDOW` steps after the checkpoint
    tolerance: float | None = None  # of that, nats; None: other masks of dropout give other losses

    def lines(self) -> list[str]:
        """Returns the result for people."""
        steps = f"steps {self.first} to {self.last}"
        if not self.reasons:
            verdict = self.difference or "equal to the released ones in every bit"
            return [f"{steps}: {verdict}"]
        limit = "dropout draws other masks here"
        if self.tolerance is not None:
            limit = f"tolerance {self.tolerance:.0e}"
        near = f"{self.window_gap:.1e} in the first {WINDOW} steps ({limit})"
        gaps = f"losses differ by {near}, by {self.loss_gap:.1e} in all"
        verdict = self.difference or f"the released samples; {gaps}"
        reasons = [f"    not compared in bits: {reason}" for reason in self.reasons]
        return [f"{steps}: {verdict}", *reasons]


def compare_course(
    released: Course,
    here: Course,
    start: int,
    tolerance: float | None,
) -> CourseComparison | None:
    """Compares the rows after a checkpoint of step `start` that both have; None: there are none."""
    last = len(released.rows)
    pairs = [(released.rows[row.step - 1], row) for row in here.rows if start < row.step <= last]
    if not pairs:
        return None
    starts = {(one.attempt, other.attempt): (one, other) for one, other in pairs}
    reasons: dict[str, None] = {}
    for one, other in starts.values():
        found_reasons = find_reasons(released.environment(one), here.environment(other))
        reasons |= dict.fromkeys(found_reasons)
    gaps = [abs(float.fromhex(one.loss) - float.fromhex(other.loss)) for one, other in pairs]
    near = gaps[:WINDOW]
    fields = _SAME_SAMPLES if reasons else COMPARED_FIELDS
    difference = next(filter(None, (_describe(one, other, fields) for one, other in pairs)), "")
    if not difference and reasons and tolerance is not None:
        difference = _find_far(near, pairs[0][0].step, tolerance)
    first, last = pairs[0][0].step, pairs[-1][0].step
    gap, near_gap = max(gaps), max(near)
    return CourseComparison(first, last, list(reasons), difference, gap, near_gap, tolerance)


def _find_far(gaps: Sequence[float], first: int, tolerance: float) -> str:
    """Returns the first loss that is not within the tolerance, as a sentence; empty: none."""
    for step, gap in enumerate(gaps, first):
        if not gap <= tolerance:  # one that is no number, too
            far = f"the loss is {gap:.1e} from the released one, more than {tolerance:.0e}"
            return f"DIFFERENT at step {step}: {far}"
    return ""


def _describe(one: AuditRow, other: AuditRow, fields: Sequence[str]) -> str:
    """Returns the first field that differs, with both values; empty: none."""
    for field in fields:
        if getattr(one, field) != getattr(other, field):
            values = f"{field} is {getattr(other, field)}, released {getattr(one, field)}"
            return f"DIFFERENT at step {one.step}: {values}"
    return ""


def compare_hashes(hashes: LedgerHashes, course: Course, data_sha256: str) -> tuple[str, list[str]]:
    """Compares a course from step 1 with a ledger.json.

    Returns the first row that differs, as a sentence (empty: none), and the reasons why bits are
    not comparable, in which case no row is compared.
    """
    rows = course.rows[: hashes.num_steps]
    reasons = [] if data_sha256 == hashes.data_sha256 else ["the data are others"]
    stages = {row.attempt: (hashes.environment(row.step), course.environment(row)) for row in rows}
    reasons += dict.fromkeys(reason for pair in stages.values() for reason in find_reasons(*pair))
    size = _HASH_DIGITS
    for row in [] if reasons else rows:
        if hash_row(row) != hashes.rows[size * (row.step - 1) : size * row.step]:
            return f"DIFFERENT at step {row.step}: another row than the released one", reasons
    return "", reasons

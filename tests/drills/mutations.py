"""Known ways to break our own source, one at a time: a test must turn red (`make drills ONLY=mutations`).

Each mutation is applied to a copy of the tree, where a few fast tests are run. A mutation that no test notices is a
promise that nothing checks.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("pretrain", "launch", "tests", "configs", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    """One way to break the source.

    Attributes:
        name: What is broken.
        file: Where.
        old: Text that is there once.
        new: What it becomes.
        tests: Arguments of pytest: at least one test among these must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


POWER = "tests/unit/checkpoint/test_power_loss.py -k at_any_moment_leaves"
MANAGER = "tests/unit/checkpoint/test_manager.py"
SAVE = "tests/unit/checkpoint/test_save.py"
DAMAGE = "tests/unit/checkpoint/test_damage.py"
DOUBTS = "tests/unit/checkpoint/test_bucket_doubts.py"

MUTATIONS = [
    Mutation(
        "no fsync of files", "pretrain/utils/io.py",
        "            os.fsync(file.fileno())\n", "            pass\n",
        POWER,
    ),
    Mutation(
        "no fsync of folders", "pretrain/utils/io.py",
        "    try:\n        os.fsync(descriptor)\n", "    try:\n        pass\n",
        POWER,
    ),
    Mutation(
        "no fsync of the parent of a new folder", "pretrain/utils/io.py",
        "            fsync_dir(folder.parent)\n", "            pass\n",
        POWER,
    ),
    Mutation(
        "no fsync after the rename that commits", "pretrain/utils/io.py",
        "        _rename(temporary, final)\n",
        "        _operation(\"rename\", final)\n        temporary.rename(final)\n",
        "tests/unit/checkpoint/test_power_loss.py -k has_returned_from",
    ),
    Mutation(
        "no fsync between the new name of what goes and its removal", "pretrain/utils/io.py",
        "        _rename(path, trash)\n", "        _operation(\"rename\", trash)\n        path.rename(trash)\n",
        "tests/unit/utils/test_io.py -k cut_short",
    ),
    Mutation(
        "a file is written under its own name", "pretrain/utils/io.py",
        "    temporary = path.with_name(f\"{path.name}.tmp-{os.getpid()}\")\n    _unlink(temporary)",
        "    temporary = path\n    _unlink(temporary)",
        "tests/unit/utils/test_io.py -k dies_before_any_operation",
    ),
    Mutation(
        "CRC32s are ignored", "pretrain/utils/io.py",
        "if zlib.crc32(file.read(CRC_CHUNK_BYTES)) != expected:", "if expected is None:",
        f"{DAMAGE} -k flipped",
    ),
    Mutation(
        "sizes are ignored", "pretrain/utils/io.py",
        "    if size != record.num_bytes:\n", "    if size < 0:\n",
        "tests/unit/utils/test_io.py -k truncated",
    ),
    Mutation(
        "the CRC32 of a manifest is ignored", "pretrain/checkpoint/format.py",
        'if envelope.get("crc32") != seal(envelope.get("content") or {})["crc32"]:', "if not envelope:",
        f"{DAMAGE} -k flipped",
    ),
    Mutation(
        "two listings of a bucket are not compared", "pretrain/checkpoint/objects.py",
        "    if whole_of(first) != whole_of(there):\n", "    if first is None:\n",
        f"{DOUBTS} -k empty_once",
    ),
    Mutation(
        "the step that owner.json names is not looked for", "pretrain/checkpoint/objects.py",
        "    if step > known and step_name(step)", "    if step < 0 and step_name(step)",
        f"{DOUBTS} -k absence",
    ),
    Mutation(
        "a checkpoint of another run is removed", "pretrain/checkpoint/bucket.py",
        "        if is_leftover or self.is_mine(folder, names):\n", "        if names is not None:\n",
        f"{DOUBTS} -k not_known",
    ),
    Mutation(
        "the CRC32s of records are ignored", "pretrain/checkpoint/restore.py",
        "== file or not is_checked:", "is not None:",
        f"{DOUBTS} -k damaged_record",
    ),
    Mutation(
        "a manifest that is not as it was written is believed", "pretrain/checkpoint/format.py",
        "        if written != json_bytes(envelope):", "        if written is None:",
        f"{DAMAGE} -k truncation",
    ),
    Mutation(
        "no vote: a rank that failed is not heard", "pretrain/checkpoint/agree.py",
        "    failures = [failure for _, failure in votes if failure is not None]\n", "    failures = []\n",
        "tests/unit/checkpoint/test_killed_ranks.py -k ENOSPC",
    ),
    Mutation(
        "no barrier: rank 0 commits without having heard the others", "pretrain/checkpoint/agree.py",
        "    votes = dist.gather_objects([value, failure])\n", "    votes = [[value, failure]]\n",
        "tests/unit/checkpoint/test_killed_ranks.py -k ENOSPC",
    ),
    Mutation(
        "the rename comes before the manifest", "pretrain/checkpoint/save.py",
        "            write_json(self._temporary / MANIFEST, manifest.to_json())\n            place.fence()\n"
        "            publish_dir(self._temporary, self.path)\n",
        "            place.fence()\n            publish_dir(self._temporary, self.path)\n"
        "            write_json(self.path / MANIFEST, manifest.to_json())\n",
        f"{MANAGER} -k manifest_is_written_last",
    ),
    Mutation(
        "no fence", "pretrain/checkpoint/save.py",
        "            place.fence()\n            publish_dir", "            publish_dir",
        f"{SAVE} -k does_not_own",
    ),
    Mutation(
        "the ledger is not made durable before the commit", "pretrain/checkpoint/save.py",
        "            self._before_commit()\n", "",
        f"{SAVE} -k ledger_that_cannot",
    ),
    Mutation(
        "what is not finite is saved", "pretrain/checkpoint/snapshot.py",
        "            if not all(_is_finite(part) for part in self._host.parts(number)):\n", "            if False:\n",
        f"{SAVE} -k not_finite",
    ),
    Mutation(
        "one good checkpoint is enough to remove the others", "pretrain/checkpoint/retention.py",
        "MIN_VALID = 2\n", "MIN_VALID = 1\n",
        "tests/unit/checkpoint/test_retention.py",
    ),
    Mutation(
        "a run whose checkpoints are all bad starts over", "pretrain/checkpoint/manager.py",
        "        if any(dist.gather_objects(bool(bad))):\n", "        if False:\n",
        f"{MANAGER} -k never_starts_over",
    ),
    Mutation(
        "a run whose checkpoints are gone starts over", "pretrain/run/folder.py",
        "    if sign is not None:\n", "    if False:\n",
        "tests/unit/training/test_history.py -k no_damage",
    ),
    Mutation(
        "the data cursor is dropped", "pretrain/checkpoint/state.py",
        "return TrainState(**{**values, **lists})", 'return TrainState(**{**values | {"position": 0}, **lists})',
        f"{MANAGER} -k as_it_was_saved",
    ),
    Mutation(
        "a dropout seed is used in every step", "pretrain/training/step.py",
        "counters = (config.seed, step, micro, world.rank)", "counters = (config.seed, 0, micro, world.rank)",
        "tests/unit/training/test_noise.py",
    ),
    Mutation(
        "ranks drop the same units", "pretrain/training/step.py",
        "counters = (config.seed, step, micro, world.rank)", "counters = (config.seed, step, micro, 0)",
        "tests/unit/training/test_noise.py",
    ),
    Mutation(
        "a fragment is read from its beginning", "pretrain/checkpoint/fragments.py",
        "place = piece.byte_offset + 4 * skip", "place = piece.byte_offset",
        f"{MANAGER} -k as_it_was_saved",
    ),
    Mutation(
        "the ledger keeps what is trained again", "pretrain/utils/jsonl.py",
        '            if row["step"] > step:\n', "            if False:\n",
        "tests/unit/tracking/test_jsonl.py -k after_a_rewind",
    ),
    Mutation(
        "a lease is never checked", "pretrain/run/lease.py",
        "        if owner is None or owner.token != self._owner.token:\n", "        if False:\n",
        "tests/unit/run/test_lease.py -k lost_is_not_held",
    ),
    Mutation(
        "a file name in a manifest may leave the folder", "pretrain/checkpoint/format.py",
        "isinstance(record.name, str) and _FILE_NAME.fullmatch(record.name) for", "isinstance(record.name, str) for",
        "tests/unit/test_hostile.py -k names",
    ),
]  # fmt: skip


def apply(mutation: Mutation, tree: Path) -> str:
    """Breaks a copy of the tree; returns the file as it was. Raises: ValueError, where the text is not there once."""
    path = tree / mutation.file
    source = path.read_text()
    if source.count(mutation.old) != 1:
        raise ValueError(f"{mutation.name}: {mutation.file} has its text {source.count(mutation.old)} times, not once")
    path.write_text(source.replace(mutation.old, mutation.new))
    return source


def failed_tests(mutation: Mutation, tree: Path) -> list[str]:
    """Runs the tests of a mutation on a copy of the source with that mutation; returns the names of those that fail.

    Args:
        mutation: What to break.
        tree: An empty folder for the copy.
    """
    for name in COPIED:
        source, ignore = ROOT / name, shutil.ignore_patterns("__pycache__")
        (shutil.copytree(source, tree / name, ignore=ignore) if source.is_dir() else shutil.copy(source, tree))
    apply(mutation, tree)
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *mutation.tests.split()]
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'launch'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    # Any other code than 1 proves nothing: no test was collected, or the tree cannot be imported.
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-4000:]
    # A fixture that asserts counts too.
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [line.split("::")[-1].split(" ")[0] for line in failures]

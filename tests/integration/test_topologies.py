"""Any layout in, any layout out: ranks, ZeRO stage, DDP or one process, precision, micro-batch.

Content first: the same checkpoint goes through every layout, and every layout's files give every other layout its
ranges, bit for bit. Then real runs: pairs that cover every two factors go on elsewhere as they would have gone on.
"""

import itertools
import random
from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_in_ranks
from tests.helpers.topologies import (
    ROWS,
    Layout,
    all_layouts,
    contents,
    ledger,
    name_of,
    newest,
    newest_of,
    overrides_of,
    reader_of,
    run_dir,
    write_run,
)

JOBS = "tests.helpers.topologies:run_jobs"
START, SAVED = 5, 10
"""The step of the checkpoint that all layouts begin with, and that of the one which moves to another layout."""
NUM_PAIRS = 40
SHORT, LONG = 10, 50
"""Steps after the move; one pair in eight takes the long way, most of them in fp32, where losses tell most."""

QUICK_PAIRS = [
    ([2, "deepspeed", 2, "fp32"], [1, "single", 0, "fp32"], "one"),
    ([2, "deepspeed", 3, "fp32"], [2, "deepspeed", 1, "fp32"], "all"),
    ([1, "single", 0, "fp32"], [2, "deepspeed", 3, "fp32"], "one"),
    ([2, "deepspeed", 2, "fp32"], [2, "ddp", 0, "fp32"], "all"),
    ([2, "deepspeed", 3, "fp32"], [1, "deepspeed", 2, "bf16"], "all"),
    ([1, "auto", 2, "bf16"], [2, "deepspeed", 2, "bf16"], "one"),
    ([2, "ddp", 0, "bf16"], [1, "auto", 2, "bf16"], "all"),
]


def covering_pairs(seed: int = 6) -> list[tuple[Layout, Layout, str]]:
    """Pairs of layouts, with the micro-batch of the second, in which every two values of two factors meet.

    Greedy: of some random candidates, each made to hold a combination that is still missing, the one that adds most.
    Those beyond what is needed are random.
    """
    engines = [*range(4), None]
    factors = [(1, 2, 3, 4), engines, ("fp32", "bf16"), (1, 2, 3, 4), engines, ("fp32", "bf16"), ("one", "all")]
    places = list(itertools.combinations(range(len(factors)), 2))
    missing = {(i, j, a, b) for i, j in places for a in factors[i] for b in factors[j]}
    rng, rows = random.Random(seed), []
    while missing or len(rows) < NUM_PAIRS:
        candidates = [[rng.choice(values) for values in factors] for _ in range(60)]
        if missing:
            wanted = sorted(missing, key=str)
            for row, (i, j, a, b) in zip(candidates, rng.choices(wanted, k=len(candidates)), strict=True):
                row[i], row[j] = a, b
        found = [{(i, j, row[i], row[j]) for i, j in places} & missing for row in candidates]
        best = max(range(len(found)), key=lambda number: len(found[number]))
        missing -= found[best]
        rows.append(candidates[best])
    return [(_layout(*row[:3]), _layout(*row[3:6]), row[6]) for row in rows]


def long_pairs(pairs: list[tuple[Layout, Layout, str]]) -> set[int]:
    """Numbers of the pairs that take the long way: another layout in fp32 throughout, and one in bf16."""
    exact = [n for n, (left, right, _) in enumerate(pairs) if left != right and left[3] == right[3] == "fp32"]
    rounded = [n for n, (left, right, _) in enumerate(pairs) if left != right and "bf16" in (left[3], right[3])]
    return {*exact[: len(pairs) // 8 - 1], *rounded[-1:]} if len(pairs) >= 8 else set()


def _layout(size: int, stage: int | None, precision: str) -> Layout:
    if stage is None:
        return [size, "single" if size == 1 else "ddp", 0, precision]
    return [size, "deepspeed", stage, precision]


class Moves:
    """Runs of all layouts of a set of pairs: what each was when it moved, and how it went on, moved or not."""

    def __init__(self, folder: Path, data: Path, pairs: list[tuple[Layout, Layout, str]]) -> None:
        self.folder, self.data, self.pairs = folder, data, pairs
        self._long = long_pairs(pairs)
        self.origin = write_run(folder / "origin", data)
        run_in_ranks(JOBS, 1, {"jobs": [{"config": str(self.origin), "overrides": [f"train.stop_after={START}"]}]})
        self._stay()
        self._move()

    def steps_of(self, number: int) -> int:
        """Steps that a pair takes after the move."""
        return LONG if number in self._long else SHORT

    def stayed(self, layout: Layout) -> Path:
        """Config of the run that stays in a layout."""
        return self.folder / "stayed" / name_of(layout) / "run.yaml"

    def moved(self, number: int) -> Path:
        """Config of the run of a pair that has moved."""
        return self.folder / "moved" / str(number) / "run.yaml"

    def _stay(self) -> None:
        steps: dict[str, tuple[Layout, int]] = {}
        for number, (layout, _, _) in enumerate(self.pairs):
            known = steps.get(name_of(layout), (layout, 0))[1]
            steps[name_of(layout)] = (layout, max(known, self.steps_of(number)))
        jobs: dict[int, list[dict]] = {}
        for layout, count in steps.values():
            config = write_run(self.stayed(layout).parent, self.data, run_dir(self.origin), START)
            overrides = [*overrides_of(layout, ROWS // layout[0]), f"train.stop_after={SAVED + count}"]
            jobs.setdefault(layout[0], []).append({"config": str(config), "overrides": overrides})
        self._run(jobs)

    def _move(self) -> None:
        jobs: dict[int, list[dict]] = {}
        for number, (source, target, micro) in enumerate(self.pairs):
            config = write_run(self.moved(number).parent, self.data, run_dir(self.stayed(source)), SAVED)
            rows = 1 if micro == "one" else ROWS // target[0]
            overrides = [*overrides_of(target, rows), f"train.stop_after={SAVED + self.steps_of(number)}"]
            job = {"config": str(config), "overrides": overrides, "saved": str(config.parent / "loaded")}
            jobs.setdefault(target[0], []).append(job)
        self._run(jobs)

    def _run(self, jobs: dict[int, list[dict]]) -> None:
        for size, those in sorted(jobs.items()):
            for found in run_in_ranks(JOBS, size, {"jobs": those}, timeout=None):
                assert [code for code, _ in found] == [0] * len(those)

    def check(self) -> None:
        """Asserts for each pair: the same bits after the move, the same samples, losses that are alike."""
        for number, (source, target, _) in enumerate(self.pairs):
            stayed, moved = run_dir(self.stayed(source)), run_dir(self.moved(number))
            before = contents(stayed.checkpoints / f"step-{SAVED:08d}")
            after = contents(newest_of(self.moved(number).parent / "loaded"))
            assert before.keys() == after.keys()
            different = [key for key in before if not torch.equal(before[key], after[key])]
            assert not different, (source, target)
            self._check_steps(ledger(stayed), ledger(moved), number)

    def _check_steps(self, stayed: dict, moved: dict, number: int) -> None:
        source, target, _ = self.pairs[number]
        assert list(moved) == list(range(1, SAVED + self.steps_of(number) + 1))
        # In bf16 each activation is rounded to 2**-9 of itself. In fp32 only the order of additions differs.
        is_exact = source[3] == target[3] == "fp32"
        first, later = (1e-6, 1e-5) if is_exact else (2e-3, 2e-3)
        for step in range(SAVED + 1, SAVED + self.steps_of(number) + 1):
            mine, its = moved[step], stayed[step]
            assert (mine["digest"], mine["tokens"]) == (its["digest"], its["tokens"]), (source, target, step)
            allowed = first if step == SAVED + 1 else later
            loss, expected = float.fromhex(mine["loss"]), float.fromhex(its["loss"])
            assert loss == pytest.approx(expected, rel=allowed), (source, target, step)


@pytest.mark.long
def test_runs_go_on_in_another_layout_as_they_would_have_in_their_own(tmp_path, corpus):
    Moves(tmp_path, corpus, QUICK_PAIRS).check()


def test_the_pairs_of_the_long_test_cover_every_two_factors():
    pairs = covering_pairs()
    assert len(pairs) == NUM_PAIRS
    rows = {(number, *source, *target, micro) for number, (source, target, micro) in enumerate(pairs)}
    assert {(row[1], row[5]) for row in rows} == set(itertools.product((1, 2, 3, 4), repeat=2))
    engines = {((row[2], row[3]), (row[6], row[7])) for row in rows}
    stages = [("deepspeed", stage) for stage in range(4)]
    assert set(itertools.product(stages, repeat=2)) <= engines
    far = [pairs[number] for number in long_pairs(pairs)]
    assert len(far) == NUM_PAIRS // 8
    assert sum(left[3] == right[3] == "fp32" for left, right, _ in far) == len(far) - 1


@pytest.mark.long
def test_pairs_of_layouts_that_cover_every_two_factors_go_on_alike(tmp_path, corpus):
    Moves(tmp_path, corpus, covering_pairs()).check()


@pytest.mark.long
def test_every_layout_gives_every_other_its_ranges_bit_for_bit(tmp_path, corpus):
    layouts = all_layouts()
    saved, held = {}, {}
    origin = write_run(tmp_path / "origin", corpus)
    run_in_ranks(JOBS, 1, {"jobs": [{"config": str(origin), "overrides": [f"train.stop_after={START}"]}]})
    for size in (1, 2, 3, 4):
        those = [layout for layout in layouts if layout[0] == size]
        jobs = []
        for layout in those:
            config = write_run(tmp_path / name_of(layout), corpus, run_dir(origin), START)
            saved[name_of(layout)] = config.parent / "saved"
            overrides = [*overrides_of(layout, 1), f"train.stop_after={START + 1}"]
            job = {"config": str(config), "overrides": overrides, "saved": str(config.parent / "saved")}
            jobs.append({**job, "only_load": True})
        found = run_in_ranks(JOBS, size, {"jobs": jobs}, timeout=None)
        for number, layout in enumerate(those):
            held[name_of(layout)] = [rank[number][1] for rank in found]
    expected = contents(newest(run_dir(origin)))
    readers = {name: reader_of(newest_of(folder)) for name, folder in saved.items()}
    for name, folder in saved.items():
        mine = contents(newest_of(folder))  # every element once
        assert mine.keys() == expected.keys()
        assert all(torch.equal(mine[key], expected[key]) for key in expected), name
    for (source, reader), (target, by_rank) in itertools.product(readers.items(), held.items()):
        for number, ranges in enumerate(by_rank):
            for parameter, kind, offset, length in ranges:
                out = torch.empty(length)
                reader.read_into(parameter, kind, offset, out)
                whole = expected[(parameter, kind)]
                assert torch.equal(out, whole[offset : offset + length]), (source, target, number, parameter, kind)

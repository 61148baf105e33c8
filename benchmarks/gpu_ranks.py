"""The arm `ranks` of the GPU campaign: several ranks over NCCL on one GPU, beside one process.

    python -m benchmarks.gpu --only ranks [--groups GROUP ...]     with --rehearse over gloo on a CPU

    abort              a rank that waits in a collective is freed, and the next group is made
    one                references: each model and recipe in one process
    two, kinds, four   layouts of 2 and 4 ranks, each against its reference on the same samples
    race               random sleeps on every stream and around every collective: no bit may differ
    kill, stop         a rank is killed or frozen: who is named, the exit code, the seconds
    again              stopped and killed runs continue: every bit on the same ranks, the samples on others
    save               seconds in which a save holds each rank, and the steps beside it

References are read from the rows, of earlier calls too (`--earlier`), and trained where there is none. A step over
sockets is slow: no figure of speed is meant.
"""

import json
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_job import Pool
from benchmarks.gpu_layouts import ALONE, GROUPS, LAYOUTS, RANKS, Layout, references
from benchmarks.gpu_rank import Task
from benchmarks.gpu_rank_drills import abort, lose, race, save, start_again
from benchmarks.gpu_rank_runs import Ledger, RankRuns, are_close, differences, read_ledger
from pretrain.errors import EXIT_OK


def ranks(bench: Bench) -> None:
    """Runs the groups that were asked for, in order; the ranks of the next one import meanwhile."""
    groups = [group for group in GROUPS if group in (bench.groups or GROUPS)]
    folder = bench.scratch / "rank-jobs"
    shutil.rmtree(folder, ignore_errors=True)
    with closing(Pool(folder, on_gpu=not bench.rehearse)) as pool:
        pool.prepare(groups[0], RANKS[groups[0]])
        runs = RankRuns(bench, pool)
        runs.write_config()
        layouts = Layouts(runs)
        calls: dict[str, Callable[[], None]] = {
            "abort": partial(abort, runs),
            "one": layouts.train_references,
            "race": partial(race, runs),
            "kill": partial(lose, runs, "kill", signal.SIGKILL),
            "again": partial(start_again, runs),
            "stop": partial(lose, runs, "stop", signal.SIGSTOP),
            "save": partial(save, runs),
        }
        calls |= {group: partial(layouts.train, group) for group in LAYOUTS}
        for number, group in enumerate(groups, start=1):
            with bench.case(group, {"ranks": RANKS[group]}):
                for coming in groups[number : number + 1]:
                    pool.prepare(coming, RANKS[coming])
                calls[group]()


class Layouts:
    """The layouts, and the references that they are compared with."""

    def __init__(self, runs: RankRuns) -> None:
        self._runs = runs
        self._references = self._read_references()

    def _read_references(self) -> dict[str, Ledger]:
        """Returns the references in the rows of earlier calls, and of this one."""
        ledgers = {}
        bench = self._runs.bench
        for path in (*bench.earlier, bench.out / "rows.jsonl"):
            lines = path.read_text().splitlines() if path.exists() else []
            for row in map(json.loads, lines):
                ledger = row.get("ledger")
                if ledger and len(ledger["rows"]) == self._runs.sizes.steps:
                    ledgers[row["case"].removeprefix("one: ")] = ledger
        return ledgers

    def train_references(self, names: set[str] | None = None) -> None:
        """Trains references, by default all, in one process; adapters after what they begin with."""
        tasks = []
        for name in references(self._runs.sizes, ""):
            if names is None or name in names:
                tasks.append(self._runs.task(f"one-{name}", [*self._runs.overrides_of(name), *ALONE]))
        self._runs.run("one", 1, tasks, self._keep_reference)

    def _keep_reference(self, task: Task, code: int, figures: dict[str, Any]) -> None:
        name = task.name.removeprefix("one-")
        if code != EXIT_OK:
            self._runs.write_failure(f"one: {name}", 1, code, **figures)
            return
        ledger = read_ledger(self._runs.folder(task.name))
        self._references[name] = ledger
        self._runs.write(f"one: {name}", 1, held=None, value=figures, ledger=ledger)

    def train(self, group: str) -> None:
        """Trains the layouts of a group, and compares each with its reference."""
        wanted = {}
        for number, layout in enumerate(LAYOUTS[group]):
            if self._runs.bench.wants(layout.name):
                wanted[f"{group}-{number}"] = layout
        needed = {layout.reference for layout in wanted.values()}
        missing = needed - self._references.keys()
        if "LoRA" in needed and not self._runs.folder("one-dense").path.exists():
            missing.add("dense")  # whose weights adapters begin with
        if missing:
            self.train_references(missing)
        tasks = []
        for run, layout in wanted.items():
            words = [*self._runs.overrides_of(layout.reference), *layout.overrides(RANKS[group])]
            tasks.append(self._runs.task(run, words))

        def ended(task: Task, code: int, figures: dict[str, Any]) -> None:
            self._judge(group, wanted[task.name], task, code, figures)

        self._runs.run(group, RANKS[group], tasks, ended)

    def _judge(self, group: str, layout: Layout, task: Task, code: int, figures: dict[str, Any]) -> None:
        case, count = f"{group}: {layout.name}", RANKS[group]
        reference = self._references.get(layout.reference)
        if code != EXIT_OK:
            self._runs.write_failure(case, count, code, **figures)
        elif reference is None:
            self._runs.write(case, count, held=False, error=f"no reference: one: {layout.reference} failed")
        else:
            apart = differences(reference, read_ledger(self._runs.folder(task.name)))
            held = are_close(apart, "bf16" if layout.reference == "bf16" else "fp32")
            self._runs.write(case, count, held=held, value=apart, **figures)

"""Verdict of a drill: comparison of the killed run with the uninterrupted one, and the cost of the kills."""

import filecmp
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pretrain.checkpoint.format import list_checkpoints, load_manifest
from pretrain.checkpoint.state import TrainState
from pretrain.drill.drill_folder import GOLDEN, KILLED, DrillFolder, State
from pretrain.tracking.audit import compare


@dataclass(frozen=True, slots=True)
class DrillVerdict:
    """The facts of a finished drill; durations in seconds.

    Attributes:
        passed: Whether there is no problem.
        problems: Problems, one line each.
        kills: Number of kills; `phases` and `targets` have the counts of each kind.
        steps: Steps of the run.
        steps_repeated: Steps repeated after kills.
        checkpoints: Checkpoints of the killed run.
        golden_s: Duration of the uninterrupted run.
        killed_s: Duration of the killed run, all attempts.
        restart_s: Median time from a start to its first step.
        gone_s: Longest time from a kill until all processes were gone.
    """

    passed: bool
    problems: list[str]
    kills: int
    phases: dict[str, int]
    targets: dict[str, int]
    steps: int
    steps_repeated: int
    checkpoints: int
    golden_s: float
    killed_s: float
    restart_s: float
    gone_s: float

    @property
    def lost_s(self) -> float:
        """Time that the kills cost."""
        return self.killed_s - self.golden_s

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        return {**asdict(self), "lost_s": round(self.lost_s, 3)}

    def lines(self) -> list[str]:
        """Returns the verdict for people."""
        phases = ", ".join(f"{count} in {phase}" for phase, count in self.phases.items())
        targets = ", ".join(f"{count} of {name}" for name, count in self.targets.items())
        share = f", {self.lost_s / self.kills:.1f} s a kill" if self.kills else ""
        rows = [
            f"kills         {self.kills}" + (f" ({phases}; {targets})" if self.kills else ""),
            f"steps         {self.steps}, and {self.steps_repeated} repeated",
            f"checkpoints   {self.checkpoints} committed",
            f"time          {self.killed_s:.1f} s against {self.golden_s:.1f} s: {self.lost_s:.1f} s lost{share}",
            f"a restart     {self.restart_s:.1f} s to its first step",
            f"after a kill  {self.gone_s:.1f} s at most until all processes were gone",
        ]
        if self.passed:
            same = "passed: ledger, weights and moments are those of the uninterrupted run; nothing is left"
            return [*rows, same]
        return [*rows, f"FAILED: {len(self.problems)} problems", *(f"  {text}" for text in self.problems)]


def judge(folder: DrillFolder, state: State, left: list[str]) -> DrillVerdict:
    """Compares the two complete runs.

    Args:
        folder: Folder of the drill.
        state: State after all kills.
        left: Leftovers of the processes.
    """
    problems = [*state.problems, *(f"left behind: {text}" for text in left)]
    problems += [*_compare_ledgers(folder), *_compare_checkpoints(folder)]
    assert state.pace is not None
    kills = state.kills
    starts = [kill["first_step_s"] for kill in kills if kill["first_step_s"] is not None] or [state.pace.start_s]
    return DrillVerdict(
        passed=not problems,
        problems=problems,
        kills=len(kills),
        phases=dict(Counter(kill["phase"] for kill in kills)),
        targets=dict(Counter(kill["target"] for kill in kills)),
        steps=state.settings.steps,
        steps_repeated=sum(kill["steps_lost"] for kill in kills),
        checkpoints=-(-state.settings.steps // state.settings.every_steps),
        golden_s=round(state.pace.total_s, 3),
        killed_s=round(state.killed_s, 3),
        restart_s=round(median(starts), 3),
        gone_s=round(max((kill["gone_s"] for kill in kills), default=0.0), 3),
    )


def _compare_ledgers(folder: DrillFolder) -> list[str]:
    different = compare(folder.run(GOLDEN).audit, folder.run(KILLED).audit)
    if different is None:
        return []
    text = str(different).replace("first ledger", "uninterrupted run").replace("second", "killed one")
    return [f"the ledgers differ: {text}"]


def _compare_checkpoints(folder: DrillFolder) -> list[str]:
    """Returns what differs in the last checkpoints; one layout wrote both, so equal bits are equal bytes."""
    found = [list_checkpoints(folder.run(name).checkpoints) for name in (GOLDEN, KILLED)]
    if not all(found):
        return ["a run has no checkpoint at its end"]
    golden, killed = (paths[-1] for paths in found)
    if golden.name != killed.name:
        return [f"the last checkpoint is {killed.name}, not {golden.name}"]
    ours, theirs = load_manifest(killed), load_manifest(golden)
    # What an earlier version did not know, in a drill that is done in parts, is no difference.
    states = [TrainState.from_json(manifest.state, str(folder.path)).to_json() for manifest in (ours, theirs)]
    mine, its = (state | manifest.scalars for state, manifest in zip(states, (ours, theirs), strict=True))
    keys = [key for key in sorted(mine.keys() | its.keys()) if mine.get(key) != its.get(key)]
    problems = [f"the training state differs in {', '.join(keys)}"] if keys else []
    names = {record.name for manifest in (ours, theirs) for record in manifest.files}
    equal, _, _ = filecmp.cmpfiles(golden, killed, names, shallow=False)
    if len(equal) < len(names):
        named = _name_difference(golden, killed, ours.shapes, ours.moments)
        problems.append(named or f"the files of {killed} differ")
    return problems


def _name_difference(golden: Path, killed: Path, shapes: dict[str, list[int]], moments: list[str]) -> str | None:
    """Names the first parameter whose weight or moment differs. Imports torch: rarely needed."""
    import math

    import torch

    from pretrain.checkpoint.fragments import FragmentReader
    from pretrain.errors import CheckpointError

    readers = [FragmentReader(path / record.name for record in load_manifest(path).files) for path in (golden, killed)]
    for name, shape in shapes.items():
        for kind in ("weight", *moments):
            values = [torch.empty(math.prod(shape)) for _ in readers]
            try:
                for reader, out in zip(readers, values, strict=True):
                    reader.read_into(name, kind, 0, out)
            except CheckpointError:
                continue  # a kind that this parameter does not have
            if not torch.equal(*values):
                count = int((values[0] != values[1]).sum())
                return f"{name}/{kind} differs in {count} of {values[0].numel()} elements"
    return None

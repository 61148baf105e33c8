"""Verdict of a drill: comparison with the uninterrupted run, and the cost of the kills."""

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
    """The facts of a finished drill; durations in seconds."""

    passed: bool
    problems: list[str]  # one line each
    kills: int
    phases: dict[str, int]  # number of kills in each phase
    targets: dict[str, int]  # number of kills of each target
    steps: int
    steps_repeated: int  # after kills
    checkpoints: int  # of the killed run
    golden_s: float  # the uninterrupted run
    killed_s: float  # the killed run, all attempts
    restart_s: float  # median from a start to its first step
    gone_s: float  # longest from a kill to the end of all processes

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        return {**asdict(self), "lost_s": round(self.killed_s - self.golden_s, 3)}

    def lines(self) -> list[str]:
        """Returns the verdict for people."""
        phases = ", ".join(f"{count} in {phase}" for phase, count in self.phases.items())
        targets = ", ".join(f"{count} of {name}" for name, count in self.targets.items())
        lost_s = self.killed_s - self.golden_s
        share = f", {lost_s / self.kills:.1f} s a kill" if self.kills else ""
        time = f"{self.killed_s:.1f} s against {self.golden_s:.1f} s: {lost_s:.1f} s lost{share}"
        rows = [
            f"kills         {self.kills}" + (f" ({phases}; {targets})" if self.kills else ""),
            f"steps         {self.steps}, and {self.steps_repeated} repeated",
            f"checkpoints   {self.checkpoints} committed",
            f"time          {time}",
            f"a restart     {self.restart_s:.1f} s to its first step",
            f"after a kill  {self.gone_s:.1f} s at most until all processes were gone",
        ]
        if not self.passed:
            rows.append(f"FAILED: {len(self.problems)} problems")
            return [*rows, *(f"  {text}" for text in self.problems)]
        same = "ledger, weights and moments are those of the uninterrupted run; nothing is left"
        return [*rows, f"passed: {same}"]


def judge(folder: DrillFolder, state: State, left: list[str]) -> DrillVerdict:
    """Compares the two complete runs, given the final state and the leftovers of processes."""
    problems = [*state.problems, *(f"left behind: {text}" for text in left)]
    if (different := compare(folder.run(GOLDEN).audit, folder.run(KILLED).audit)) is not None:
        text = str(different).replace("first ledger", "uninterrupted run").replace("second", "killed one")
        problems.append(f"the ledgers differ: {text}")
    problems += _compare_checkpoints(folder)
    assert state.pace is not None
    kills = state.kills
    starts = [kill["first_step_s"] for kill in kills if kill["first_step_s"] is not None]
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
        restart_s=round(median(starts or [state.pace.start_s]), 3),
        gone_s=round(max((kill["gone_s"] for kill in kills), default=0.0), 3),
    )


def _compare_checkpoints(folder: DrillFolder) -> list[str]:
    """Returns differences of the last checkpoints, which one layout wrote: equal bits are equal bytes."""
    checkpoints = [list_checkpoints(folder.run(name).checkpoints) for name in (GOLDEN, KILLED)]
    if not all(checkpoints):
        return ["a run has no checkpoint at its end"]
    golden, killed = (paths[-1] for paths in checkpoints)
    if golden.name != killed.name:
        return [f"the last checkpoint is {killed.name}, not {golden.name}"]
    manifests = [load_manifest(path) for path in (golden, killed)]
    # Parsing fills in fields that an earlier version did not know.
    states = [TrainState.from_json(manifest.state, str(folder.path)).to_json() for manifest in manifests]
    wanted, got = (state | manifest.scalars for state, manifest in zip(states, manifests, strict=True))
    keys = [key for key in sorted(wanted.keys() | got.keys()) if wanted.get(key) != got.get(key)]
    problems = [f"the training state differs in {', '.join(keys)}"] if keys else []
    names = {record.name for manifest in manifests for record in manifest.files}
    equal, _, _ = filecmp.cmpfiles(golden, killed, names, shallow=False)
    if len(equal) < len(names):
        named = _name_difference(golden, killed, manifests[1].moments)
        problems.append(named or f"the files of {killed} differ")
    return problems


def _name_difference(golden: Path, killed: Path, moments: list[str]) -> str | None:
    """Names the first parameter whose weight or moment differs. Imports torch: rarely needed."""
    from pretrain.checkpoint.load import read_pairs

    for name, kind, wanted, actual in read_pairs((golden, killed), ("weight", *moments)):
        if not wanted.equal(actual):
            count = int((wanted != actual).sum())
            return f"{name}/{kind} differs in {count} of {wanted.numel()} elements"
    return None

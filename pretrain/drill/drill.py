"""The drill, start to end.

    golden run, uninterrupted            ->  its pace: seconds to the first step, a step, a save
    killed run, the same config          ->  kill 0, 1, ... (watch.py), each followed by a resumption
    complete the killed run              ->  compare: ledger, weights, moments, leftovers (verdict.py)

The state is written after each kill, with the next of which another call continues.
"""

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrain.config.load import dump_config
from pretrain.config.run import RunConfig
from pretrain.drill.attempt import STEPS_SPREAD, AttemptOutcome, DrillAttempts, check_platform
from pretrain.drill.drill_folder import (
    GOLDEN,
    KILLED,
    DrillFolder,
    DrillSettings,
    Pace,
    find_leases,
    find_shared_memory,
    find_temporary,
    list_shared_memory,
    open_state,
)
from pretrain.drill.verdict import DrillVerdict, judge
from pretrain.drill.watch import Kill, Target, plan_kill
from pretrain.errors import EXIT_HANG, EXIT_OK, EXIT_RESUME_ME, EXIT_UNAVAILABLE, LaunchError
from pretrain.kinds.trackers import NO_TRACKERS
from pretrain.utils.io import remove_dir, write_file

MAX_MISSES = 3
KILLED_CODES = {EXIT_RESUME_ME, EXIT_HANG, EXIT_UNAVAILABLE}
"""Exit codes of a launcher after a killed rank, besides signals: peers were stopped, or noticed."""


def plan_steps(config: RunConfig, kills: int, every_steps: int) -> int:
    """Returns the steps of a drill by default: as many as the kills need, at most the config's."""
    return min(config.train.last_step, steps_for(kills, every_steps))


def steps_for(kills: int, every_steps: int) -> int:
    """Returns the steps for so many kills: a kill advances a run by 5/4 of a checkpoint at most.

    Measured on an idle machine; on a busy one it was half a checkpoint. Steps after the last kill
    are trained at once; if the run is too short, all later kills are in start-up.
    """
    return max(4 * every_steps, -(-5 * kills * every_steps // 4))


class Drill:
    """One drill in its folder, with the arguments of `DrillSettings`.

    Raises:
        ConfigError: The folder holds other files, or another drill.
        LaunchError: This system has no /proc.
    """

    def __init__(
        self, config: RunConfig, folder: Path, ranks: int, seed: int, target: Target, steps: int, every_steps: int
    ) -> None:
        check_platform()
        self._folder = DrillFolder(folder)
        self._settings = DrillSettings(dump_config(config), ranks, seed, target, steps, every_steps)
        self._state = open_state(self._folder, self._settings)
        self._state.save(self._folder)  # from now on the folder is known as a drill's
        self._attempts = DrillAttempts(self._folder, secrets.token_hex(8), ranks)
        for name in (GOLDEN, KILLED):
            write_file(self._folder.config(name), dump_config(self._config_of(config, name)).encode())

    @property
    def num_done(self) -> int:
        """Kills so far."""
        return len(self._state.kills)

    def _config_of(self, config: RunConfig, name: str) -> RunConfig:
        """Returns the config of a run: shorter, more checkpoints, deterministic, no trackers."""
        settings = self._settings
        every = settings.every_steps
        changes = {
            "run": config.run.model_copy(update={"dir": str(self._folder.path), "name": name}),
            "train": config.train.model_copy(update={"stop_after": settings.steps}),
            "checkpoint": config.checkpoint.model_copy(update={"every_steps": every}),
            "tracking": config.tracking.model_copy(update=NO_TRACKERS),
        }
        if config.engine.device != "cpu":
            changes["engine"] = config.engine.model_copy(update={"deterministic": True})
        return config.model_copy(update=changes)

    def run(self, kills: int, at_most: int | None, bar: Any) -> DrillVerdict | None:
        """Does the remaining kills, `at_most` in this call; returns the verdict once none remain.

        Raises:
            LaunchError: The uninterrupted run ends with an error.
            DiskError: The state cannot be written.
        """
        state = self._state
        steps = self._settings.steps
        shared_memory = list_shared_memory()
        if (needed := steps_for(kills, self._settings.every_steps)) > steps:
            text = f"a run of {steps} steps is short for {kills} kills, which may need {needed}"
            _say(bar, f"{text}: kills near its end come in start-up; raise train.steps")
        if state.pace is None:
            state.pace = self._run_golden(bar)
            state.save(self._folder)
        last = kills if at_most is None else min(kills, self.num_done + at_most)
        task = bar.add_task("kills", total=kills, completed=self.num_done)
        while self.num_done < last and not state.is_stuck:
            self._kill_once(kills, bar)
            bar.update(task, completed=self.num_done)
        if not state.is_stuck:
            if self.num_done < kills:
                return None
            self._note_end(self._complete(KILLED, "to the end", bar))
        run = self._folder.run(KILLED)
        traces = find_temporary(self._folder, run) + find_shared_memory(shared_memory) + find_leases(run)
        return judge(self._folder, state, traces)

    def _complete(self, name: str, phase: str, bar: Any) -> AttemptOutcome:
        task = bar.add_task(phase, total=self._settings.steps)
        return self._attempts.complete(name, lambda step: bar.update(task, completed=step))

    def _run_golden(self, bar: Any) -> Pace:
        settings = self._settings
        run = self._folder.run(GOLDEN)
        if run.path.exists():
            remove_dir(run.path)  # it was interrupted: not golden
        _say(bar, f"the uninterrupted run: {settings.steps} steps, {settings.ranks} ranks")
        ended = self._complete(GOLDEN, "uninterrupted", bar)
        if ended.exit_code != EXIT_OK:
            text = f"the run ended with exit code {ended.exit_code}, without a kill"
            raise LaunchError(
                f"{text}: {self._end_of_log(GOLDEN)}",
                where=str(self._folder.log(GOLDEN)),
                fix="see that the config trains with `pretrain launch local`",
            )
        start_s = ended.first_step_s or ended.wall_s
        step_s = max(0.0, ended.wall_s - start_s) / settings.steps
        return Pace(ended.wall_s, start_s, step_s, ended.longest_save_s)

    def _end_of_log(self, name: str) -> str:
        lines = self._folder.log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-3:])

    def _note_end(self, ended: AttemptOutcome) -> None:
        """Notes an attempt that was not killed; a failed one means that the run cannot continue."""
        self._state.killed_s += ended.wall_s
        if ended.exit_code != EXIT_OK:
            self._state.is_stuck = True
            text = f"it cannot continue (exit code {ended.exit_code}): {self._end_of_log(KILLED)}"
            self._state.problems.append(f"after {self.num_done} kills: {text}")
            self._state.save(self._folder)

    def _kill_once(self, total: int, bar: Any) -> None:
        """Kills once, and notes the outcome; tries again if the run had ended before."""
        state = self._state
        settings = self._settings
        assert state.pace is not None
        kill = plan_kill(settings.seed, self.num_done, settings.target)
        for _ in range(MAX_MISSES):
            kill = self._within_run(kill)
            ended = self._attempts.killed(KILLED, kill, state.pace, settings.every_steps)
            if ended.is_killed:
                state.killed_s += ended.wall_s
                break
            self._note_end(ended)
            if state.is_stuck:
                return
        state.problems += [f"kill {kill.number}: {text}" for text in _problems(ended)]
        state.kills.append(_entry(kill, ended))
        state.save(self._folder)
        begun = f"resumed from step {ended.resumed_from}, " if ended.resumed_from else ""
        where = f"before a step ({kill.phase})"
        if ended.step:
            where = f"in {kill.phase} at step {ended.step}"
        text = f"{begun}{kill.describe(settings.ranks)} {where}; step {ended.saved[1]} is committed"
        _say(bar, f"kill {kill.number + 1} of {total}: {text}")

    def _within_run(self, kill: Kill) -> Kill:
        """Returns the kill, or one in start-up if the run would end before it."""
        latest = self._folder.run(KILLED).newest_step() + STEPS_SPREAD * self._settings.every_steps
        return kill if latest < self._settings.steps else replace(kill, phase="start-up")


def _say(bar: Any, text: str) -> None:
    bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _problems(ended: AttemptOutcome) -> list[str]:
    """Returns the problems of an attempt that was killed."""
    before, after = ended.saved
    faults = [f"process left: {command}" for command in ended.left]
    if after < before:
        faults.append(f"step {before} was committed before it, {after} is the newest after it")
    if ended.resumed_from is not None and ended.resumed_from != before:
        faults.append(f"step {before} was committed, the attempt resumed from {ended.resumed_from}")
    if not ended.is_killed:
        faults.append("the run ended before it could be killed")
    elif 0 < ended.exit_code < 128 and ended.exit_code not in KILLED_CODES:
        faults.append(f"the launcher ended with exit code {ended.exit_code}")
    return faults


def _entry(kill: Kill, ended: AttemptOutcome) -> dict[str, object]:
    """Returns the entry of a kill in drill.json."""
    return {
        **{name: getattr(kill, name) for name in ("number", "phase", "target")},
        "saved": ended.saved[1],
        "steps_lost": max(0, ended.step - ended.saved[1]),
        **{name: getattr(ended, name) for name in ("step", "resumed_from", "first_step_s", "exit_code")},
        **{name: round(getattr(ended, name), 3) for name in ("gone_s", "wall_s")},
    }

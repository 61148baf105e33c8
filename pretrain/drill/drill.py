"""The drill, start to end.

    golden run, uninterrupted            ->  its pace: seconds to the first step, a step, a save
    killed run, the same config          ->  kill number 0, 1, ... (watch.py), each followed by a start that resumes
    complete the killed run              ->  compare: ledger, weights, moments, what is left behind (verdict.py)

The state is written after each kill: an interrupted drill, or one that is done in parts, continues with the next.
"""

import secrets
from dataclasses import replace
from pathlib import Path

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
from pretrain.drill.watch import DrillProgress, Kill, Target, newest_step, plan_kill
from pretrain.errors import EXIT_HANG, EXIT_OK, EXIT_RESUME_ME, EXIT_UNAVAILABLE, LaunchError
from pretrain.utils.io import remove_dir, write_file

MAX_MISSES = 3
KILLED_CODES = {EXIT_RESUME_ME, EXIT_HANG, EXIT_UNAVAILABLE}
"""Exit codes of a launcher after a killed rank, besides signals: peers were stopped, or noticed it first."""


def plan_steps(config: RunConfig, kills: int, every_steps: int) -> int:
    """Returns how many steps a drill takes by itself: as many as the kills need, of the config's."""
    return min(config.train.last_step, steps_for(kills, every_steps))


def steps_for(kills: int, every_steps: int) -> int:
    """Returns how many steps so many kills need: one gets a run five quarters of a checkpoint further, at most.

    So it was on an idle machine; on a busy one it was half a checkpoint. What is left after the last kill is trained at
    once; of a run that comes to its end before, all later kills are in start-up.
    """
    return max(4 * every_steps, -(-5 * kills * every_steps // 4))


class Drill:
    """One drill in its folder.

    Args:
        config: Config of the user.
        folder: Output folder.
        ranks: Ranks of a run.
        seed: Seed of the kills.
        target: Target of the kills.
        steps: Steps of a run.
        every_steps: Checkpoint interval in steps.

    Raises:
        ConfigError: The folder holds something else.
        LaunchError: This system has no /proc.
    """

    def __init__(
        self, config: RunConfig, folder: Path, ranks: int, seed: int, target: Target, steps: int, every_steps: int
    ) -> None:
        check_platform()
        self._folder = DrillFolder(folder)
        self._settings = DrillSettings(dump_config(config), ranks, seed, target, steps, every_steps)
        self._state = open_state(self._folder, self._settings)
        self._save()  # from now on the folder is known as a drill's
        self._attempts = DrillAttempts(self._folder, secrets.token_hex(8), ranks)
        for name in (GOLDEN, KILLED):
            write_file(self._folder.config(name), dump_config(self._config_of(config, name)).encode())

    @property
    def num_done(self) -> int:
        """Kills so far."""
        return len(self._state.kills)

    def _config_of(self, config: RunConfig, name: str) -> RunConfig:
        """Returns the config of a run: shorter, more checkpoints, deterministic, no wandb."""
        settings = self._settings
        changes = {
            "run": config.run.model_copy(update={"dir": str(self._folder.path), "name": name}),
            "train": config.train.model_copy(update={"stop_after": settings.steps}),
            "checkpoint": config.checkpoint.model_copy(update={"every_steps": settings.every_steps}),
            "tracking": config.tracking.model_copy(update={"wandb": "off"}),
        }
        if config.engine.device != "cpu":
            changes["engine"] = config.engine.model_copy(update={"deterministic": True})
        return config.model_copy(update=changes)

    def run(self, kills: int, at_most: int | None, progress: DrillProgress) -> DrillVerdict | None:
        """Does the remaining kills; returns the verdict, or None if kills are left for another call.

        Args:
            kills: Total number of kills.
            at_most: Kills in this call; None: all.
            progress: Receives lines and steps.

        Raises:
            LaunchError: The uninterrupted run ends with an error.
            DiskError: The state cannot be written.
        """
        shared_memory = list_shared_memory()
        if (needed := steps_for(kills, self._settings.every_steps)) > self._settings.steps:
            short = f"a run of {self._settings.steps} steps is short for {kills} kills"
            progress.say(f"{short}, which may need {needed}: kills near its end come in start-up; raise train.steps")
        if self._state.pace is None:
            self._state.pace = self._run_golden(progress)
            self._save()
        last = kills if at_most is None else min(kills, self.num_done + at_most)
        progress.begin("kills", kills)
        progress.reach(self.num_done)
        while self.num_done < last and not self._state.is_stuck:
            self._kill_once(kills, progress)
            progress.reach(self.num_done)
        if self.num_done < kills and not self._state.is_stuck:
            return None
        if not self._state.is_stuck:
            progress.begin("to the end", self._settings.steps)
            self._note_end(self._attempts.complete(KILLED, progress.reach))
        run = self._folder.run(KILLED)
        left = find_temporary(self._folder, run) + find_shared_memory(shared_memory) + find_leases(run)
        return judge(self._folder, self._state, left)

    def _run_golden(self, progress: DrillProgress) -> Pace:
        run = self._folder.run(GOLDEN)
        if run.path.exists():
            remove_dir(run.path)  # it was interrupted: not golden
        progress.say(f"the uninterrupted run: {self._settings.steps} steps, {self._settings.ranks} ranks")
        progress.begin("uninterrupted", self._settings.steps)
        ended = self._attempts.complete(GOLDEN, progress.reach)
        if ended.exit_code != EXIT_OK:
            raise LaunchError(
                f"the run ended with exit code {ended.exit_code}, without a kill: {self._end_of_log(GOLDEN)}",
                where=str(self._folder.log(GOLDEN)),
                fix="see that the config trains with `pretrain launch local`",
            )
        start_s = ended.first_step_s or ended.wall_s
        step_s = max(0.0, ended.wall_s - start_s) / self._settings.steps
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
            self._save()

    def _kill_once(self, total: int, progress: DrillProgress) -> None:
        """Kills once, and notes what came of it; tries again where the run had ended before."""
        state, settings = self._state, self._settings
        assert state.pace is not None
        kill = plan_kill(settings.seed, self.num_done, settings.target)
        for _ in range(MAX_MISSES):
            kill = self._within_run(kill)
            ended = self._attempts.killed(KILLED, kill, state.pace, settings.every_steps)
            if ended.is_killed:
                break
            self._note_end(ended)
            if state.is_stuck:
                return
        state.killed_s += ended.wall_s if ended.is_killed else 0.0
        state.problems += [f"kill {kill.number}: {text}" for text in _problems(ended)]
        state.kills.append(_entry(kill, ended))
        self._save()
        begun = f"resumed from step {ended.resumed_from}, " if ended.resumed_from else ""
        where = f"in {kill.phase} at step {ended.step}" if ended.step else f"before a step ({kill.phase})"
        what = f"{kill.describe(settings.ranks)} {where}"
        progress.say(f"kill {kill.number + 1} of {total}: {begun}{what}; step {ended.saved[1]} is committed")

    def _within_run(self, kill: Kill) -> Kill:
        """Returns the kill, or one in start-up, where the run would end before it."""
        settings = self._settings
        latest = newest_step(self._folder.run(KILLED)) + STEPS_SPREAD * settings.every_steps
        is_near_end = latest >= settings.steps
        return replace(kill, phase="start-up") if is_near_end else kill

    def _save(self) -> None:
        self._state.save(self._folder)


def _problems(ended: AttemptOutcome) -> list[str]:
    """Returns what is wrong with an attempt that was killed."""
    before, after = ended.saved
    found = [f"process left: {command}" for command in ended.left]
    if after < before:
        found.append(f"step {before} was committed before it, {after} is the newest after it")
    if ended.resumed_from is not None and ended.resumed_from != before:
        found.append(f"step {before} was committed, the attempt resumed from {ended.resumed_from}")
    if not ended.is_killed:
        found.append("the run ended before it could be killed")
    elif 0 < ended.exit_code < 128 and ended.exit_code not in KILLED_CODES:
        found.append(f"the launcher ended with exit code {ended.exit_code}")
    return found


def _entry(kill: Kill, ended: AttemptOutcome) -> dict[str, object]:
    """Returns the entry of a kill in drill.json."""
    return {
        "number": kill.number,
        "phase": kill.phase,
        "target": kill.target,
        "step": ended.step,
        "saved": ended.saved[1],
        "resumed_from": ended.resumed_from,
        "steps_lost": max(0, ended.step - ended.saved[1]),
        "first_step_s": ended.first_step_s,
        "gone_s": round(ended.gone_s, 3),
        "wall_s": round(ended.wall_s, 3),
        "exit_code": ended.exit_code,
    }

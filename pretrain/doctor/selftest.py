"""`pretrain doctor --selftest CONFIG`: checks that training is correct on these machines, in a few steps of a config.

    each ZeRO stage trains the same few steps        the same samples, and losses within rounding of each other
    a run is killed, resumed, and compared           by `pretrain drill`: ledger, weights and moments equal in bits;
                                                     over several nodes by ranks of the job: the ledger equal in bits

The runs are made small (small.py), have a folder of their own, and are removed where all is well.
"""

import json
import math
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pretrain.config.load import load_config
from pretrain.config.run import RunConfig
from pretrain.doctor.check import Check
from pretrain.doctor.small import TrialOptions, small_overrides
from pretrain.doctor.spawn import WITHIN_S, Trial, end_of, rank_environment, run_command, start_command
from pretrain.errors import EXIT_DIVERGED, EXIT_OK, ConfigError
from pretrain.run.folder import RunDir
from pretrain.tracking.audit import AuditRow, compare, read_audit
from pretrain.utils.io import remove_dir, write_file

STEPS = 4
DRILL_STEPS, DRILL_EVERY = 8, 2
JOB_STEPS, JOB_EVERY, KILL_AT = 24, 4, 9
DONE_WITHIN_S = 120.0
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
"""Relative, of a step's loss. Stages sum gradients in another order: in fp32 that is the last digits, in 16 bits the
weights that come out differ in their last bit, of 8 (bf16) or 11."""
_MUON_FP32 = 1e-4
"""Muon's iteration works in bf16 at every precision."""
_DRILL = "kill and resume"
# Ports after those of the stages.
_FIRST_TURN = 10
_POLL_S = 0.01
_DONE_POLL_S = 0.5


def run_selftest(asked: TrialOptions, tell: Callable[[str], None]) -> list[Check]:
    """Runs the stages and the drill; returns the verdicts. Minutes: each run imports torch.

    Args:
        asked: Options of the trial.
        tell: Receives progress messages.
    """
    checks, ledgers = [], {}
    for stage in range(4):
        check, ledger = _run_stage(asked, stage, tell)
        checks.append(check)
        if ledger:
            ledgers[f"stage {stage}"] = ledger
    if asked.place.rank == 0:
        checks.append(compare_ledgers(ledgers, tolerance_of(asked.loaded)))
    tell(f"kill and resume: {DRILL_STEPS} steps, uninterrupted and killed")
    checks.append(_kill_in_job(asked) if asked.place.is_started else _run_drill(asked))
    if asked.place.is_started:
        _say_done(asked)
    is_well = all(check.status != "fail" for check in checks)
    if asked.place.rank == 0 and is_well and (not asked.place.is_started or _wait_for_others(asked)):
        remove_dir(asked.folder)
    return checks


def tolerance_of(config: RunConfig) -> float:
    """Returns how far apart the losses of two stages may be, relatively."""
    if config.engine.precision == "fp32" and config.optim.kind == "muon":
        return _MUON_FP32
    return TOLERANCES[config.engine.precision]


def _overrides(asked: TrialOptions, name: str, steps: int, *more: str) -> list[str]:
    small = small_overrides(asked.loaded, asked.cluster, asked.folder, name, steps, zero_stage=0)
    return [*asked.overrides, *small, *more]


def _run_stage(asked: TrialOptions, stage: int, tell: Callable[[str], None]) -> tuple[Check, list[AuditRow]]:
    name = f"stage {stage}"
    overrides = _overrides(asked, f"stage-{stage}", STEPS, "engine.kind=deepspeed", f"engine.zero_stage={stage}")
    if stage < 3:
        overrides.append("engine.offload_params=none")
    if not stage:
        overrides.append("engine.offload_optimizer=none")
    try:
        load_config(asked.config, overrides)
    except ConfigError as error:
        return Check(
            name, "warn", f"left out: {error.what.splitlines()[0]}", "nothing: this config cannot run at it"
        ), []
    tell(f"{name}: {STEPS} steps on {asked.cluster.size} rank{'s' if asked.cluster.size > 1 else ''}")
    log = asked.folder / f"stage-{stage}.log"
    if asked.place.is_started:
        log = asked.folder / f"stage-{stage}-rank-{asked.place.rank}.log"
        trial = end_of(start_command(["train", asked.config, *overrides], log, rank_environment(1 + stage)), log)
    else:
        arguments = ["launch", "local", asked.config, *overrides, "--ranks", str(asked.cluster.size)]
        trial = run_command(arguments, log)
    if trial.exit_code != EXIT_OK:
        return _failed(name, trial, log), []
    if asked.place.rank:
        return Check(name, "pass", "rank 0 has the ledger"), []
    ledger = read_audit(RunDir(asked.folder / f"stage-{stage}").audit)
    return Check(name, "pass", f"{len(ledger)} steps, loss {float.fromhex(ledger[-1].loss):.5f}"), ledger


def _failed(name: str, trial: Trial, log: Path) -> Check:
    return Check(name, "fail", f"exit code {trial.exit_code}: {trial.error}", f"see {log}", trial.exit_code)


def compare_ledgers(ledgers: Mapping[str, Sequence[AuditRow]], tolerance: float) -> Check:
    """Compares ledgers with the first: the same samples exactly, losses within a tolerance."""
    name = "stages agree"
    if len(ledgers) < 2:
        return Check(name, "fail", "fewer than two stages have trained", "see what the stages say", EXIT_DIVERGED)
    (first, wanted), *others = ledgers.items()
    worst, where = 0.0, ""
    for other, rows in others:
        if [(row.digest, row.tokens) for row in rows] != [(row.digest, row.tokens) for row in wanted]:
            text = f"{other} has read other samples than {first}"
            return Check(name, "fail", text, "report it as a bug, with both audit.jsonl", EXIT_DIVERGED)
        for mine, its in zip(rows, wanted, strict=True):
            loss, expected = float.fromhex(mine.loss), float.fromhex(its.loss)
            apart = abs(loss / expected - 1) if expected and math.isfinite(loss / expected) else math.inf
            if apart >= worst:
                worst, where = apart, f"{other} at step {mine.step}"
    if not worst:
        return Check(name, "pass", f"losses of {', '.join(ledgers)} are equal in bits")
    text = f"losses of {', '.join(ledgers)} within {worst:.1e} of {first} ({where}); {tolerance:.0e} is allowed"
    if worst > tolerance:
        fix = "see to the versions of torch and NCCL on all nodes, and to memory errors (nvidia-smi -q)"
        return Check(name, "fail", text, fix, EXIT_DIVERGED)
    return Check(name, "pass", text)


def _run_drill(asked: TrialOptions) -> Check:
    folder = asked.folder / "drill"
    overrides = _overrides(asked, "drill", DRILL_STEPS)
    options = ["--kills", "1", "--ranks", str(asked.cluster.size), "--steps", str(DRILL_STEPS)]
    options += ["--every", str(DRILL_EVERY), "--output", str(folder), "--json"]
    log = asked.folder / "drill.log"
    trial = run_command(["drill", asked.config, *overrides, *options], log)
    try:
        verdict = json.loads(trial.output)
    except ValueError:
        return _failed(_DRILL, trial, log)
    if not verdict["passed"]:
        return Check(_DRILL, "fail", "; ".join(verdict["problems"]), f"see {folder}", EXIT_DIVERGED)
    text = f"one kill in {', '.join(verdict['phases'])}, {verdict['restart_s']:.0f} s to go on; equal in bits"
    return Check(_DRILL, "pass", text)


# Kill and resume over the ranks of a job, on several nodes: every rank starts a rank of its own, three times.
#
# golden    to its end
# killed    the last rank is killed after a checkpoint; the others notice, and end by themselves
# again     the same command resumes, to its end; then the two ledgers must be equal in bits


def _kill_in_job(asked: TrialOptions) -> Check:
    """Trains, kills, resumes and compares, as one rank of the job; the verdict of rank 0 counts."""
    is_victim = asked.place.rank == asked.place.size - 1
    mark = asked.folder / "killed.at"
    runs = [("golden", False), ("killed", is_victim), ("killed", False)]
    for turn, (name, kills) in enumerate(runs, start=_FIRST_TURN):
        overrides = _overrides(asked, name, JOB_STEPS, f"checkpoint.every_steps={JOB_EVERY}")
        log = asked.folder / f"{name}-{turn}-rank-{asked.place.rank}.log"
        process = start_command(["train", asked.config, *overrides], log, rank_environment(turn))
        if kills:
            _kill_at(process, RunDir(asked.folder / name), mark)
        trial = end_of(process, log)
        if trial.exit_code != EXIT_OK and turn != _FIRST_TURN + 1:
            return Check(_DRILL, "fail", f"{name}: exit code {trial.exit_code}: {trial.error}", f"see {log}")
    if asked.place.rank:
        return Check(_DRILL, "pass", "rank 0 compares the ledgers")
    if not mark.is_file():
        fix = "nothing, or a larger config: these steps are too quick for it"
        return Check(_DRILL, "warn", "the run ended before it could be killed", fix)
    different = compare(RunDir(asked.folder / "golden").audit, RunDir(asked.folder / "killed").audit)
    if different is not None:
        text = f"the resumed run is not the uninterrupted one: {different}"
        return Check(_DRILL, "fail", text, f"see {asked.folder}", EXIT_DIVERGED)
    where = f"rank {asked.place.size - 1} killed at step {mark.read_text(encoding='ascii')}"
    return Check(_DRILL, "pass", f"{where}, {JOB_STEPS} steps; the ledgers are equal in bits")


def _say_done(asked: TrialOptions) -> None:
    """Tells the other ranks that this one has read all that it needs of the folder."""
    write_file(_done(asked, asked.place.rank), b"")


def _wait_for_others(asked: TrialOptions) -> bool:
    """Waits until no rank needs the folder any more; returns False after 2 minutes."""
    deadline = time.monotonic() + DONE_WITHIN_S
    while not all(_done(asked, rank).exists() for rank in range(asked.place.size)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_DONE_POLL_S)
    return True


def _done(asked: TrialOptions, rank: int) -> Path:
    return asked.folder / f"rank-{rank}.done"


def _kill_at(process: subprocess.Popen[bytes], run: RunDir, mark: Path) -> None:
    """Kills a rank once the ledger has KILL_AT steps, and writes the step to `mark`, unless it ends before."""
    deadline = time.monotonic() + WITHIN_S
    while process.poll() is None and time.monotonic() < deadline:
        step = len(run.audit.read_bytes().splitlines()) if run.audit.is_file() else 0
        if step >= KILL_AT:
            process.send_signal(signal.SIGKILL)
            if process.wait() == -signal.SIGKILL:
                mark.write_text(str(step), encoding="ascii")
            return
        time.sleep(_POLL_S)

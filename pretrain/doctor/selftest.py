"""`pretrain doctor --selftest CONFIG`: checks that training is correct on these machines.

    each ZeRO stage trains the same few steps   the same samples, losses within rounding
    a run is killed, resumed, and compared      by `pretrain drill`: ledger, weights, moments equal;
                                                by ranks of a job on several nodes: the ledger equal

The runs are made small (small.py), in a folder of their own, which is removed if all passes.
"""

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pretrain.config.load import load_config
from pretrain.config.run import RunConfig
from pretrain.doctor.check import Check
from pretrain.doctor.small import TrialOptions, small_overrides
from pretrain.doctor.spawn import WITHIN_S, Trial, end_of, run_command, start_command
from pretrain.errors import EXIT_DIVERGED, EXIT_OK, ConfigError
from pretrain.run.folder import RunDir
from pretrain.tracking.audit import AuditRow, compare, read_audit
from pretrain.utils.io import remove_dir, write_file
from pretrain.utils.units import plural

STEPS = 4
DRILL_STEPS, DRILL_EVERY = 8, 2
JOB_STEPS, JOB_EVERY, KILL_AT = 24, 4, 9
DONE_WITHIN_S = 120.0
# Relative, of a step's loss. Stages sum gradients in another order: in fp32 the last digits differ,
# in 16 bits the last bit of the resulting weights, of 8 (bf16) or 11.
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
_DRILL = "kill and resume"
_FIRST_TURN = 10  # ports after those of the stages


def run_selftest(asked: TrialOptions, tell: Callable[[str], None]) -> list[Check]:
    """Runs the stages and the drill; returns their checks. Minutes: each run imports torch."""
    place = asked.place
    checks: list[Check] = []
    ledgers = {}
    for stage in range(4):
        check, ledger = _run_stage(asked, stage, tell)
        checks.append(check)
        if ledger:
            ledgers[check.name] = ledger
    if place.rank == 0:
        checks.append(compare_ledgers(ledgers, tolerance_of(asked.loaded)))
    tell(f"kill and resume: {DRILL_STEPS} steps, uninterrupted and killed")
    checks.append(_kill_in_job(asked) if place.is_started else _run_drill(asked))
    # A rank that has read all that it needs of the folder writes a file.
    num_ranks = place.size if place.is_started else 0
    done = [asked.folder / f"rank-{rank}.done" for rank in range(num_ranks)]
    if done:
        write_file(done[place.rank], b"")
    if place.rank == 0 and all(check.status != "fail" for check in checks):
        deadline = time.monotonic() + DONE_WITHIN_S
        while not all(path.exists() for path in done):
            if time.monotonic() > deadline:
                return checks
            time.sleep(0.5)
        remove_dir(asked.folder)
    return checks


def tolerance_of(config: RunConfig) -> float:
    """Returns the largest relative difference between losses of two stages."""
    if config.engine.precision == "fp32" and config.optim.kind == "muon":
        return 1e-4  # Muon's iteration works in bf16 at every precision
    return TOLERANCES[config.engine.precision]


def _overrides(asked: TrialOptions, name: str, steps: int) -> list[str]:
    small = small_overrides(asked.loaded, asked.cluster, asked.folder, name, steps, zero_stage=0)
    return [*asked.overrides, *small]


def _start_rank(asked: TrialOptions, overrides: list[str], turn: int, log: Path) -> subprocess.Popen[bytes]:
    """Starts a rank that meets those of the other ranks; each turn, from 1, has its own port."""
    environment = {**os.environ, "MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + turn)}
    return start_command(["train", asked.config, *overrides], log, environment)


def _run_stage(asked: TrialOptions, stage: int, tell: Callable[[str], None]) -> tuple[Check, list[AuditRow]]:
    """Trains a few steps at a ZeRO stage; returns the check, and the ledger on rank 0."""
    name = f"stage {stage}"
    overrides = _overrides(asked, f"stage-{stage}", STEPS)
    overrides += ["engine.kind=deepspeed", f"engine.zero_stage={stage}"]
    if stage < 3:
        overrides.append("engine.offload_params=none")
    if not stage:
        overrides.append("engine.offload_optimizer=none")
    try:
        load_config(asked.config, overrides)
    except ConfigError as error:
        text = f"left out: {error.what.splitlines()[0]}"
        return Check(name, "warn", text, "nothing: this config cannot run at it"), []
    num_ranks = asked.cluster.size
    tell(f"{name}: {STEPS} steps on {plural(num_ranks, 'rank')}")
    if asked.place.is_started:
        log = asked.folder / f"stage-{stage}-rank-{asked.place.rank}.log"
        trial = end_of(_start_rank(asked, overrides, 1 + stage, log), log)
    else:
        log = asked.folder / f"stage-{stage}.log"
        options = ["--ranks", str(num_ranks)]
        trial = run_command(["launch", "local", asked.config, *overrides, *options], log)
    if trial.exit_code != EXIT_OK:
        return _failed(name, trial, log), []
    if asked.place.rank:
        return Check(name, "pass", "rank 0 has the ledger"), []
    ledger = read_audit(RunDir(asked.folder / f"stage-{stage}").audit)
    return Check(name, "pass", f"{len(ledger)} steps, loss {float.fromhex(ledger[-1].loss):.5f}"), ledger


def _failed(name: str, trial: Trial, log: Path) -> Check:
    return Check(name, "fail", f"exit code {trial.exit_code}: {trial.error}", f"see {log}", trial.exit_code)


def compare_ledgers(ledgers: Mapping[str, Sequence[AuditRow]], tolerance: float) -> Check:
    """Compares ledgers with the first: equal samples, losses within a relative tolerance."""
    name = "stages agree"
    if len(ledgers) < 2:
        text = "fewer than two stages have trained"
        return Check(name, "fail", text, "fix the stages first", EXIT_DIVERGED)
    (first, wanted), *others = ledgers.items()
    worst = 0.0
    where = ""
    for other, rows in others:
        if [(row.digest, row.tokens) for row in rows] != [(row.digest, row.tokens) for row in wanted]:
            text = f"{other} has read other samples than {first}"
            return Check(name, "fail", text, "report it as a bug, with both audit.jsonl", EXIT_DIVERGED)
        for row, reference in zip(rows, wanted, strict=True):
            ratio = float.fromhex(row.loss) / (float.fromhex(reference.loss) or math.nan)
            apart = abs(ratio - 1) if math.isfinite(ratio) else math.inf
            if apart >= worst:
                worst = apart
                where = f"{other} at step {row.step}"
    if not worst:
        return Check(name, "pass", f"losses of {', '.join(ledgers)} are equal in bits")
    text = f"losses of {', '.join(ledgers)} within {worst:.1e} of {first} ({where})"
    text += f"; {tolerance:.0e} is allowed"
    if worst > tolerance:
        fix = "check the versions of torch and NCCL on all nodes, and memory errors (nvidia-smi -q)"
        return Check(name, "fail", text, fix, EXIT_DIVERGED)
    return Check(name, "pass", text)


def _run_drill(asked: TrialOptions) -> Check:
    """Kills and resumes a run on ranks of this machine."""
    folder = asked.folder / "drill"
    options = ["--kills", "1", "--ranks", str(asked.cluster.size), "--steps", str(DRILL_STEPS)]
    options += ["--every", str(DRILL_EVERY), "--output", str(folder), "--json"]
    log = asked.folder / "drill.log"
    overrides = _overrides(asked, "drill", DRILL_STEPS)
    trial = run_command(["drill", asked.config, *overrides, *options], log)
    try:
        verdict = json.loads(trial.output)
    except ValueError:
        return _failed(_DRILL, trial, log)
    if not verdict["passed"]:
        return Check(_DRILL, "fail", "; ".join(verdict["problems"]), f"see {folder}", EXIT_DIVERGED)
    kill = f"one kill in {', '.join(verdict['phases'])}"
    return Check(_DRILL, "pass", f"{kill}, {verdict['restart_s']:.0f} s to resume; equal in bits")


def _kill_in_job(asked: TrialOptions) -> Check:
    """Trains, kills, resumes and compares, as one rank of a job; the check of rank 0 counts."""
    # To the end; until the last rank is killed, which the others notice; and resumed to the end.
    victim = asked.place.size - 1
    mark = asked.folder / "killed.at"
    for turn, name in enumerate(("golden", "killed", "killed"), start=_FIRST_TURN):
        overrides = [*_overrides(asked, name, JOB_STEPS), f"checkpoint.every_steps={JOB_EVERY}"]
        log = asked.folder / f"{name}-{turn}-rank-{asked.place.rank}.log"
        process = _start_rank(asked, overrides, turn, log)
        is_killed = turn == _FIRST_TURN + 1
        if is_killed and asked.place.rank == victim:
            _kill_at(process, RunDir(asked.folder / name), mark)
        trial = end_of(process, log)
        if trial.exit_code != EXIT_OK and not is_killed:
            text = f"{name}: exit code {trial.exit_code}: {trial.error}"
            return Check(_DRILL, "fail", text, f"see {log}")
    if asked.place.rank:
        return Check(_DRILL, "pass", "rank 0 compares the ledgers")
    if not mark.is_file():
        fix = "nothing, or a larger config: these steps are too quick for it"
        return Check(_DRILL, "warn", "the run ended before it could be killed", fix)
    different = compare(RunDir(asked.folder / "golden").audit, RunDir(asked.folder / "killed").audit)
    if different is not None:
        text = f"the resumed run is not the uninterrupted one: {different}"
        return Check(_DRILL, "fail", text, f"see {asked.folder}", EXIT_DIVERGED)
    where = f"rank {victim} killed at step {mark.read_text(encoding='ascii')}"
    return Check(_DRILL, "pass", f"{where}, {JOB_STEPS} steps; the ledgers are equal in bits")


def _kill_at(process: subprocess.Popen[bytes], run: RunDir, mark: Path) -> None:
    """Kills a rank once the ledger has KILL_AT steps, and writes the step to `mark`."""
    deadline = time.monotonic() + WITHIN_S
    while process.poll() is None and time.monotonic() < deadline:
        step = len(run.audit.read_bytes().splitlines()) if run.audit.is_file() else 0
        if step >= KILL_AT:
            process.send_signal(signal.SIGKILL)
            if process.wait() == -signal.SIGKILL:
                mark.write_text(str(step), encoding="ascii")
            return
        time.sleep(0.01)

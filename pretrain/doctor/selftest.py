"""`pretrain doctor --selftest CONFIG`: checks that training is correct on these machines.

    each ZeRO stage trains the same few steps   the same samples, losses within rounding
    compiled blocks and plain ones take a step  gradients of each parameter within rounding, in fp32
    a run is killed, resumed, and compared      by `pretrain drill`: ledger, weights, moments equal;
                                                by ranks of a job on several nodes: the ledger equal

The runs are made small (small.py), in a folder of their own, which is removed if all passes.
"""

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.checkpoint.format import list_checkpoints
from pretrain.config.load import load_config
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.doctor.check import Check
from pretrain.doctor.small import TrialOptions, small_overrides
from pretrain.doctor.spawn import WITHIN_S, Trial, end_of, run_command, start_command
from pretrain.errors import EXIT_DIVERGED, EXIT_OK, ConfigError, LaunchError
from pretrain.run.folder import RunDir
from pretrain.tracking.audit import AuditRow, compare, read_audit
from pretrain.utils.io import remove_dir, write_file
from pretrain.utils.net import reserved_port
from pretrain.utils.safe_read import parse_json
from pretrain.utils.units import plural

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 4
DRILL_STEPS, DRILL_EVERY = 8, 2
JOB_STEPS, JOB_EVERY, KILL_AT = 24, 4, 9
DONE_WITHIN_S = 120.0
# Relative, of a step's loss. Stages sum gradients in another order: in fp32 the last digits differ,
# in 16 bits the last bit of the resulting weights, of 8 (bf16) or 11.
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
GRADIENT_TOLERANCE = 1e-3
"""Relative, of a parameter's gradient in fp32. Kernels differ by 1e-6 to 1e-5; a lost part by 1e-2."""
TINY = 1e-30
_LEAST_SHARE = 1e-3
"""Of the root mean square of all gradients: a smaller gradient is compared with this."""
_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_DROPOUTS = ("dropout", "attention_dropout", "drop_path")
_COMPILED = "compiled blocks"
_DRILL = "kill and resume"


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
    if isinstance(asked.loaded.model, ModelConfig) and asked.loaded.engine.compiles(asked.cluster.device):
        checks.append(_run_compiled(asked, tell))
    tell(f"kill and resume: {DRILL_STEPS} steps, uninterrupted and killed")
    checks.append(_kill_in_job(asked) if place.is_started else _run_drill(asked))
    _leave_folder(asked, has_failed=any(check.status == "fail" for check in checks))
    return checks


def _leave_folder(asked: TrialOptions, *, has_failed: bool) -> None:
    """Removes the folder once no rank reads it, unless a check has failed."""
    place = asked.place
    # A rank that has read all that it needs of the folder writes a file.
    num_ranks = place.size if place.is_started else 0
    done = [asked.folder / f"rank-{rank}.done" for rank in range(num_ranks)]
    if done:
        write_file(done[place.rank], b"")
    if place.rank or has_failed:
        return
    deadline = time.monotonic() + DONE_WITHIN_S
    while not all(path.exists() for path in done):
        if time.monotonic() > deadline:
            return
        time.sleep(0.5)
    remove_dir(asked.folder)


def tolerance_of(config: RunConfig) -> float:
    """Returns the largest relative difference between losses of two stages."""
    if config.engine.precision == "fp32" and config.optim.record.is_in_bf16:
        return 1e-4
    return TOLERANCES[config.engine.precision]


def _overrides(asked: TrialOptions, name: str, steps: int) -> list[str]:
    small = small_overrides(asked.loaded, asked.cluster, asked.folder, name, steps, zero_stage=0)
    return [*asked.overrides, *small]


@contextmanager
def _started_rank(asked: TrialOptions, overrides: list[str], name: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a rank, which meets the other ones at a port that rank 0 has found free.

    Raises: LaunchError: Rank 0 has written none.
    """
    file = asked.folder / f"{name}.port"
    with ExitStack() as held:
        if asked.place.rank == 0:
            asked.folder.mkdir(parents=True, exist_ok=True)
            write_file(file, str(held.enter_context(reserved_port(None))).encode())
        deadline = time.monotonic() + WITHIN_S
        while not file.is_file() and time.monotonic() < deadline:
            time.sleep(0.05)
        if not file.is_file():
            raise LaunchError(f"rank 0 has not written {file} in {WITHIN_S:.0f} s", fix="see its log")
        environment = {**os.environ, "MASTER_PORT": file.read_text(encoding="ascii")}
        yield start_command(["train", asked.config, *overrides], log, environment)


def _train(asked: TrialOptions, name: str, overrides: list[str]) -> tuple[Trial, Path]:
    """Trains on all ranks; returns how it ended, and the log."""
    if asked.place.is_started:
        log = asked.folder / f"{name}-rank-{asked.place.rank}.log"
        with _started_rank(asked, overrides, name, log) as process:
            return end_of(process, log), log
    log = asked.folder / f"{name}.log"
    options = ["--ranks", str(asked.cluster.size)]
    return run_command(["launch", "local", asked.config, *overrides, *options], log), log


def _left_out(asked: TrialOptions, name: str, overrides: list[str]) -> Check | None:
    """Returns a warning if the config cannot run with the overrides."""
    try:
        load_config(asked.config, overrides)
    except ConfigError as error:
        text = f"left out: {error.what.splitlines()[0]}"
        return Check(name, "warn", text, "nothing: this config cannot run at it")
    return None


def _run_stage(asked: TrialOptions, stage: int, tell: Callable[[str], None]) -> tuple[Check, list[AuditRow]]:
    """Trains a few steps at a ZeRO stage; returns the check, and the ledger on rank 0."""
    name, run = f"stage {stage}", f"stage-{stage}"
    overrides = _overrides(asked, run, STEPS)
    overrides += ["engine.kind=deepspeed", f"engine.zero_stage={stage}"]
    if stage < 3:
        overrides.append("engine.offload_params=none")
    if not stage:
        overrides.append("engine.offload_optimizer=none")
    if left_out := _left_out(asked, name, overrides):
        return left_out, []
    tell(f"{name}: {STEPS} steps on {plural(asked.cluster.size, 'rank')}")
    trial, log = _train(asked, run, overrides)
    if trial.exit_code != EXIT_OK:
        return _failed(name, trial, log), []
    if asked.place.rank:
        return Check(name, "pass", "rank 0 has the ledger"), []
    ledger = read_audit(RunDir(asked.folder / run).audit)
    return Check(name, "pass", f"{len(ledger)} steps, loss {float.fromhex(ledger[-1].loss):.5f}"), ledger


def _run_compiled(asked: TrialOptions, tell: Callable[[str], None]) -> Check:
    """Takes a step with compiled blocks and one with plain ones, and compares the gradients."""
    # Without dropout, of which compiled blocks draw other numbers. In fp32: what is left out of a
    # gradient can be less than bf16 rounds.
    exact = ["engine.precision=fp32", "engine.fp8=off"]
    for name in asked.loaded.stacks:
        stack = getattr(asked.loaded.model, name)
        exact += [f"model.{name}.{key}=0" for key in _DROPOUTS if getattr(stack, key)]
    for run in ("plain", "compiled"):
        overrides = [*_overrides(asked, run, 1), *exact, f"engine.compile={str(run == 'compiled').lower()}"]
        if left_out := _left_out(asked, _COMPILED, overrides):
            return left_out
        tell(f"{_COMPILED}: a step in fp32, {run}")
        trial, log = _train(asked, run, overrides)
        if trial.exit_code != EXIT_OK:
            return _failed(_COMPILED, trial, log)
    if asked.place.rank:
        return Check(_COMPILED, "pass", "rank 0 has the gradients")
    plain, compiled = (list_checkpoints(RunDir(asked.folder / run).checkpoints)[-1] for run in ("plain", "compiled"))
    return compare_gradients(plain, compiled)


def compare_gradients(plain: Path, compiled: Path) -> Check:
    """Compares gradients of the first step of two runs, of which the first moments are multiples."""
    from pretrain.checkpoint.load import read_pairs

    pairs = [(name, one, other) for name, _, one, other in read_pairs((plain, compiled), _FIRST_MOMENTS)]
    if not pairs:
        return Check(_COMPILED, "warn", "left out: this optimizer keeps no mean of gradients", "nothing")
    apart, worst = farthest(pairs)
    text = f"gradients of {len(pairs)} parameters within {apart:.1e} of those of plain blocks ({worst})"
    text += f"; {GRADIENT_TOLERANCE:.0e} is allowed"
    if apart <= GRADIENT_TOLERANCE:
        return Check(_COMPILED, "pass", text)
    return Check(_COMPILED, "fail", text, "use another version of torch, or engine.compile=false", EXIT_DIVERGED)


def farthest(pairs: Iterable[tuple[str, "Tensor", "Tensor"]]) -> tuple[float, str]:
    """Returns the largest relative distance of the second tensor of a name from the first, and the name."""
    norms, distances, sizes = {}, {}, {}
    for name, one, other in pairs:
        norms[name], distances[name] = float(one.norm()), float((other - one).norm())
        sizes[name] = one.numel()
    # The gradient of a bias of keys is 0 but for rounding.
    least = _LEAST_SHARE * math.hypot(*norms.values()) / math.sqrt(sum(sizes.values()))
    apart = {name: distances[name] / max(norm, least * math.sqrt(sizes[name]), TINY) for name, norm in norms.items()}
    worst = max(apart, key=lambda name: apart[name] if math.isfinite(apart[name]) else math.inf)
    return apart[worst], worst


def _failed(name: str, trial: Trial, log: Path) -> Check:
    return Check(name, "fail", f"exit code {trial.exit_code}: {trial.error}", f"see {log}", trial.exit_code)


def compare_ledgers(ledgers: Mapping[str, Sequence[AuditRow]], tolerance: float) -> Check:
    """Compares ledgers with the first: equal samples, losses within a relative tolerance."""
    name = "stages agree"
    if len(ledgers) < 2:
        text = "fewer than two stages have trained"
        return Check(name, "fail", text, "fix the stages first", EXIT_DIVERGED)
    (first, wanted), *rest = ledgers.items()
    worst = 0.0
    where = ""
    for other, rows in rest:
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
    trusted = [f"--extend={name}" for name in asked.loaded.extend]
    trial = run_command([*trusted, "drill", asked.config, *overrides, *options], log)
    try:
        verdict = parse_json(trial.output)
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
    for turn, name in (("golden", "golden"), ("killed", "killed"), ("resumed", "killed")):
        overrides = [*_overrides(asked, name, JOB_STEPS), f"checkpoint.every_steps={JOB_EVERY}"]
        log = asked.folder / f"{turn}-rank-{asked.place.rank}.log"
        is_killed = turn == "killed"
        with _started_rank(asked, overrides, turn, log) as process:
            if is_killed and asked.place.rank == victim:
                _kill_at(process, RunDir(asked.folder / name), mark)
            trial = end_of(process, log)
        if trial.exit_code != EXIT_OK and not is_killed:
            text = f"{turn}: exit code {trial.exit_code}: {trial.error}"
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

"""Drills of the arm `ranks`: aborted groups, disturbed, lost and continued runs, saves beside training."""

import shutil
import signal
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.gpu_job import Job
from benchmarks.gpu_layouts import ALONE
from benchmarks.gpu_rank import Task
from benchmarks.gpu_rank_runs import RankRuns, are_close, differences, first_difference, read_ledger
from pretrain.checkpoint.format import list_checkpoints
from pretrain.errors import EXIT_HANG, EXIT_OK, EXIT_RESUME_ME, ConfigError
from pretrain.run.folder import RunDir
from pretrain.run.heartbeat import LONG_FACTOR
from pretrain.tracking.audit import read_audit
from pretrain.utils.jsonl import read_rows

TIMEOUT_S = (20, 40)
"""`engine.timeout_s` of a run that loses a rank; the rehearsal may be on a busy machine, where a start takes longer."""
LAST_WORDS_S = 30.0
"""Time beyond its limit in which a rank that has lost another must have ended."""
FREE_S = 1.0
"""Longest time from an abort to the end of the wait that it ends."""
STALL_S = 0.5


def abort(runs: RankRuns) -> None:
    """Aborts groups in which a rank waits alone, and makes the next ones."""
    with runs.pool.take("abort", 2) as job:
        job.begin([asdict(Task("abort"))])
        rows = job.wait_for_row(0, runs.limit_s)
        job.wait_for_rank(1, runs.limit_s)
        if not rows:
            runs.write_failure("abort: two ranks", 2, job.codes()[0], job.last_lines(0))
            return
    generations = rows[0]["generations"]
    is_right = all(one["right"] for one in generations)
    # gloo frees a rank only when its peer has closed the connection.
    is_free = runs.bench.rehearse or all(one["freed_s"] < FREE_S for one in generations)
    runs.write("abort: two ranks", 2, held=is_right and is_free, value=generations)


def race(runs: RankRuns) -> None:
    """Compares disturbed runs with calm ones in every bit; then leaves out a wait, which must show."""
    sizes = runs.sizes
    words = [*sizes.race, f"train.steps={sizes.race_steps}", f"checkpoint.every_steps={sizes.save_every}"]
    words.append("engine.deterministic=true")
    tasks = []
    for stage in (3, 2):
        at_stage = [*words, f"engine.zero_stage={stage}"]
        tasks.append(runs.task(f"calm, ZeRO {stage}", at_stage))
        tasks.append(runs.task(f"disturbed, ZeRO {stage}", at_stage, disturbs=True))
    unordered = runs.task("a wait left out, ZeRO 3", [*words, "engine.zero_stage=3"], disturbs=True, unordered=True)

    def ended(task: Task, code: int, figures: dict[str, Any]) -> None:
        calm = runs.folder(f"calm, {task.name.split(', ')[1]}")
        ours = runs.folder(task.name)
        if code != EXIT_OK:
            runs.write_failure(f"race: {task.name}", 2, code, **figures)
        elif task.unordered:
            seen = first_difference(calm, ours)
            runs.write(f"race: {task.name}", 2, held=seen is not None, value=seen or "not noticed", **figures)
        elif task.disturbs:
            seen, steps = first_difference(calm, ours), len(read_audit(ours.audit))
            held = seen is None and steps == sizes.race_steps and figures["sleeps"] > 0
            runs.write(f"race: {task.name}", 2, held=held, value=seen or "equal", steps=steps, **figures)

    runs.run("race", 2, [*tasks, unordered], ended)


def _long_run(runs: RankRuns) -> list[str]:
    """Returns the overrides of a run that is interrupted."""
    sizes = runs.sizes
    length = [f"train.steps={sizes.long_steps}", f"checkpoint.every_steps={sizes.save_every}"]
    exact = ["engine.deterministic=true", f"engine.timeout_s={runs.bench.pick(*TIMEOUT_S)}"]
    return [*runs.overrides_of("dense"), *length, *exact, "engine.zero_stage=2", "batch.micro=4"]


def _wait_for_step(runs: RankRuns, job: Job, run: str) -> None:
    """Waits until the ledger of a run has the step at which it is interrupted."""
    ledger = runs.folder(run).audit

    def is_there() -> bool:
        return ledger.exists() and len(read_audit(ledger)) >= runs.sizes.interrupted_at

    job.wait_for(is_there, runs.limit_s)


def lose(runs: RankRuns, run: str, number: signal.Signals) -> None:
    """Kills or freezes rank 1 in the middle of a run, and waits for the end of rank 0."""
    with runs.pool.take(run, 2) as job:
        job.begin([asdict(runs.task(run, _long_run(runs)))])
        _wait_for_step(runs, job, run)
        job.send(number, 1)
        # Within a save, which has three times as long.
        code, seconds = job.wait_for_rank(0, LONG_FACTOR * runs.bench.pick(*TIMEOUT_S) + LAST_WORDS_S)
        named = next((line for line in job.errors() if "rank 1" in line), None)
        value = {"exit_code": code, "seconds": round(seconds, 2), "named": named}
        held = code == EXIT_HANG and named is not None
        log = {} if held else {"log": job.last_lines(0)}
        runs.write(f"{run}: rank 1 of 2 by {number.name}", 2, held=held, value=value, **log)


def start_again(runs: RankRuns) -> None:
    """Continues the killed run, and one that SIGTERM stops, on the same ranks and on others.

    Raises: ConfigError: No run was killed.
    """
    killed = runs.folder("kill")
    if not list_checkpoints(killed.checkpoints):
        raise ConfigError("skipped: no run was killed", fix="use --groups kill again")
    words = _long_run(runs)
    others = {
        "ZeRO 3": [*words, "engine.zero_stage=3"],
        "ZeRO 1, tensor 2": [*words, "engine.zero_stage=1", "parallel.tensor=2", "batch.micro=8"],
        "one process": [*words, *ALONE, "batch.micro=8"],
    }
    moved = {}
    for name, changed in others.items():
        folder = runs.folder(f"killed, as {name}").path
        shutil.copytree(killed.path, folder / "kill", ignore=shutil.ignore_patterns("lease*", ".lock*"))
        arguments = runs.task("kill", [*changed, f"run.dir={folder}"]).arguments
        moved[name] = Task(f"killed, as {name}", arguments)
    runs.pool.prepare("continued", 2)
    runs.pool.prepare("continued alone", 1)
    stopped = runs.task("stopped", words)
    with runs.pool.take("again", 2) as job:
        job.begin([asdict(stopped)])
        _wait_for_step(runs, job, "stopped")
        for rank in range(2):
            job.send(signal.SIGTERM, rank)
        codes = [job.wait_for_rank(rank, runs.limit_s)[0] for rank in range(2)]
    value = {"exit_codes": codes, "step": len(read_audit(runs.folder("stopped").audit))}
    runs.write("again: stopped by SIGTERM", 2, held=codes == [EXIT_RESUME_ME] * 2, value=value)

    def ended(task: Task, code: int, figures: dict[str, Any]) -> None:
        calm = runs.folder("uninterrupted")
        count = 1 if task == moved["one process"] else 2
        if code != EXIT_OK:
            runs.write_failure(f"again: {task.name}", count, code, **figures)
        elif task in moved.values():
            apart = differences(read_ledger(calm), read_ledger(RunDir(runs.folder(task.name).path / "kill")))
            runs.write(f"again: {task.name}", count, held=are_close(apart), value=apart, **figures)
        elif task.name != "uninterrupted":
            ours = runs.folder(task.name)
            seen, starts = first_difference(calm, ours), max(row.attempt for row in read_audit(ours.audit))
            shown = {"value": seen or "equal", "starts": starts}
            held = seen is None and starts == 2
            runs.write(f"again: {task.name}, continued on the same", 2, held=held, **shown, **figures)

    alone = moved.pop("one process")
    tasks = [runs.task("uninterrupted", words), runs.task("kill", words), stopped, *moved.values()]
    moved["one process"] = alone
    runs.run("continued", 2, tasks, ended)
    runs.run("continued alone", 1, [alone], ended)


def save(runs: RankRuns) -> None:
    """Saves a model whose state is on the GPU while it trains: seconds in which each rank is held, and steps."""
    steps, every = 12, 4
    words = [*runs.sizes.saved, f"train.steps={steps}", f"checkpoint.every_steps={every}", "engine.zero_stage=2"]
    with runs.pool.take("save", 2) as job:
        job.begin([asdict(runs.task("save", [*words, "batch.micro=8"], times_saves=True))])
        rows = job.wait_for_row(0, runs.limit_s)
        job.wait_for_rank(1, runs.limit_s)
        if not rows or rows[0]["code"] != EXIT_OK:
            runs.write_failure("save: two ranks", 2, job.codes()[0], job.last_lines(0))
            return
        stalls = {f"rank {rank}": read_rows(job.folder / f"saves-{rank}.jsonl") for rank in range(2)}
    folder = runs.folder("save")
    metrics = read_rows(folder.metrics)
    step_s = {row["step"]: row["step_time_s"] for row in metrics if row.get("step_time_s")}
    after = {step: seconds for step, seconds in step_s.items() if step > every and step % every == 1}
    calm = [seconds for step, seconds in step_s.items() if step > 2 and step not in after]
    newest = list_checkpoints(folder.checkpoints)[-1]
    value = {
        "stall_s": {rank: [row["stall_s"] for row in rows] for rank, rows in stalls.items()},
        "write_s": [round(row["checkpoint_write_s"], 3) for row in metrics if "checkpoint_write_s" in row],
        "step_s": round(median(calm), 4),
        "step_after_a_save_s": [round(seconds, 4) for seconds in after.values()],
        "bytes": sum(file.stat().st_size for file in newest.iterdir()),
    }
    longest = max(row["stall_s"] for rows in stalls.values() for row in rows)
    runs.write("save: two ranks", 2, held=longest <= STALL_S, value=value)

"""Run folders as training leaves them, written by hand: of any length, with restarts, texts and any name."""

import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from pretrain.report.metric_columns import MetricColumns, MetricTable

BEGAN = datetime(2026, 3, 1, 8, 0, tzinfo=UTC)
SECONDS = 2.0
"""A step of these runs."""


def at(hours: float) -> str:
    """A time so many hours after the run began, as run.json has it."""
    return (BEGAN + timedelta(hours=hours)).isoformat(timespec="seconds")


def attempt(number: int, begin: float, end: float | None, from_step: int, **facts: Any) -> dict[str, Any]:
    """An entry of run.json, from and to in hours."""
    ended = {} if end is None else {"ended": at(end), "exit_code": 0, "reason": "done"}
    return {
        "number": number, "started": at(begin), "host": "node1", "pid": 1, "world_size": 8, "from_step": from_step,
        "engine": "deepspeed ZeRO 2, bf16, 8 x H100", "versions": {"torch": "2.13.0", "pretrain": "0.1.0"},
        **ended, **facts,
    }  # fmt: skip


def metric_row(step: int) -> dict[str, Any]:
    """A row of metrics, a smooth function of its step."""
    wave = math.sin(step / 37)
    return {
        "step": step, "loss": 2 + 8 / (1 + step / 200) + 0.05 * wave, "accuracy": 0.5 + 0.02 * wave,
        "lr": 3e-4 / (1 + step / 5000), "grad_norm": 1 + 0.2 * wave, "tokens": step * 1000.0, "skipped_steps": 0.0,
        "epochs": step / 1e5, "tokens_per_s": 1000 / SECONDS, "step_time_s": SECONDS, "data_wait": 0.01, "eta_s": 5.0,
        "forward_s": 0.6, "backward_s": 1.2, "other_s": 0.2, "mfu": 0.41, "memory_bytes": 60.0 * 2**30,
    }  # fmt: skip


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tables_of(rows: list[dict[str, Any]]) -> list[MetricTable]:
    """Rows as a report has them."""
    columns = MetricColumns()
    columns.add(rows)
    return columns.tables()


def write_run(
    folder: Path,
    rows: list[dict[str, Any]],
    *,
    name: str = "first",
    attempts: list[dict[str, Any]] | None = None,
    samples: list[dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes a run folder; returns it."""
    folder.mkdir(parents=True)
    attempts = attempts if attempts is not None else [attempt(1, 0.0, 1.0, 0)]
    record = {"id": "1a2b3c4d", "name": name, "created": at(0), "attempts": attempts}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {"seed": 1, "train": {"steps": 1000}}))
    write_lines(folder / "metrics.jsonl", rows)
    if samples:
        write_lines(folder / "samples.jsonl", samples)
    return folder


def write_journal(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the journal of a run's Slurm jobs."""
    (folder / "launch").mkdir()
    write_lines(folder / "launch" / "journal.jsonl", rows)


def write_long_run(folder: Path, num_rows: int = 130_000, every: int = 10) -> Path:
    """Writes a month of training: two sources, norms of 12 layers, a spike, steps not finite, four starts, texts."""
    rows: list[dict[str, Any]] = []
    hours = num_rows * every * SECONDS / 3600
    for step in range(every, num_rows * every + 1, every):
        row = metric_row(step)
        row |= {"loss_web": row["loss"] + 0.2, "loss_code": row["loss"] - 0.4}
        if step % (every * 100) == 0:
            row |= {f"grad_norm/decoder.{n}": row["grad_norm"] * (0.2 + 0.01 * n) for n in range(12)}
        rows.append(row)
        if step % (every * 1000) == 0:
            loss = row["loss"] + 0.1
            rows.append({"step": step, "val_loss": loss, "val_perplexity": math.exp(loss), "val_tokens": 5e5})
            saving = {"checkpoint_step": step, "checkpoint_stall_s": 0.4, "checkpoint_write_s": 21.0}
            rows.append({"step": step, **saving})
    rows[num_rows // 2]["loss"] = 40.0
    rows[num_rows // 2 + 1]["grad_norm"] = 500.0
    rows[num_rows // 3]["loss"] = rows[num_rows // 3]["grad_norm"] = None
    quarter = num_rows // 4 * every
    times = [(0.0, 0.24 * hours), (0.26 * hours, 0.5 * hours), (0.56 * hours, 0.8 * hours), (0.8 * hours, None)]
    jobs = [{"slurm": {"job": "4711", "restart": n, "nodes": "node[1-2]", "num_nodes": 2}} for n in range(4)]
    ends = [{"exit_code": 75, "reason": "SIGUSR1"}, {"exit_code": 76, "reason": "rank 3 hangs in backward"}, {}, {}]
    attempts = [
        attempt(n + 1, begin, end, n * quarter) | (ends[n] if end else {}) | jobs[n]
        for n, (begin, end) in enumerate(times)
    ]
    del attempts[2]["ended"], attempts[2]["exit_code"], attempts[2]["reason"]
    attempts[2]["recovery"] = {"number": 1, "lost": "rank 3 hangs", "seconds": 2.5}
    note = {"rank": 3, "kind": "slow", "step": 120, "text": "rank 3 on node2, GPU 1: computes 1.31 times as long"}
    attempts[1]["ranks"] = [note | {"until": 310}, note | {"step": 990}]
    texts = [
        {"step": step, "samples": [{"prompt": "Once upon", "text": f" a time, at step {step},\nthere was a loss."}]}
        for step in range(quarter, 4 * quarter + 1, quarter // 10)
    ]
    write_run(
        folder, rows, name="long", attempts=attempts, samples=texts, config={"seed": 1, "train": {"steps": 2_000_000}}
    )
    starts = [
        {"event": "start", "chain": "a", "job": "4711", "restart": n, "nodes": ["node1", "node2"], "world_size": 8,
         "step": n * quarter, "at": each["started"]}
        for n, each in enumerate(attempts)
    ]  # fmt: skip
    write_journal(folder, [{"event": "submit", "chain": "a", "job": "4711", "at": at(0)}, *starts])
    return folder

"""Runs of one tiny model under every layout (ranks, engine, ZeRO stage, precision), and what ranks do for their tests.

A layout is a list `[world size, kind, stage, precision]`, because it travels as JSON; its name is that of its folder.
What ranks do is called through `tests/helpers/ranks.py`, several runs one after another in the same processes.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format import list_checkpoints, load_manifest, step_name
from pretrain.checkpoint.fragments import FragmentReader
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.state import TrainState
from pretrain.config.load import load_config
from pretrain.dist import World
from pretrain.run.folder import RunDir
from tests.helpers.ranks import run_in_ranks

Layout = list[Any]
Job = dict[str, Any]
"""A run of one layout: `config` (path), `overrides`, and where its ranks are to leave what they saw."""

WORLD_SIZES = (1, 2, 3, 4)
PRECISIONS = ("fp32", "bf16")
ROWS = 12

CONFIG = """
seed: 7
run: {{dir: {runs}, name: run}}
data: {{path: {data}, lanes: 3, block_samples: 16}}
model:
  preset: llama-tiny
  max_seq_len: 32
  tied_embeddings: true
  decoder: {{width: 36, heads: 6, kv_heads: 2, head_width: 6, ff_width: 50, layers: 2}}
batch: {{global_tokens: 384, seq_len: 32, micro: 1}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 5}}}}
train: {{steps: 100}}
engine: {{kind: single, zero_stage: 0, precision: fp32, device: cpu}}
checkpoint: {{every_steps: 10, keep: 20}}
tracking: {{log_every_steps: 50, wandb: off}}
"""
# 36, 50 and the odd vocabulary of the corpus: partitions cut parameters in the middle, and leave padding at the end.


def all_layouts() -> list[Layout]:
    """World size 1 to 4, ZeRO 0 to 3 and no DeepSpeed at all, fp32 and bf16."""
    plain = {size: "single" if size == 1 else "ddp" for size in WORLD_SIZES}
    engines = [("deepspeed", stage) for stage in range(4)]
    return [
        [size, kind, stage, precision]
        for size in WORLD_SIZES
        for kind, stage in (*engines, (plain[size], 0))
        for precision in PRECISIONS
    ]


def name_of(layout: Layout) -> str:
    """`4-deepspeed-3-bf16`."""
    return "-".join(map(str, layout))


def overrides_of(layout: Layout, micro: int) -> list[str]:
    """The items that run a config under a layout."""
    _, kind, stage, precision = layout
    engine = f"engine={{kind: {kind}, zero_stage: {stage}, precision: {precision}}}"
    return [engine, f"batch.micro={micro}"]


def write_run(folder: Path, data: Path, origin: RunDir | None = None, step: int = 0, template: str = CONFIG) -> Path:
    """Makes a place for a run, which goes on from the checkpoint of `step` of `origin`; returns its config."""
    folder.mkdir(parents=True)
    config = folder / "run.yaml"
    config.write_text(template.format(runs=folder, data=data))
    if origin is not None:
        target = folder / "run"
        ignored = shutil.ignore_patterns("checkpoints", "logs", ".lock*", "lease*")
        shutil.copytree(origin.path, target, ignore=ignored)
        shutil.copytree(origin.checkpoints / step_name(step), target / "checkpoints" / step_name(step))
    return config


def run_dir(config: Path) -> RunDir:
    """The run folder of a config of `write_run`."""
    return RunDir(config.parent / "run")


def run_jobs(world: World, jobs: list[Job]) -> list[Any]:
    """Runs each job as `pretrain train` does; returns the exit code of each, and the ranges this rank held.

    A job with `saved` writes there, as a checkpoint of its own, what it holds between loading and its first step. One
    with `only_load` takes no step.
    """
    from accelerate.state import AcceleratorState, GradientState

    import pretrain.training.run as running

    real, found = running.train, []
    for job in jobs:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        held: list[list[Any]] = []

        def look(run: Any, state: TrainState, job: Job = job, held: list[list[Any]] = held) -> TrainState:
            for fragment in run.engine.state.held_fragments():
                held.extend([fragment.name, kind, fragment.offset, t.numel()] for kind, t in fragment.tensors.items())
            if "saved" in job:
                CheckpointManager(Path(job["saved"]), 2, world, {}).save(run.engine.state, state)
            return state if job.get("only_load") else real(run, state)

        running.train = look
        try:
            code = running.run_training(load_config(job["config"], job["overrides"]), world)
        finally:
            running.train = real
        found.append([code, held])
    return found


def contents(checkpoint: Path) -> dict[tuple[str, str], Any]:
    """Every weight and moment, whole and flat, by parameter and kind; asserts that the files hold each element once."""
    import math

    import numpy as np
    import torch
    from safetensors import safe_open

    manifest = load_manifest(checkpoint)
    seen: dict[tuple[str, str], Any] = {}
    for record in manifest.files:
        with safe_open(checkpoint / record.name, framework="np") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                name, _, rest = key.rpartition("/")
                kind, _, place = rest.partition("@")
                offset, _, columns = place.partition("+")
                times = seen.setdefault((name, kind), np.zeros(math.prod(manifest.shapes[name]), dtype=np.int64))
                length = file.get_slice(key).get_shape()[0]
                run, stride = map(int, columns.split(":")) if columns else (length, length)
                elements = np.arange(length)
                times[int(offset) + elements // run * stride + elements % run] += 1
    assert seen.keys() == {(name, kind) for name in manifest.shapes for kind in ("weight", *manifest.moments)}
    for key, times in seen.items():
        assert (times == 1).all(), f"{checkpoint}: {key} does not have every element once"
    reader = reader_of(checkpoint)
    values = {key: torch.empty(times.size) for key, times in seen.items()}
    for (name, kind), out in values.items():
        reader.read_into(name, kind, 0, out)
    return values


def reader_of(checkpoint: Path) -> FragmentReader:
    """Reads a checkpoint by ranges, as an engine does that loads it."""
    return FragmentReader(checkpoint / record.name for record in load_manifest(checkpoint).files)


def newest(run: RunDir) -> Path:
    """The last checkpoint of a run."""
    return list_checkpoints(run.checkpoints)[-1]


def ledger(run: RunDir) -> dict[int, dict[str, Any]]:
    """The rows of a ledger by step."""
    rows = [json.loads(line) for line in run.audit.read_text().splitlines()]
    return {row["step"]: row for row in rows}


def losses(rows: dict[int, dict[str, Any]]) -> list[float]:
    """The losses of a ledger."""
    return [float.fromhex(row["loss"]) for row in rows.values()]


def samples(rows: dict[int, dict[str, Any]]) -> list[tuple[str, int]]:
    """What a ledger says of its samples."""
    return [(row["digest"], row["tokens"]) for row in rows.values()]


def newest_of(folder: Path) -> Path:
    """The one checkpoint in a folder."""
    (found,) = folder.glob("step-*")
    return found


def run_steps(config: Path, ranks: int, stop: int, *more: str, stage: int = 2, **parallel: int) -> None:
    """Runs a config up to a step on so many ranks, with keys of `parallel:`; what they loaded is in `loaded-STOP`."""
    rows = ROWS * parallel.get("sequence", 1) * parallel.get("tensor", 1) // ranks
    overrides = [f"train.stop_after={stop}", f"batch.micro={rows}", *more]
    overrides += [f"parallel.{key}={shared}" for key, shared in parallel.items()]
    overrides.append(f"engine={{kind: deepspeed, zero_stage: {stage}, precision: fp32, device: cpu}}")
    job = {"config": str(config), "overrides": overrides, "saved": str(config.parent / f"loaded-{stop}")}
    for found in run_in_ranks("tests.helpers.topologies:run_jobs", ranks, {"jobs": [job]}):
        assert found[0][0] == 0

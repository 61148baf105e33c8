"""Time to load a checkpoint that another topology wrote, against one that the same topology wrote.

    python -m benchmarks.load_topology [--quick]

Two ranks over gloo, one thread each, at ZeRO 2 and at ZeRO 3, load the same weights and moments from checkpoints that
were written by themselves, by another ZeRO stage, by one rank and by four. Each load fills the engine's own state and
ends with the working weights refreshed. What is loaded is compared bit for bit before anything is timed. Checksums,
which every start verifies first, cost the same for all and are left out: with them the ratios are nearer to 1.

Files are in the page cache: a cold disk hides differences, it does not add any, as each byte is read once in all arms.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DS_ACCELERATOR"] = "cpu"

from benchmarks.common import Timing, is_conclusive, measure, print_row, ratio
from pretrain.utils.net import reserved_port
from pretrain_launch.local import rank_environment

MUST, AIM = 1.5, 1.1
NUM_RANKS = 2
VOCAB = 8192
SAVED = ((2, 2), (2, 3), (1, 2), (4, 2))
"""(ranks, ZeRO stage) that write a checkpoint each."""
STEP = 1


def main() -> None:
    """Writes the checkpoints, times the loads, prints ratios and the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer rounds")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        run_rank(json.loads(options.as_rank))
        return
    layers, width, rounds = (4, 256, 9) if options.quick else (8, 512, 21)
    with tempfile.TemporaryDirectory() as name:
        job = {"folder": name, "layers": layers, "width": width, "rounds": rounds}
        for size, stage in SAVED:
            start_ranks(size, {**job, "stage": stage, "task": "save"})
        found = {stage: start_ranks(NUM_RANKS, {**job, "stage": stage, "task": "load"}) for stage in (2, 3)}
    report({stage: {arm: [Timing(**t) for t in times] for arm, times in arms.items()} for stage, arms in found.items()})


def report(found: dict[int, dict[str, list[Timing]]]) -> None:
    """Prints the ratios of each loading stage, and the row."""
    figures: dict[str, Any] = {}
    for stage, timings in found.items():
        base = timings["same"]
        for arm, times in timings.items():
            wall, cpu = ratio(times, base, clock="wall_s"), ratio(times, base)
            median_ms = sorted(t.wall_s for t in times)[len(times) // 2] * 1e3
            held = "held" if wall.high <= MUST else "missed" if wall.low > MUST else "inconclusive"
            note = ("A/A" + ("" if is_conclusive(wall) else ", wider than 3%")) if arm == "same, again" else held
            print(f"ZeRO {stage}, written by {arm:22} {median_ms:8.1f} ms   wall {wall}   CPU {cpu}   {note}")
            figures[f"ZeRO {stage} from {arm}"] = {"ms": round(median_ms, 1), "wall": str(wall), "cpu": str(cpu)}
    print(f"must {MUST}, aim {AIM}")
    print_row("load at another topology", figures, ("torch", "deepspeed"))


def start_ranks(world_size: int, job: dict[str, Any]) -> Any:
    """Runs a job on real ranks; returns what rank 0 wrote."""
    result = Path(job["folder"]) / "result.json"
    command = [sys.executable, "-m", "benchmarks.load_topology", "--as-rank", json.dumps(job)]
    with reserved_port(None) as port:
        ranks = [
            subprocess.Popen(command, env=rank_environment(os.environ, rank, world_size, port, threads=1))
            for rank in range(world_size)
        ]
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"a rank ended with {codes}")
    return json.loads(result.read_text())


def run_rank(job: dict[str, Any]) -> None:
    """One rank: saves what it has drawn, or loads what others have saved."""
    from pretrain.dist import leave, read_world

    world = read_world()
    engine = build(world, job)
    found = save(world, engine, job) if job["task"] == "save" else load(engine, job)
    if world.is_main:
        (Path(job["folder"]) / "result.json").write_text(json.dumps(found))
    leave(0)


def build(world: Any, job: dict[str, Any]) -> Any:
    """An engine over a decoder, its weights drawn from one seed."""
    import torch

    from pretrain.config.data import BatchConfig, plan_batch
    from pretrain.config.engine import EngineConfig
    from pretrain.config.model import parse_model
    from pretrain.config.objective import ObjectiveConfig
    from pretrain.config.optim import OptimConfig
    from pretrain.config.presets import expand_preset
    from pretrain.engine.build import build_engine, start_accelerator
    from pretrain.model import build_model, init_weights
    from pretrain.objective import build_loss
    from pretrain.optim.build import build_optimizer
    from pretrain.optim.groups import group_parameters
    from pretrain.training.step import TrainModule

    torch.set_num_threads(1)
    stack = {"width": job["width"], "layers": job["layers"], "heads": 8, "kv_heads": 8, "ff_width": 3 * job["width"]}
    model_config = parse_model(expand_preset({"preset": "llama-tiny", "vocab_size": VOCAB, "decoder": stack}))
    config = EngineConfig(zero_stage=job["stage"], precision="fp32", device="cpu", timeout_s=120)
    plan = plan_batch(BatchConfig(global_tokens=4 * 128, seq_len=128, micro=1), world.size)
    accelerator = start_accelerator(config, 1.0, plan, 10**7, world)
    model = build_model(model_config, config, torch.device("cpu"))
    groups = group_parameters(model)
    init_weights(model, model_config, 5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    module = TrainModule(model, build_loss(ObjectiveConfig()))
    optimizer = build_optimizer(groups, OptimConfig(lr=1e-3), torch.device("cpu"))
    return build_engine(module, names, optimizer, accelerator, config, 1.0, world)


def save(world: Any, engine: Any, job: dict[str, Any]) -> str:
    """Gives the moments values that tell places apart, and commits a checkpoint."""
    import torch

    from pretrain.checkpoint.manager import CheckpointManager
    from pretrain.checkpoint.state import TrainState

    for fragment in engine.state.held_fragments():
        for kind, tensor in fragment.tensors.items():
            if kind != "weight":
                tensor.copy_(torch.arange(fragment.offset, fragment.offset + tensor.numel(), dtype=torch.float32))
    folder = Path(job["folder"]) / f"{world.size}-{job['stage']}"
    return str(CheckpointManager(folder, 2, world, {}).save(engine.state, TrainState(STEP, STEP)))


def load(engine: Any, job: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """Times the loads of all checkpoints, in random order, a barrier before each."""
    import torch
    import torch.distributed as td

    from pretrain.checkpoint.format import step_name
    from pretrain.checkpoint.load import load_checkpoint

    def path_of(size: int, stage: int) -> Path:
        return Path(job["folder"]) / f"{size}-{stage}" / step_name(STEP)

    own = (NUM_RANKS, job["stage"])
    places = {"same": path_of(*own)} | {
        f"{size} rank{'s' * (size > 1)} at ZeRO {stage}": path_of(size, stage)
        for size, stage in SAVED
        if (size, stage) != own
    }
    arms = {name: partial(load_checkpoint, path, engine.state) for name, path in places.items()}
    expected = None
    for work in arms.values():
        work()
        loaded = [tensor.clone() for piece in engine.state.held_fragments() for tensor in piece.tensors.values()]
        assert expected is None or all(map(torch.equal, loaded, expected)), "loads must give the same bits"
        expected = loaded
    timings = measure({**arms, "same, again": arms["same"]}, job["rounds"], before=td.barrier)
    return {arm: [asdict(timing) for timing in times] for arm, times in timings.items()}


if __name__ == "__main__":
    main()

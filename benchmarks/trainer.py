"""What our trainer costs over a bare DeepSpeed loop: whole steps of `pretrain.train.loop.train`, ZeRO 0 to 3.

    python -m benchmarks.trainer [--quick]

Two ranks over gloo, one thread each, fp32; every stage is one job in which all arms live side by side and take blocks
of ten steps in random order. All start from the same weights, and their losses on the same first ten batches are
compared: within 1e-4, or no timing counts. The attention, model and loss code is the same in every arm.

    ours                 what `pretrain train` runs: its config, loader, loop, ledger, metrics and console; no wandb
    deepspeed            deepspeed.initialize with the bucket sizes that ours has, and engine(batch), backward, step;
                         batches in memory, the loss scale known beforehand, losses read by nobody
    deepspeed_defaults   the same without bucket sizes
    ddp                  torch's DistributedDataParallel and optimizer; for comparison, not judged

A target on time is judged by CPU time and by wall time, and only where A/A is within 3%. What has no noise decides the
exit code: a step of ours may have one collective more than the bare loop, of five float64.

`loop` is the time a step spends in our loop outside the engine's forward, backward and update, on the loop's thread of
rank 0: CPU time is what it does, wall time includes the wait for the other rank.
"""

import argparse
import contextlib
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
# Threads other than the main one would get heaps of another kind, and our loop runs in such a thread here only.
os.environ["MALLOC_ARENA_MAX"] = "1"

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import Timing, is_conclusive, measure, print_row, ratio
from pretrain import dist
from pretrain.checkpoint.state import TrainState
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.load import load_config
from pretrain.config.run import RunConfig
from pretrain.control import StopFlag
from pretrain.data.loader import StepBatch
from pretrain.data.shards import ShardWriter
from pretrain.dist import World
from pretrain.engine.deepspeed_config import deepspeed_config
from pretrain.engine.engine import Update
from pretrain.index import DataIndex, build_split, write_index
from pretrain.log import quiet_libraries, setup_logging
from pretrain.model import build_model, init_weights
from pretrain.objective import build_loss
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from pretrain.plan.params import count_parameters
from pretrain.tracking.audit import read_audit
from pretrain.train.build import Run, build_run
from pretrain.train.claim import Claim, claim_run
from pretrain.train.loop import train
from pretrain.train.module import TrainModule
from pretrain.types import Batch
from tests.helpers.ranks import run_in_ranks

RANKS = 2
VOCAB_SIZE = 8192
BLOCK_STEPS = 10  # One row of metrics a block.
COMPARED_STEPS = 10
COUNTED_STEPS = 4
LOSS_TOLERANCE = 1e-4
MUST, AIM = 0.97, 0.99
EXTRA_COLLECTIVES, EXTRA_BYTES = 1, 5 * 8
JUDGED = ("deepspeed", "deepspeed_defaults")


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and the rows of 128 tokens that a rank takes a step."""

    preset: str
    rows: int
    rounds: int


SIZES = {"1M": Size("llama-tiny", rows=2, rounds=20), "5M": Size("llama-5m", rows=1, rounds=12)}


def write_data(folder: Path) -> None:
    """Writes a shard folder of random documents of up to 300 tokens; small ids are frequent, so there is much to learn.

    A run copies its tokenizer and never reads it: an empty one will do.
    """
    rng = np.random.default_rng(0)
    (folder / "train").mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    writer = ShardWriter(folder / "train/part-00000-0000.tar", "uint16")
    for _ in range(8192):
        writer.add_document((VOCAB_SIZE * rng.random(int(rng.integers(1, 301))) ** 4).astype(np.int64))
    splits = {"train": build_split([writer.close()], 4 * writer.num_tokens)}
    write_index(folder, DataIndex("0" * 64, VOCAB_SIZE, "uint16", 0, splits))


def plan_run(folder: str, name: str, size: Size, stage: int) -> RunConfig:
    """Returns the config of a run: the quickstart's, but for data, sizes and stage; nothing saved or validated."""
    settings: dict[str, Any] = {
        "data.path": f"{folder}/data",
        "run.dir": f"{folder}/runs",
        "run.name": name,
        "model.preset": size.preset,
        "batch.seq_len": 128,
        "batch.micro": size.rows,
        "batch.global_tokens": 128 * size.rows * RANKS,
        "optim.schedule.kind": "constant",
        "optim.schedule.warmup_steps": 0,
        "train.steps": 1_000_000,
        "eval.every_steps": 0,
        "engine.device": "cpu",
        "engine.zero_stage": stage,
        "engine.timeout_s": 60,
        "checkpoint.every_steps": 0,
        "tracking.log_every_steps": BLOCK_STEPS,
        "tracking.wandb": '"off"',
    }
    return load_config("configs/run/quickstart.yaml", [f"{key}={value}" for key, value in settings.items()])


class _EndOfBenchmark(Exception):  # noqa: N818 (nothing went wrong)
    """Raised in the loop to leave it without a checkpoint."""


class SteppedLoader:
    """The run's loader, at which the loop waits whenever it has taken the steps that it was granted."""

    def __init__(self, loader: Iterator[StepBatch]) -> None:
        self._loader, self._left = loader, 0
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._around: Callable[[], Any] = contextlib.nullcontext
        self._stack = contextlib.ExitStack()
        self._closed = False
        self.first: list[StepBatch] = []

    def __next__(self) -> StepBatch:
        """Called by the loop, once a step."""
        if not self._left:
            self._stack.close()
            self._done.release()
            self._go.acquire()
            if self._closed:
                raise _EndOfBenchmark
            self._stack.enter_context(self._around())
        self._left -= 1
        batch = next(self._loader)
        if len(self.first) < COMPARED_STEPS:
            self.first.append(batch)
        return batch

    def grant(self, steps: int, around: Callable[[], Any]) -> None:
        """Lets the loop take `steps` steps, from one fetch to another, in a context of its thread."""
        self._left, self._around = steps, around
        self._go.release()

    def wait(self) -> None:
        """Waits until the loop waits, or has ended."""
        self._done.acquire()

    def leave(self) -> None:
        """Tells whoever waits that the loop has ended."""
        self._done.release()

    def close(self) -> None:
        """Ends the loop at its next fetch."""
        self._closed = True
        self._go.release()


class Trainer:
    """A run of ours, built and trained by the functions of `pretrain train`, in a thread that can be held."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self._claim: Claim = claim_run(config, world)
        self.run, state = build_run(self._claim, world, StopFlag())
        self._loader = self.run.loader
        self.steps = SteppedLoader(self._loader)
        self.run.loader = self.steps  # type: ignore[assignment]
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._train, args=(self.run, state), daemon=True)
        self._thread.start()
        self._wait()

    def _train(self, run: Run, state: TrainState) -> None:
        try:
            train(run, state)
        except _EndOfBenchmark:
            pass
        except BaseException as error:  # Raised again in the main thread.
            self._error = error
        self.steps.leave()

    def take(self, steps: int, around: Callable[[], Any] = contextlib.nullcontext) -> None:
        """Takes some steps."""
        self.steps.grant(steps, around)
        self._wait()

    def _wait(self) -> None:
        self.steps.wait()
        if self._error is not None:
            raise self._error

    def losses(self) -> list[float]:
        """Returns the losses of the first steps, from the ledger (rank 0's; other ranks have none)."""
        rows = read_audit(self._claim.folder.audit)
        return [float.fromhex(row.loss) for row in rows[:COMPARED_STEPS]]

    def close(self) -> None:
        """Ends the thread and closes what `pretrain train` closes."""
        self.steps.close()
        self._thread.join()
        self._loader.close()
        self.run.tracker.close()
        if self.run.audit is not None:
            self.run.audit.close()
        if self._claim.lock is not None:
            self._claim.lock.release()


@dataclass(slots=True)
class BareLoop:
    """What a peer's documentation shows, over batches in memory.

    Attributes:
        step: Takes a batch and the scale of its loss; returns this rank's scaled loss, whose mean over the ranks is the
            token mean over the global batch.
        batches: For ever.
    """

    step: Callable[[Batch, float], Tensor]
    batches: Iterator[tuple[Batch, float]]

    def take(self, steps: int, around: Callable[[], Any] = contextlib.nullcontext) -> list[Tensor]:
        """Takes some steps; returns their losses."""
        with around():
            return [self.step(*next(self.batches)) for _ in range(steps)]


def forget_accelerate() -> None:
    """Clears accelerate's process-wide state, so that a second engine can be built."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def build_module(config: RunConfig) -> tuple[TrainModule, torch.optim.Optimizer]:
    """Builds what every peer trains: our model with the weights that a run starts from, and our optimizer."""
    device = torch.device("cpu")
    model = build_model(config.model, PLAIN_ENGINE, device)
    init_weights(model, config.model, config.seed)
    optimizer = build_optimizer(group_parameters(model), config.optim, device)
    return TrainModule(model, build_loss(config.objective)), optimizer


def bare_deepspeed(run: Run, config: RunConfig, *, defaults: bool) -> Callable[[Batch, float], Tensor]:
    """Returns a step as DeepSpeed's guide to getting started has it."""
    import deepspeed

    module, optimizer = build_module(config)
    settings = deepspeed_config(config.engine, config.optim.grad_clip, run.plan, count_parameters(config.model))
    settings["gradient_clipping"] = config.optim.grad_clip
    if defaults:
        settings["zero_optimization"] = {"stage": config.engine.zero_stage}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)

    def step(batch: Batch, scale: float) -> Tensor:
        loss = engine(batch) * scale
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def bare_ddp(config: RunConfig) -> Callable[[Batch, float], Tensor]:
    """Returns a step of torch's DDP with its documented saving of a copy."""
    module, optimizer = build_module(config)
    wrapped = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)

    def step(batch: Batch, scale: float) -> Tensor:
        optimizer.zero_grad()
        loss = wrapped(batch) * scale
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), config.optim.grad_clip)
        optimizer.step()
        return loss.detach()

    return step


def build_peers(run: Run, config: RunConfig, batches: list[tuple[Batch, float]]) -> dict[str, BareLoop]:
    steps = {
        "deepspeed": bare_deepspeed(run, config, defaults=False),
        "deepspeed_defaults": bare_deepspeed(run, config, defaults=True),
        "ddp": bare_ddp(config),
    }
    return {name: BareLoop(step, itertools.cycle(batches)) for name, step in steps.items()}


def scaled_batches(steps: list[StepBatch]) -> list[tuple[Batch, float]]:
    """Returns this rank's batches of some steps, each with the scale that makes its sum of losses a global mean."""
    num_targets = dist.all_reduce_sum(torch.tensor([step.num_targets for step in steps])).tolist()
    return [(step.micro_batches[0], RANKS / total) for step, total in zip(steps, num_targets, strict=True)]


RING_PASSES = {
    "allreduce_": 2,
    "allgather_": 1,
    "_allgather_base_": 1,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_": 1,
    "broadcast_": 1,
    "barrier": 0,
}
"""How often the whole tensor goes round a ring of ranks; each then sends (N - 1) / N of it as often."""


@dataclass
class Traffic:
    """Collectives of a rank, and the bytes that it sends in them where they are rings."""

    calls: int = 0
    num_bytes: int = 0


class TrafficCounter(TorchDispatchMode):
    """Counts the collectives of this thread, those that DDP starts in C++ too; one torch does not know is an error."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            passes = RING_PASSES[func.overloadpacket.__name__]
            whole = max(_tensor_bytes(arg) for arg in args[:2])
            self._traffic.calls += 1
            self._traffic.num_bytes += passes * whole * (RANKS - 1) // RANKS
        return func(*args, **(kwargs or {}))


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_tensor_bytes(item) for item in value) if isinstance(value, list | tuple) else 0


def count_traffic(arm: Trainer | BareLoop) -> dict[str, int]:
    """Returns what a step of an arm sends."""
    total = Traffic()
    arm.take(COUNTED_STEPS, partial(TrafficCounter, total))
    assert total.calls % COUNTED_STEPS == total.num_bytes % COUNTED_STEPS == 0, "steps differ in what they send"
    return {"collectives": total.calls // COUNTED_STEPS, "bytes": total.num_bytes // COUNTED_STEPS}


@dataclass
class ClockedEngine:
    """Clocks what the loop does between its calls to an engine: one entry a step, CPU and wall seconds."""

    engine: Any
    between: list[list[float]] = field(default_factory=list)
    left_at: tuple[float, float] | None = None

    @property
    def device(self) -> torch.device:
        """The engine's."""
        return self.engine.device

    def forward_backward(self, batch: Batch, scale: float, is_last: bool) -> Tensor:
        """See `Engine.forward_backward`."""
        self.between.append([0.0, 0.0])
        with self._call():
            return self.engine.forward_backward(batch, scale, is_last)

    def update(self, learning_rate: float) -> Update:
        """See `Engine.update`."""
        with self._call():
            return self.engine.update(learning_rate)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        entered = time.thread_time(), time.perf_counter()
        if self.left_at is not None:
            for clock in range(2):
                self.between[-1][clock] += entered[clock] - self.left_at[clock]
        yield
        self.left_at = time.thread_time(), time.perf_counter()


def clock_loop(ours: Trainer, steps: int) -> dict[str, float]:
    """Returns microseconds a step that our loop takes outside the engine; the first, without a start, is left out."""
    clocked = ClockedEngine(ours.run.engine)
    ours.run.engine = clocked
    ours.take(steps + 1)
    ours.run.engine = clocked.engine
    cpu, wall = 1e6 * np.array(clocked.between[1:]).T
    return {"cpu_us": round(float(cpu.mean()), 1), "wall_us_median": round(float(np.median(wall)), 1)}


def run_job(world: World, size: str, stage: int, folder: str, rounds: int) -> dict[str, Any]:
    """What each rank does for one row; returns its times, losses and counts."""
    setup_logging(world.rank, world.size, Path(folder) / f"logs/rank-{world.rank}.log")
    ours = {}
    for name in ("ours", "ours_again"):
        forget_accelerate()
        ours[name] = Trainer(plan_run(folder, name, SIZES[size], stage), world)
    quiet_libraries()
    # One more than is compared: the ledger's row of a step is written after the fetch of the next one.
    for trainer in ours.values():
        trainer.take(COMPARED_STEPS + 1)
    first = ours["ours"]
    peers = build_peers(first.run, first.run.config, scaled_batches(first.steps.first))
    losses = {name: [float(loss) for loss in peer.take(COMPARED_STEPS + 1)[:-1]] for name, peer in peers.items()}
    if world.is_main:
        losses |= {name: trainer.losses() for name, trainer in ours.items()}
    arms: dict[str, Trainer | BareLoop] = {**ours, **peers}
    traffic = {name: count_traffic(arm) for name, arm in arms.items()}
    blocks = {name: partial(arm.take, BLOCK_STEPS) for name, arm in arms.items()}
    timings = measure(blocks, rounds, before=torch.distributed.barrier)
    loop = clock_loop(first, 5 * BLOCK_STEPS)
    for trainer in ours.values():
        trainer.close()
    times = {name: [[run.cpu_s, run.wall_s] for run in runs] for name, runs in timings.items()}
    return {"losses": losses, "traffic": traffic, "times": times, "loop": loop}


def compare_losses(ranks: list[dict[str, Any]]) -> float:
    """Returns the largest difference of an arm's loss from ours, and sees that there was something to compare."""
    expected = np.array(ranks[0]["losses"]["ours"])
    assert len(expected) == COMPARED_STEPS and expected[0] - expected[-1] > 0.1, f"nothing was learned: {expected}"
    found = {name: np.mean([rank["losses"][name] for rank in ranks], axis=0) for name in ranks[1]["losses"]}
    found["ours_again"] = np.array(ranks[0]["losses"]["ours_again"])
    worst = max(float(np.abs(losses - expected).max()) for losses in found.values())
    assert worst < LOSS_TOLERANCE, f"losses differ by {worst}: the arms do not do the same work"
    return worst


def join_times(ranks: list[dict[str, Any]]) -> dict[str, list[Timing]]:
    """Returns the blocks of each arm: CPU time of all ranks, wall time of the last."""
    return {
        arm: [
            Timing(sum(cpu for cpu, _ in block), max(wall for _, wall in block))
            for block in zip(*(rank["times"][arm] for rank in ranks), strict=True)
        ]
        for arm in ranks[0]["times"]
    }


def judge_traffic(traffic: dict[str, dict[str, int]]) -> bool:
    """Returns whether a step of ours sends no more than the bare loop's and one small all-reduce."""
    ours, bare = traffic["ours"], traffic["deepspeed"]
    return (
        ours["collectives"] <= bare["collectives"] + EXTRA_COLLECTIVES and ours["bytes"] <= bare["bytes"] + EXTRA_BYTES
    )


def report(size: str, stage: int, ranks: list[dict[str, Any]]) -> bool:
    """Prints a stage and its row; returns whether what has no noise holds."""
    timings, traffic = join_times(ranks), ranks[0]["traffic"]
    figures: dict[str, Any] = {"size": size, "stage": stage, "loss_difference": compare_losses(ranks)}
    for clock in ("cpu_s", "wall_s"):
        aa = ratio(timings["ours"], timings["ours_again"], clock=clock)
        ms = {
            arm: round(1e3 / BLOCK_STEPS * float(np.median([getattr(run, clock) for run in runs])), 2)
            for arm, runs in timings.items()
        }
        ratios = {peer: ratio(timings[peer], timings["ours"], clock=clock) for peer in (*JUDGED, "ddp")}
        verdicts = {}
        for peer in JUDGED:
            held = "aim" if ratios[peer].low >= AIM else "holds" if ratios[peer].low >= MUST else "missed"
            verdicts[peer] = held if is_conclusive(aa) else "inconclusive: A/A wider than 3%"
        shown = "  ".join(f"{peer} {value}" for peer, value in ratios.items())
        print(f"{size} ZeRO-{stage} {clock:6s} over {shown}  A/A {aa}  must be {MUST}: {verdicts['deepspeed']}")
        figures[clock] = {"ms": ms, "ratios": {p: str(r) for p, r in ratios.items()}, "aa": str(aa)}
        figures[clock]["verdicts"] = verdicts
    held = judge_traffic(traffic)
    loop = ranks[0]["loop"]
    share = loop["cpu_us"] / (1e3 * figures["cpu_s"]["ms"]["ours"] / RANKS)
    print(f"{size} ZeRO-{stage} loop {loop}, {share:.2%} of a step; a step sends {traffic}")
    print(f"{size} ZeRO-{stage} one small collective more than the bare loop: {'holds' if held else 'MISSED'}")
    figures |= {"loop": {**loop, "share_of_step": round(share, 4)}, "traffic": traffic, "traffic_holds": held}
    print_row("trainer", figures, ("torch", "deepspeed", "accelerate"))
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small model under ZeRO-2, under a minute")
    options = parser.parse_args()
    cases = [("1M", 2)] if options.quick else [(size, stage) for size in SIZES for stage in range(4)]
    held = True
    for size, stage in cases:
        rounds = 6 if options.quick else SIZES[size].rounds
        with tempfile.TemporaryDirectory() as folder:
            write_data(Path(folder) / "data")
            job = {"size": size, "stage": stage, "folder": folder, "rounds": rounds}
            held &= report(size, stage, run_in_ranks("benchmarks.trainer:run_job", RANKS, job, timeout_s=900))
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()

"""Cost of a save: time that the step waits, slowdown until the save is durable or in a bucket, and time of a load.

    python -m benchmarks.checkpoint [--quick]

192 MiB of fp32 state on the host (weights and two moments of 16.8M parameters, cut over the ranks), one thread a rank,
to a real disk. Every arm leaves the same tensors; ours and dcp's are read back and compared before any timing counts.

    ours                    `CheckpointManager.begin`, and every later call of the loop that follows the save; written,
                            CRCs, fsync, manifest, rename, all read back, beside the training
    torch.save              of the same tensors, one file a rank; with fsync, and without
    dcp.async_save          torch's asynchronous checkpoint (fsyncs too), by default, and with a stager that is kept
    memcpy                  of the same state, in one piece, to memory that is there

A stall is the time in which the caller can do nothing else: wall time, and CPU time of its thread beside it, which
other work on the machine disturbs less. Must: 0.35 of torch.save's without fsync, and no more than dcp.async_save's;
aim: 0.15, and 1.3 times a memcpy. `steps` takes blocks of steps (matrix products) with a save at their beginning.
`uploads` takes such blocks while the last save of ours is uploaded to an S3 server on the loopback (moto, in another
process of this machine, which takes of its cores too): wall time, and CPU time of the thread that steps.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.common import Timing, is_conclusive, print_row, ratio
from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.save import Save
from pretrain.checkpoint.state import TrainState
from pretrain.checkpoint.upload import Uploads
from pretrain.dist import World
from pretrain.run.folder import RunDir, begin_attempt
from pretrain.types import Fragment
from tests.helpers.ranks import run_in_ranks
from tests.helpers.servers import serve_s3

KINDS = ("weight", "exp_avg", "exp_avg_sq")
MATRICES = {"embed": 2**22} | {
    f"blocks.{block}.{part}": 2**18 for block in range(12) for part in ("qkv", "o", "up", "down")
}
SIZES = MATRICES | {f"blocks.{block}.norm.{number}": 512 for block in range(12) for number in range(2)}
STEP_PRODUCTS = 4
UPLOAD_BLOCKS = 4
"""Blocks of steps beside an upload, whose process takes one to start."""
MUST, AIM, AIM_MEMCPY = 0.35, 0.15, 1.3


class Store:
    """State of SIZES, parameter by parameter on one rank after another."""

    def __init__(self, world: World) -> None:
        mine = list(SIZES)[world.rank :: world.size]
        generator = torch.Generator().manual_seed(world.rank)
        self.tensors = {
            f"{name}/{kind}": torch.randn(SIZES[name], generator=generator) for name in mine for kind in KINDS
        }
        self.names = mine

    def owned_fragments(self) -> Iterator[Fragment]:
        """Yields every parameter of this rank."""
        for name in self.names:
            yield Fragment(name, 0, (SIZES[name],), {kind: self.tensors[f"{name}/{kind}"] for kind in KINDS})

    held_fragments = owned_fragments

    def scalars(self) -> dict[str, float]:
        """None."""
        return {}

    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        """Nothing follows."""


class Arms:
    """Each way to save. A call returns seconds: stall, stall by CPU, until durable, CPU of the process until then."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder, self.store = world, folder, Store(world)
        self.run = RunDir(folder / "ours")
        self.manager = CheckpointManager(self.run.checkpoints, 2, world, {})
        self.stager = DefaultStager(StagingOptions(False, False, False, False))  # all else needs CUDA, or processes
        self.flat = torch.cat(list(self.store.tensors.values()))
        self.copied, self.step = torch.empty_like(self.flat), 0

    def ours(self) -> list[float]:
        """Ours, followed to its end as the loop does: the ranks hear of each other before they go on."""
        watch, save = Watch(), None
        with watch:
            save = self.begin_ours()
            self.manager.hold()  # as if an update came at once
        while not save.is_finished:
            save.join()
            td.barrier()  # stands for the exchange of a step
            with watch:
                save.advance()
            if save.is_committed:
                watch.durable()
        return watch.figures()

    def begin_ours(self) -> Save:
        """Begins a save of ours."""
        self.step += 1
        return self.manager.begin(self.store, TrainState(step=self.step))

    def torch_save(self, sync: bool) -> list[float]:
        """torch.save, with or without fsync."""
        watch = Watch()
        with watch, self.path("torch.pt").open("wb") as file:
            torch.save(self.store.tensors, file)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        watch.durable()
        return watch.figures()

    def path(self, name: str) -> Path:
        """A file of this rank's."""
        return self.folder / f"{self.world.rank}.{name}"

    def begin_dcp(self, kept: bool) -> Any:
        """Begins a save of dcp's."""
        return dcp.async_save(
            self.store.tensors, checkpoint_id=self.folder / "dcp", async_stager=self.stager if kept else None
        )

    def dcp(self, kept: bool) -> list[float]:
        """dcp.async_save, until what it promises is there."""
        watch = Watch()
        with watch:
            pending = self.begin_dcp(kept)
        pending.result()
        watch.durable()
        return watch.figures()

    def memcpy(self) -> list[float]:
        """A copy of the state in memory."""
        watch = Watch()
        with watch:
            self.copied.copy_(self.flat)
        watch.durable()
        return watch.figures()


class Watch:
    """Adds up the time of its blocks, which are what the caller waits for."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.begun, self.begun_cpu = time.perf_counter(), time.process_time()
        self.until: list[float] = []

    def __enter__(self) -> None:
        self.entered, self.entered_cpu = time.perf_counter(), time.thread_time()

    def __exit__(self, *error: object) -> None:
        self.wall += time.perf_counter() - self.entered
        self.cpu += time.thread_time() - self.entered_cpu

    def durable(self) -> None:
        """Notes that what was saved is there; counts once."""
        self.until = self.until or [time.perf_counter() - self.begun, time.process_time() - self.begun_cpu]

    def figures(self) -> list[float]:
        """What a call of an arm returns."""
        return [self.wall, self.cpu, *self.until]


def take_step() -> None:
    """Multiplies matrices."""
    left, right, out = torch.ones(512, 512), torch.ones(512, 512), torch.empty(512, 512)
    for _ in range(STEP_PRODUCTS):
        torch.mm(left, right, out=out)


def take_steps(num_steps: int, arms: Arms, kind: str) -> float:
    """Returns the wall time of so many steps, at whose beginning a save of this kind is begun, and of its end."""
    begun, save, pending = time.perf_counter(), None, None
    if kind == "ours":
        save = arms.begin_ours()
    elif kind == "torch.save, fsync":
        arms.torch_save(True)
    elif kind == "dcp.async_save":
        pending = arms.begin_dcp(False)
    for _ in range(num_steps):
        take_step()
        if save is not None and not save.is_finished and save.is_done:
            save.advance()
    if save is not None and not save.is_finished:
        save.wait()
    if pending is not None:
        pending.result()
    return time.perf_counter() - begun


def take_steps_beside_upload(num_steps: int, arms: Arms, uploads: Uploads | None) -> list[float]:
    """Returns wall and CPU time of so many steps, beside an upload of a new save if any, and seconds of the upload."""
    if uploads is not None:
        arms.begin_ours().wait()
        uploads.offer(arms.run.checkpoints / f"step-{arms.step:08d}")
    begun, cpu = time.perf_counter(), time.thread_time()
    for _ in range(num_steps):
        take_step()
    wall, cpu = time.perf_counter() - begun, time.thread_time() - cpu
    if uploads is None:
        return [wall, cpu, 0.0]
    uploads.finish(lambda _: None, must=True)
    return [wall, cpu, sum(seconds for _, seconds in uploads.take_finished())]


def check_same(arms: Arms) -> None:
    """Sees that ours and dcp's hold what the store has."""
    expected = {key: tensor.clone() for key, tensor in arms.store.tensors.items()}
    arms.ours()
    arms.dcp(False)
    for load in (arms.manager.load_newest, lambda store: dcp.load(store.tensors, checkpoint_id=arms.folder / "dcp")):
        for tensor in arms.store.tensors.values():
            tensor.zero_()
        load(arms.store)
        assert all(torch.equal(arms.store.tensors[key], tensor) for key, tensor in expected.items())


def time_loads(arms: Arms) -> dict[str, Callable[[], Any]]:
    """Returns what loads the state, each its own format's last save."""

    def torch_load() -> None:
        for key, value in torch.load(arms.path("torch.pt"), weights_only=True).items():
            arms.store.tensors[key].copy_(value)

    def ours() -> None:
        load_checkpoint(arms.run.checkpoints / f"step-{arms.step:08d}", arms.store)

    return {
        "ours, verified": lambda: arms.manager.load_newest(arms.store),
        "ours": ours,
        "torch.load": torch_load,
        "dcp.load": lambda: dcp.load(arms.store.tensors, checkpoint_id=arms.folder / "dcp"),
    }


def run_rank(world: World, folder: str, rounds: int, num_steps: int) -> dict[str, Any]:
    """What a rank does: every arm once a round, in an order that all draw alike."""
    td.init_process_group("gloo", rank=world.rank, world_size=world.size)
    arms, rng = Arms(world, Path(folder)), random.Random(0)
    check_same(arms)
    saves: dict[str, Callable[[], list[float]]] = {
        "ours": arms.ours,
        "ours, again": arms.ours,
        "torch.save": lambda: arms.torch_save(False),
        "torch.save, fsync": lambda: arms.torch_save(True),
        "dcp.async_save": lambda: arms.dcp(False),
        "dcp.async_save, kept": lambda: arms.dcp(True),
        "memcpy": arms.memcpy,
    }
    loads = time_loads(arms)
    begin_attempt(arms.run, "ours", {})
    uploads = Uploads(
        upload="s3://bench/runs", run=arms.run, world=world, keep=2, keep_every_steps=0,
        retention=arms.manager.retention,
    )  # fmt: skip
    found: dict[str, dict[str, list[Any]]] = {"saves": {}, "loads": {}, "steps": {}, "uploads": {}}
    for number in range(rounds + 1):  # the first makes buffers
        for name in rng.sample(list(saves), len(saves)):
            td.barrier()
            figures = saves[name]()
            if number:
                found["saves"].setdefault(name, []).append(figures)
        for name in rng.sample(list(loads), len(loads)):
            td.barrier()
            begun = time.perf_counter()
            loads[name]()
            if number:
                found["loads"].setdefault(name, []).append(time.perf_counter() - begun)
        kinds = ("nothing", "nothing, again", "ours", "torch.save, fsync", "dcp.async_save") if world.size == 1 else ()
        for kind in rng.sample(kinds, len(kinds)):
            seconds = take_steps(num_steps, arms, kind)
            if number:
                found["steps"].setdefault(kind, []).append(seconds)
        kinds = ("nothing", "nothing, again", "upload") if world.size == 1 else ()
        for kind in rng.sample(kinds, len(kinds)):
            figures = take_steps_beside_upload(UPLOAD_BLOCKS * num_steps, arms, uploads if kind == "upload" else None)
            if number:
                found["uploads"].setdefault(kind, []).append(figures)
    return found


def report(num_ranks: int, ranks: list[dict[str, Any]]) -> None:
    """Prints tables, verdicts and the row of one number of ranks."""
    stalls: dict[str, list[Timing]] = {}
    figures: dict[str, Any] = {"ranks": num_ranks, "load": round(os.getloadavg()[0], 1)}
    for name, rounds in ranks[0]["saves"].items():
        by_round = list(zip(*(rank["saves"][name] for rank in ranks), strict=True))
        stalls[name] = [Timing(max(r[1] for r in runs), max(r[0] for r in runs)) for runs in by_round]
        durable = statistics.median(max(r[2] for r in runs) for runs in by_round)
        cpu = statistics.median(sum(r[3] for r in runs) for runs in by_round)
        wall, own = (statistics.median(getattr(t, clock) for t in stalls[name]) for clock in ("wall_s", "cpu_s"))
        figures[name] = {"stall_ms": round(1e3 * wall, 1), "stall_cpu_ms": round(1e3 * own, 1)}
        figures[name] |= {"durable_ms": round(1e3 * durable), "cpu_ms": round(1e3 * cpu), "rounds": len(rounds)}
        print(f"{num_ranks} ranks  {name:24} {figures[name]}")
    aims = {"torch.save": (MUST, AIM), "dcp.async_save": (1.0, 1.0), "memcpy": (None, AIM_MEMCPY)}
    for clock in ("wall_s", "cpu_s"):
        aa = ratio(stalls["ours"], stalls["ours, again"], clock=clock)  # type: ignore[arg-type]
        figures[f"{clock} A/A"] = str(aa)
        for peer in stalls:
            if peer.startswith("ours"):
                continue
            found = ratio(stalls["ours"], stalls[peer], clock=clock)  # type: ignore[arg-type]
            must, aim = aims.get(peer, (None, None))
            held = ""
            if must or aim:
                held = "aim" if aim and found.high <= aim else "holds" if must and found.high <= must else "missed"
                held = f": {held}{'' if is_conclusive(aa) else ' (inconclusive, A/A wider than 3%)'}"
            figures[f"{clock} over {peer}"] = str(found)
            print(f"{num_ranks} ranks  stall, {clock}: ours / {peer} = {found}{held}")
        print(f"{num_ranks} ranks  A/A, {clock}: {aa}")
    for group in ("loads", "steps"):
        median = {name: round(statistics.median(times), 3) for name, times in ranks[0][group].items()}
        figures[group] = median
        print(f"{num_ranks} ranks  {group}, s: {median}")
    figures |= report_uploads(ranks[0]["uploads"])
    print_row("checkpoint", figures, ("torch",))


def report_uploads(found: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Prints the times of steps beside an upload, and their ratios to those without; returns them."""
    if not found:
        return {}
    times = {kind: [Timing(cpu, wall) for wall, cpu, _ in rounds] for kind, rounds in found.items()}
    figures: dict[str, Any] = {}
    for kind, rounds in times.items():
        wall, cpu = (statistics.median(getattr(t, clock) for t in rounds) for clock in ("wall_s", "cpu_s"))
        figures[kind] = {"steps_ms": round(1e3 * wall), "steps_cpu_ms": round(1e3 * cpu), "rounds": len(rounds)}
    figures["upload"]["upload_ms"] = round(1e3 * statistics.median(seconds for *_, seconds in found["upload"]))
    for clock in ("wall_s", "cpu_s"):
        for name, other in (("A/A", "nothing, again"), ("upload over nothing", "upload")):
            figures[f"{clock} {name}"] = str(ratio(times[other], times["nothing"], clock=clock))  # type: ignore[arg-type]
    print(f"uploads  {figures}")
    return {"uploads": figures}


def main() -> None:
    """Measures with one rank and with two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one rank, under a minute")
    parser.add_argument("--ranks", type=int, nargs="+", help="how many ranks; one, then two, else")
    parser.add_argument("--rounds", type=int, help="how often every arm is run; 11 else, 3 with --quick")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 11)
    for num_ranks in options.ranks or ((1,) if options.quick else (1, 2)):
        folder = tempfile.mkdtemp()
        empty = Path(folder, "bench")
        empty.mkdir()
        try:
            job = {"folder": folder, "rounds": rounds, "num_steps": 40 if options.quick else 150}
            # The server runs in this process, which else waits.
            with serve_s3({"bench": empty}):
                ranks = run_in_ranks("benchmarks.checkpoint:run_rank", num_ranks, job, timeout=1800)
            report(num_ranks, ranks)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()

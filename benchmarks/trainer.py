"""Overhead of our trainer over a bare DeepSpeed loop: whole steps of `pretrain.training.loop.train`, ZeRO 0 to 3.

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
exit code: a step of ours may have one collective more than the bare loop, of nine float64.

`loop` is the time a step spends in our loop outside the engine's forward, backward and update, on the loop's thread of
rank 0: CPU time is what it does, wall time includes the wait for the other rank.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

# For the ranks, which inherit them. Threads other than the main one would get heaps of another kind, and our loop runs
# in such a thread here only.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MALLOC_ARENA_MAX"] = "1"

import numpy as np

from benchmarks.common import Timing, is_conclusive, print_row, ratio
from benchmarks.trainer_ours import BLOCK_STEPS, COMPARED_STEPS, RANKS, SIZES
from pretrain.config.prepare import TokenizerConfig
from pretrain.shards.index import DataIndex, build_split, write_index
from pretrain.shards.ragged import TokenDocuments, ragged_of
from pretrain.shards.writer import ShardWriter
from pretrain.tokenizer.file import dump_tokenizer
from pretrain.tokenizer.train import train_tokenizer
from tests.helpers.ranks import run_in_ranks

VOCAB_SIZE = 8192
LOSS_TOLERANCE = 1e-4
MUST, AIM = 0.97, 0.99
EXTRA_COLLECTIVES, EXTRA_BYTES = 1, 9 * 8
JUDGED = ("deepspeed", "deepspeed_defaults")


def write_data(folder: Path) -> None:
    """Writes a shard folder of random documents of up to 300 tokens; small ids are frequent, so there is much to learn.

    A run asks its tokenizer for special tokens only: one that knows no more than bytes will do.
    """
    rng = np.random.default_rng(0)
    (folder / "train").mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(dump_tokenizer(train_tokenizer(["x"], TokenizerConfig(vocab_size=257))))
    writer = ShardWriter(folder / "train/part-00000-0000.tar", "uint16")
    for _ in range(8192):
        tokens = (VOCAB_SIZE * rng.random(int(rng.integers(1, 301))) ** 4).astype(np.int64)
        writer.add(TokenDocuments(ragged_of([tokens])))
    splits = {"train": build_split([writer.close()], 4 * writer.num_tokens)}
    write_index(folder, DataIndex("0" * 64, VOCAB_SIZE, "uint16", 0, splits))


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
            held &= report(size, stage, run_in_ranks("benchmarks.trainer_job:run_job", RANKS, job, timeout=900))
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()

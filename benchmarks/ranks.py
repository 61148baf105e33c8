"""Costs of votes in a save and of heartbeats in a hang, by number of ranks: simulated in one process, on a CPU.

    python -m benchmarks.ranks [--ranks 512 1024] [--rounds 5]

A rank's part of a save of llama3.1-70b at ZeRO 3: it reads the votes of all ranks, and checks that their files are a
whole model; in the first save of a start, and in one after it, whose layouts are as before. The arm `each` is a vote
that has shapes and counts of all parameters. CPU time, user and system, median of rounds; bytes that the rank receives,
where each vote is as long as the longest.

A job that stands still: CPU seconds of the store, a process of its own, for each second, in which each rank talks to it
once; and heartbeats that are read. The arm `each` is one whose ranks all read all heartbeats. Linux only.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as td

from benchmarks.common import print_row
from pretrain import dist
from pretrain.checkpoint.layouts import AgreedLayouts, FileLayout, LayoutVote, check_complete
from pretrain.config.load import load_config
from pretrain.plan.params import parameter_shapes
from pretrain.run import heartbeat
from pretrain.run.heartbeat import Board, Messenger, Progress, Pulse
from pretrain.utils.io import CRC_CHUNK_BYTES, FileRecord
from pretrain.utils.safe_read import parse_json

MODEL = "model={preset: llama3.1-70b, vocab_size: 128256}"
STATE_BYTES = 12
"""Of a parameter: weight and two moments."""


def layouts_of(num_ranks: int) -> list[FileLayout]:
    """Returns the layout of each rank at ZeRO 3."""
    model = load_config("quickstart", [MODEL]).model
    shapes = {name: list(shape) for name, shape in parameter_shapes(model).items()}
    layouts = []
    for rank in range(num_ranks):
        lengths = {}
        for name, shape in shapes.items():
            share = -(-math.prod(shape) // num_ranks)
            length = min(share, math.prod(shape) - rank * share)
            lengths |= {name: length} if length > 0 else {}
        layouts.append(FileLayout({name: shapes[name] for name in lengths}, lengths, ["exp_avg", "exp_avg_sq"]))
    return layouts


def votes_of(layouts: Sequence[FileLayout], about: Callable[[FileLayout], Any]) -> list[bytes]:
    """Returns the vote of each rank as it travels."""
    votes = []
    for rank, layout in enumerate(layouts):
        num_bytes = STATE_BYTES * sum(layout.num_weights.values())
        crc32s = [2**31 + rank] * math.ceil(num_bytes / CRC_CHUNK_BYTES)
        record = FileRecord(f"rank-{rank:05d}.safetensors", num_bytes, crc32s)
        votes.append(json.dumps([{"record": asdict(record), "layout": about(layout)}, None]).encode())
    return votes


def time_save(votes: Sequence[bytes], check: Callable[[list[Any]], object]) -> float:
    """Returns the CPU seconds of a rank between the arrival of the votes and its agreement."""
    begun = time.process_time()
    read = [parse_json(vote)[0] for vote in votes]
    check([vote["layout"] for vote in read])
    return time.process_time() - begun


def measure(num_ranks: int, rounds: int) -> dict[str, float]:
    """Returns bytes and CPU seconds of the arms."""
    layouts = layouts_of(num_ranks)
    contents = list(dict.fromkeys(layout.encode() for layout in layouts))
    mine = layouts[0].encode()
    dist.join_bytes = lambda content, start, total: b"".join(contents)
    each = votes_of(layouts, tuple)
    first = votes_of(layouts, lambda layout: LayoutVote.on(layout.encode(), ""))
    spent: dict[str, list[float]] = {"each": [], "first": [], "next": []}
    for _ in range(rounds):
        check = lambda heard: check_complete([(FileLayout(*layout), 1) for layout in heard], {})  # noqa: E731
        spent["each"].append(time_save(each, check))
        agreed = AgreedLayouts()
        agree = lambda heard: agreed.agree([LayoutVote(*vote) for vote in heard], 0, mine)  # noqa: B023, E731
        spent["first"].append(time_save(first, agree))
        after = votes_of(layouts, lambda layout: LayoutVote.on(layout.encode(), agreed.agreed))  # noqa: B023
        spent["next"].append(time_save(after, agree))
    joined = sum(map(len, contents))
    num_bytes = {"each": max(map(len, each)), "first": max(map(len, first)), "next": max(map(len, after))}
    figures: dict[str, float] = {}
    for arm, seconds in spent.items():
        received = num_ranks * num_bytes[arm] + (joined if arm == "first" else 0)
        figures |= {f"{arm}_mb": round(received / 1e6, 2), f"{arm}_cpu_s": round(statistics.median(seconds), 4)}
    return figures | {"layouts": len(contents)}


def answer(port: Any) -> None:
    """Keeps a store until this process is ended; a process of its own."""
    store = td.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    port.recv()


def cpu_s_of(pid: int) -> float:
    """Returns the CPU seconds of another process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def measure_hang(num_ranks: int, rounds: int) -> dict[str, float]:
    """Returns the CPU seconds of the store for each second of a job that stands still, and heartbeats read in it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=answer, args=(theirs,), daemon=True)
    process.start()
    board = Board("127.0.0.1", ours.recv())
    read, num_read = board.read, [0]
    board.read = lambda ranks: (beats := read(ranks), num_read.__setitem__(0, num_read[0] + len(beats)))[0]
    figures: dict[str, float] = {}
    for arm, turns in (("each", num_ranks), ("turns", heartbeat.TURNS)):
        heartbeat.TURNS = turns
        pulses = [Pulse(Progress(), rank, 600.0, lambda: 0) for rank in range(num_ranks)]
        ranks = [Messenger(pulse, rank, num_ranks, ("", 0), 0) for rank, pulse in enumerate(pulses)]
        for seconds in range(1 + rounds):
            if seconds == 1:
                begun, num_read[0] = cpu_s_of(process.pid or 0), 0
            for messenger in ranks:
                messenger.observe(True, purpose=arm)
                messenger._round(board)
        spent = cpu_s_of(process.pid or 0) - begun
        figures |= {f"{arm}_store_cpu_s": round(spent / rounds, 3), f"{arm}_read": num_read[0] // rounds}
    process.terminate()
    return figures


def main() -> None:
    """Measures, and prints a row a number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[512, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    for num_ranks in asked.ranks:
        print_row(f"votes of a save on {num_ranks} ranks", measure(num_ranks, asked.rounds), ("torch",))
        print_row(f"a second of a hang on {num_ranks} ranks", measure_hang(num_ranks, asked.rounds), ("torch",))


if __name__ == "__main__":
    main()

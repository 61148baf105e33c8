"""Costs of votes in a save and of heartbeats in a hang, by number of ranks: simulated in one process, on a CPU.

    python -m benchmarks.ranks [--ranks 512 1024] [--rounds 5] [--light 128 256 512 1024]

A rank's part of a save of llama3.1-70b at ZeRO 3: it reads the votes of all ranks, and checks that their files are a
whole model; in the first save of a start, and in one after it, whose layouts are as before. The arm `each` is a vote
that has shapes and counts of all parameters. CPU time, user and system, median of rounds; bytes that the rank receives,
where each vote is as long as the longest.

A job that stands still: CPU seconds of the store, a process of its own, for each second, in which each rank talks to it
once; and heartbeats that are read. The arm `each` is one whose ranks all read all heartbeats. Linux only.

`--light`: so many real processes, forks without a model. Each meets the others through the job's rendezvous and its
store, sends heartbeats, and tries to take the lease of one run folder, which one of them gets. CPU time of all, wall
seconds of each phase of the slowest, and memory. A process that costs the same in every world is linear.
"""

import argparse
import json
import math
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as td

from benchmarks.common import print_row
from pretrain import dist
from pretrain.checkpoint.layouts import AgreedLayouts, FileLayout, LayoutVote, check_complete
from pretrain.config.load import load_config
from pretrain.errors import LockedError
from pretrain.plan.params import parameter_shapes
from pretrain.run import heartbeat
from pretrain.run.heartbeat import Board, Messenger, Progress, Pulse
from pretrain.run.lease import Lease
from pretrain.utils.io import CRC_CHUNK_BYTES, FileRecord
from pretrain.utils.safe_read import parse_json

MODEL = "model={preset: llama3.1-70b, vocab_size: 128256}"
STATE_BYTES = 12
"""Of a parameter: weight and two moments."""
LIGHT_BEATS = 10


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


def live_lightly(rank: int, num_ranks: int, port: int, folder: Path, told: int) -> None:
    """Is one process of a light job; tells the seconds of its phases, and whether it had the lease."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world, seconds, has_lease = dist.read_world(), {}, False
    begun = time.perf_counter()
    with dist.loopback_store(world):
        store, _, _ = next(td.rendezvous("env://", rank, num_ranks))

    def meet(phase: str) -> None:
        nonlocal begun
        seconds[phase] = round(time.perf_counter() - begun, 3)
        if store.add(phase, 1) == num_ranks:
            store.set(f"all {phase}", "")
        store.wait([f"all {phase}"])
        begun = time.perf_counter()

    meet("rendezvous")
    pulse = Pulse(Progress(), rank, 600.0, lambda: 0)
    board = None
    while board is None:
        with suppress(td.DistError):  # of two cores, the store's process has a small share: asked again, as in a run
            board = Board("127.0.0.1", port)
    for _ in range(LIGHT_BEATS):
        Messenger(pulse, rank, num_ranks, ("", 0), 0)._round(board)
    meet("heartbeats")
    lease = None
    with suppress(LockedError):
        lease, has_lease = Lease(folder / "lease"), True
    meet("lease")
    if lease is not None:
        lease.release()
    private = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "Private" in line]
    facts = {"seconds": seconds, "lease": has_lease, "mb": sum(int(words[1]) for words in private) / 1e3}
    os.write(told, (json.dumps(facts) + "\n").encode())
    if rank == 0:  # keeps the store: the last to go
        store.add("gone", 0)
        while store.add("gone", 0) < num_ranks - 1:
            time.sleep(0.05)
    else:
        store.add("gone", 1)


def measure_light(num_ranks: int) -> dict[str, Any]:
    """Returns the cost of a light job."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        reading, writing = os.pipe()
        begun, spent, processes = time.perf_counter(), [], []
        for rank in range(num_ranks):
            if not (pid := os.fork()):
                code = 1
                with suppress(BaseException):
                    live_lightly(rank, num_ranks, port, Path(name), writing)
                    code = 0
                os._exit(code)
            processes.append(pid)
        os.close(writing)
        with os.fdopen(reading) as lines:
            told = [json.loads(line) for line in lines]
        codes = []
        for pid in processes:
            _, code, usage = os.wait4(pid, 0)
            codes.append(code)
            spent.append(usage.ru_utime + usage.ru_stime)
        wall = time.perf_counter() - begun
    assert codes == [0] * num_ranks and len(told) == num_ranks, "a process failed"
    slowest = {phase: max(one["seconds"][phase] for one in told) for phase in told[0]["seconds"]}
    return {
        "cpu_s": round(sum(spent), 2),
        "cpu_ms_a_process": round(1e3 * statistics.median(spent), 1),
        "cpu_s_of_rank_0": round(spent[0], 2),
        "slowest_s": slowest,
        "wall_s": round(wall, 2),
        "mb_a_process": round(statistics.median(one["mb"] for one in told), 2),
        "leases": sum(one["lease"] for one in told),
    }


def main() -> None:
    """Measures, and prints a row a number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[512, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--light", nargs="+", type=int, help="processes of real, light jobs, and nothing else")
    asked = parser.parse_args()
    for num_ranks in asked.light or ():
        print_row(f"a light job of {num_ranks} processes", measure_light(num_ranks), ("torch",))
    for num_ranks in () if asked.light else asked.ranks:
        print_row(f"votes of a save on {num_ranks} ranks", measure(num_ranks, asked.rounds), ("torch",))
        print_row(f"a second of a hang on {num_ranks} ranks", measure_hang(num_ranks, asked.rounds), ("torch",))


if __name__ == "__main__":
    main()
